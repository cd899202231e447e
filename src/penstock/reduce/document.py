"""Lossless JSON documents, their order, and JSON pointers.

A document consists of dict, list, str, int, bool, None, and Decimal for every number with a
point or an exponent. A binary float would round 0.1, and the sum of rounded numbers depends
on the order of the additions.

The order is the order of Flow: null, booleans, numbers by value, strings by code point,
arrays, objects. Arrays compare item by item, objects by their sorted names and values.
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
    """The absence of a value, as opposed to null."""

    ABSENT = "absent"


ABSENT: Final = Absent.ABSENT

NUMBERS: Final = frozenset((int, Decimal, float))
"""Includes float for documents that `decode` did not produce; a float has the value of its repr."""

_decode: Final = msgspec.json.Decoder(float_hook=Decimal).decode
_encode: Final = msgspec.json.Encoder(decimal_format="number", order="sorted").encode


def decode(text: bytes | str, *, what: str) -> Document:
    """Parse a JSON document.

    Raises:
        DefiniteError: The text is not valid JSON, or is nested too deeply.
    """
    try:
        try:
            return _decode(text)
        except msgspec.ValidationError:
            # The integer exceeds Python's limit of digits for int(text); Decimal has no such limit.
            return json.loads(text, parse_float=Decimal, parse_int=lambda it: int(Decimal(it)))
    except (ValueError, DecimalException, RecursionError) as error:
        # The messages of both parsers contain a position and no data.
        why = "a number is out of range" if isinstance(error, DecimalException) else str(error)
        raise DefiniteError(
            f"{what} is not valid JSON",
            detail=f"The parser reports: {why}.",
            hint="Correct the document in the source.",
        ) from None


def encode(document: Document) -> bytes:
    """Encode a document as compact JSON with sorted names."""
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
    """Return the JSON type of `value`, with its article."""
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
    """Return a hashable sort key of `value`, equal for equal values."""
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
    """Return a sort key of the values at `key`, or of the whole value if the key is empty."""
    return tuple([rank(find(value, pointer)) for pointer in key]) if key else rank(value)


def parse_pointer(text: Any, *, what: str) -> Pointer:
    """Parse a JSON pointer into its tokens; "" is the whole document and has none."""
    if not isinstance(text, str) or (text and text[0] != "/"):
        raise UsageError(
            f"{what} is not a JSON pointer",
            hint='Write "" for the whole document, or "/name/0/inner".',
        )
    return tuple(token.replace("~1", "/").replace("~0", "~") for token in text.split("/")[1:])


def show_pointer(tokens: Any) -> str:
    """Format tokens as a JSON pointer."""
    return "".join("/" + str(token).replace("~", "~0").replace("/", "~1") for token in tokens)


def find(document: Document, pointer: Pointer) -> Document | Absent:
    """Return the value at `pointer`, or `ABSENT`."""
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
