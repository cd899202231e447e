"""Conversion between dataclasses and protobuf messages.

The fields of a dataclass have the names of the fields of its message. A field that is `bytes`
here and a message there is passed on without being parsed.
"""

import dataclasses
import enum
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from types import NoneType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from penstock.protocol.errors import RemoteProtocolError

__all__ = ["from_message", "to_message"]

_T = TypeVar("_T")


def to_message(value: Any, message: Any) -> None:
    """Write `value` into `message`."""
    for attribute in dataclasses.fields(value):
        content = getattr(value, attribute.name)
        if content is None:
            continue
        if isinstance(content, bytes) and _is_message(message, attribute.name):
            if content:
                getattr(message, attribute.name).MergeFromString(content)
        elif dataclasses.is_dataclass(content):
            target = getattr(message, attribute.name)
            target.SetInParent()
            to_message(content, target)
        elif isinstance(content, Mapping):
            target = getattr(message, attribute.name)
            for key, item in content.items():
                if dataclasses.is_dataclass(item):
                    target[key].SetInParent()
                    to_message(item, target[key])
                else:
                    target[key] = item
        elif isinstance(content, tuple):
            target = getattr(message, attribute.name)
            for item in content:
                if dataclasses.is_dataclass(item):
                    to_message(item, target.add())
                else:
                    target.append(item)
        else:
            setattr(message, attribute.name, content)


def _is_message(message: Any, name: str) -> bool:
    return message.DESCRIPTOR.fields_by_name[name].message_type is not None


def from_message(kind: type[_T], message: Any) -> _T:
    """Return the value of type `kind` that `message` holds."""
    return kind(
        **{
            name: convert(message, getattr(message, name))
            for name, convert in _parts(cast(Hashable, kind))
        }
    )


@cache
def _parts(kind: Hashable) -> Sequence[tuple[str, Callable[[Any, Any], Any]]]:
    return [(name, _converter(name, hint)) for name, hint in get_type_hints(kind).items()]


def _converter(name: str, hint: Any) -> Callable[[Any, Any], Any]:
    parts = [part for part in get_args(hint) if part is not NoneType]
    if NoneType in get_args(hint):
        convert = _converter(name, parts[0])
        return lambda message, content: (
            convert(message, content) if message.HasField(name) else None
        )
    if get_origin(hint) is tuple:
        convert_item = _converter(name, parts[0])
        return lambda message, content: tuple(convert_item(message, item) for item in content)
    if get_origin(hint) is Mapping:
        convert_value = _converter(name, parts[1])
        return lambda message, content: {
            key: convert_value(message, value) for key, value in content.items()
        }
    if dataclasses.is_dataclass(hint):
        return lambda _message, content: from_message(hint, content)  # type: ignore[arg-type]
    if isinstance(hint, type) and issubclass(hint, enum.IntEnum):
        return lambda _message, content: _member(hint, name, content)
    if hint is bytes:
        return lambda _message, content: (
            content if isinstance(content, bytes) else content.SerializeToString(deterministic=True)
        )
    return lambda _message, content: content


def _member(kind: type[enum.IntEnum], name: str, number: int) -> enum.IntEnum:
    try:
        return kind(number)
    except ValueError as error:
        raise RemoteProtocolError(f"{number} is not a value of {name} ({kind.__name__})") from error
