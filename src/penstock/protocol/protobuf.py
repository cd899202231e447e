"""Values to protobuf messages and back, field by field: a value bears the names of its message.

A part that is bytes here and a message there is one that we do not look into.
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
    for each in dataclasses.fields(value):
        found = getattr(value, each.name)
        if found is None:
            continue
        if isinstance(found, bytes) and _is_message(message, each.name):
            if found:
                getattr(message, each.name).MergeFromString(found)
        elif dataclasses.is_dataclass(found):
            target = getattr(message, each.name)
            target.SetInParent()
            to_message(found, target)
        elif isinstance(found, Mapping):
            target = getattr(message, each.name)
            for key, item in found.items():
                if dataclasses.is_dataclass(item):
                    target[key].SetInParent()
                    to_message(item, target[key])
                else:
                    target[key] = item
        elif isinstance(found, tuple):
            target = getattr(message, each.name)
            for item in found:
                if dataclasses.is_dataclass(item):
                    to_message(item, target.add())
                else:
                    target.append(item)
        else:
            setattr(message, each.name, found)


def _is_message(message: Any, name: str) -> bool:
    return message.DESCRIPTOR.fields_by_name[name].message_type is not None


def from_message(kind: type[_T], message: Any) -> _T:
    """The value of this kind that is in `message`."""
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
    parts = [each for each in get_args(hint) if each is not NoneType]
    if NoneType in get_args(hint):
        inner = _converter(name, parts[0])
        return lambda message, found: inner(message, found) if message.HasField(name) else None
    if get_origin(hint) is tuple:
        item = _converter(name, parts[0])
        return lambda message, found: tuple(item(message, each) for each in found)
    if get_origin(hint) is Mapping:
        value = _converter(name, parts[1])
        return lambda message, found: {key: value(message, each) for key, each in found.items()}
    if dataclasses.is_dataclass(hint):
        return lambda _message, found: from_message(hint, found)  # type: ignore[arg-type]
    if isinstance(hint, type) and issubclass(hint, enum.IntEnum):
        return lambda _message, found: _member(hint, name, found)
    if hint is bytes:
        return lambda _message, found: (
            found if isinstance(found, bytes) else found.SerializeToString(deterministic=True)
        )
    return lambda _message, found: found


def _member(kind: type[enum.IntEnum], name: str, number: int) -> enum.IntEnum:
    try:
        return kind(number)
    except ValueError as error:
        raise RemoteProtocolError(f"{name} is {number}, which is no {kind.__name__}") from error
