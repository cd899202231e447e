"""JSON documents, read and written without losing a digit, and pointers into them.

A document is what JSON is made of in Python: dict, list, str, int, bool, None, and
Decimal for every number with a point or an exponent. A binary float would round 0.1,
and a sum of rounded numbers depends on the order in which it was taken.

The order is Flow's: null, booleans, numbers by value, strings by code point, arrays,
objects; both of the last go item by item, objects in order of their names.
"""

import json
from collections.abc import Sequence
from decimal import Decimal, DecimalException
from enum import Enum
from typing import Any, Final, TypeAlias

import msgspec

from penstock.errors import DefiniteError, UsageError

__all__ = [
    "ABSENT",
    "NUMBERS",
    "Absent",
    "Document",
    "Pointer",
    "decode",
    "encode",
    "find",
    "kind_of",
    "parse_pointer",
    "rank",
    "rank_by",
    "show_pointer",
]

Document: TypeAlias = Any
Pointer: TypeAlias = tuple[str, ...]


class Absent(Enum):
    """Where there is no value, as opposed to a null."""

    ABSENT = "absent"


ABSENT: Final = Absent.ABSENT

NUMBERS: Final = frozenset((int, Decimal, float))
"""Documents that were not read by `decode` may hold floats; they are taken at their repr."""

_decode: Final = msgspec.json.Decoder(float_hook=Decimal).decode
_encode: Final = msgspec.json.Encoder(decimal_format="number", order="sorted").encode


def decode(text: bytes | str, *, what: str) -> Document:
    """The document in `text`.

    Raises:
        DefiniteError: it is not JSON, or too deep for us.
    """
    try:
        try:
            return _decode(text)
        except msgspec.ValidationError:
            # More digits than Python turns into an int by itself; a decimal has no such limit.
            return json.loads(text, parse_float=Decimal, parse_int=lambda it: int(Decimal(it)))
    except (ValueError, DecimalException, RecursionError) as error:
        # The messages of both readers tell a position, and never what stands there.
        why = "a number is out of range" if isinstance(error, DecimalException) else str(error)
        raise DefiniteError(
            f"{what} is not JSON that can be read",
            detail=f"The reader says: {why}.",
            hint="Correct it at its source.",
        ) from None


def encode(document: Document) -> bytes:
    """The document as text, compact, its names in order."""
    try:
        return _encode(document)
    except ValueError:
        return _encode(_without_long_integers(document))


def _without_long_integers(value: Document) -> Document:
    if type(value) is int:
        return Decimal(value)
    if type(value) is list:
        return [_without_long_integers(item) for item in value]
    if type(value) is dict:
        return {name: _without_long_integers(item) for name, item in value.items()}
    return value


def kind_of(value: Document | Absent) -> str:
    """What JSON calls the type of `value`, with its article."""
    match value:
        case Absent.ABSENT:
            return "nothing"
        case None:
            return "null"
        case bool():
            return "a boolean"
        case str():
            return "a string"
        case dict():
            return "an object"
        case list():
            return "an array"
        case _:
            return "a number"


def rank(value: Document) -> tuple[Any, ...]:
    """What to compare in place of `value`; equal for equal values, and hashable."""
    kind = type(value)
    if kind is str:
        return (3, value)
    if kind in NUMBERS:
        return (2, Decimal(repr(value)) if kind is float else value)
    if kind is dict:
        return (5, tuple([(name, rank(value[name])) for name in sorted(value)]))
    if kind is list:
        return (4, tuple([rank(item) for item in value]))
    if value is None:
        return (0,)
    return (-1,) if value is ABSENT else (1, value)


def rank_by(key: Sequence[Pointer], value: Document) -> tuple[Any, ...]:
    """What to compare in place of what `key` finds in `value`; without, of the whole."""
    return tuple([rank(find(value, each)) for each in key]) if key else rank(value)


def parse_pointer(text: Any, *, what: str) -> Pointer:
    """The tokens of a JSON pointer: none for "", the whole document."""
    if not isinstance(text, str) or (text and text[0] != "/"):
        raise UsageError(
            f"{what} is not a JSON pointer", hint='Write "" for the whole, or "/name/0/inner".'
        )
    return tuple(token.replace("~1", "/").replace("~0", "~") for token in text.split("/")[1:])


def show_pointer(tokens: Any) -> str:
    """The tokens as a JSON pointer."""
    return "".join("/" + str(token).replace("~", "~0").replace("/", "~1") for token in tokens)


def find(document: Document, pointer: Pointer) -> Document | Absent:
    """What `pointer` points to in `document`."""
    for token in pointer:
        if type(document) is dict:
            if token not in document:
                return ABSENT
            document = document[token]
        elif type(document) is list:
            if not (token.isascii() and token.isdecimal()) or (token[0] == "0" and token != "0"):
                return ABSENT
            if len(token) > 10 or int(token) >= len(document):
                return ABSENT
            document = document[int(token)]
        else:
            return ABSENT
    return document
