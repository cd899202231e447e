"""Codecs: conversion between keys or values of a collection and a stored column.

The name and version of a codec are stored with the collection. A collection rejects a codec with
another name. A newer version of a codec reads the data of older versions: `decode` receives the
version that wrote the data.

Built-in codecs store columns that any tool can read: text as text, 64-bit integers as integers,
big integers as decimal text, JSON as text with sorted keys, unit as null.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final, Protocol

import msgspec
import pyarrow as pa

from penstock.errors import UsageError

__all__ = ["BIGINT", "BUILT_IN", "BYTES", "INT64", "JSON", "TEXT", "UNIT", "Codec", "UserCodec"]

_DEEPEST: Final = 200
"""Maximum nesting of a JSON document. Python cannot decode a thousand levels."""


class Codec(Protocol):
    """Converts values to the elements of a column of type `stored_as`, and back."""

    @property
    def name(self) -> str:
        """Name, stored with the collection, which rejects other names."""
        ...

    @property
    def version(self) -> int:
        """Version, stored with the collection, which rejects older versions."""
        ...

    @property
    def stored_as(self) -> pa.DataType:
        """Type of the stored column."""
        ...

    def encode(self, value: Any, /) -> Any:
        """Return the stored element for `value`.

        Raises:
            UsageError: the codec cannot store the value.
        """
        ...

    def decode(self, stored: Any, version: int, /) -> Any:
        """Return the value of an element that `version` of this codec stored."""
        ...


@dataclass(frozen=True, slots=True)
class _BuiltIn:
    name: str
    stored_as: pa.DataType
    encode: Callable[[Any], Any]
    decode: Callable[[Any, int], Any]
    version: int = 1


@dataclass(frozen=True, slots=True)
class UserCodec:
    """A user-defined codec, stored as bytes.

    `from_bytes` receives the bytes and the version that wrote them.
    """

    name: str
    version: int
    to_bytes: Callable[[Any], bytes]
    from_bytes: Callable[[bytes, int], Any]

    def __post_init__(self) -> None:
        if self.name in BUILT_IN:
            raise UsageError(
                f'codec "{self.name}" has the name of a built-in codec',
                hint=f"Choose a name other than {', '.join(BUILT_IN)}.",
            )

    @property
    def stored_as(self) -> pa.DataType:
        return pa.binary()

    def encode(self, value: Any, /) -> bytes:
        stored = self.to_bytes(value)
        if not isinstance(stored, bytes):
            raise UsageError(
                f'function to_bytes of codec "{self.name}" returned {type(stored).__name__}',
                hint="Return bytes from to_bytes.",
            )
        return stored

    def decode(self, stored: bytes, version: int, /) -> Any:
        return self.from_bytes(stored, version)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _unfit("text", value, "a str")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise _unfit("text", value, "text without lone surrogates") from error
    return value


def _bytes(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise _unfit("bytes", value, "bytes")
    return value


def _int64(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise _unfit("int64", value, "an int")
    if not -(2**63) <= value < 2**63:
        raise _unfit("int64", value, "an int of 64 bits, or use the codec bigint")
    return value


def _bigint(value: Any) -> str:
    if not isinstance(value, int) or isinstance(value, bool):
        raise _unfit("bigint", value, "an int")
    # Through Decimal, because Python limits the digits of str and int conversions.
    return str(Decimal(value))


def _json(value: Any) -> str:
    _check_json(value, value, 0)
    try:
        return msgspec.json.encode(value, order="sorted").decode()
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise _unfit("json", value, "a JSON document") from error


def _check_json(document: Any, value: Any, depth: int) -> None:
    """Check that `value`, a part of `document`, is equal after encoding and decoding."""
    if depth > _DEEPEST:
        raise _unfit("json", document, f"at most {_DEEPEST} levels")
    kind = type(value)
    if kind is dict:
        for name, inner in value.items():
            if type(name) is not str:
                raise _unfit("json", document, "objects whose names are str")
            _check_json(document, inner, depth + 1)
    elif kind is list:
        for inner in value:
            _check_json(document, inner, depth + 1)
    elif kind is float:
        if not math.isfinite(value):
            raise _unfit("json", document, f"finite numbers, not {value}")
    elif kind not in (str, int, bool) and value is not None:
        raise _unfit(
            "json", document, f"dict, list, str, int, float, bool and None, not {kind.__name__}"
        )


def _unit(value: Any) -> None:
    if value is not None and value != ():
        raise _unfit("unit", value, "None")


def _unfit(codec: str, value: Any, valid: str) -> UsageError:
    return UsageError(
        f'codec "{codec}" cannot store a value of type {type(value).__name__}',
        hint=f"Give {valid}.",
    )


def _same(stored: Any, _version: int) -> Any:
    return stored


TEXT: Final[Codec] = _BuiltIn("text", pa.string(), _text, _same)
BYTES: Final[Codec] = _BuiltIn("bytes", pa.binary(), _bytes, _same)
INT64: Final[Codec] = _BuiltIn("int64", pa.int64(), _int64, _same)
BIGINT: Final[Codec] = _BuiltIn(
    "bigint", pa.string(), _bigint, lambda stored, _: int(Decimal(stored))
)
JSON: Final[Codec] = _BuiltIn(
    "json", pa.string(), _json, lambda stored, _: msgspec.json.decode(stored)
)
UNIT: Final[Codec] = _BuiltIn("unit", pa.null(), _unit, lambda _stored, _version: None)

BUILT_IN: Final = {codec.name: codec for codec in (TEXT, BYTES, INT64, BIGINT, JSON, UNIT)}
