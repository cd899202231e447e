"""Exact sums of any length.

The sum of integers is an integer; with a decimal it is a decimal; with a string that holds a
number it is a string. The type of a sum is the widest type of its terms, so neither type nor
value depends on the grouping of the additions.
"""

import re
from decimal import Context, Decimal, DecimalException, Inexact, InvalidOperation
from typing import Final, TypeAlias

from penstock.reduce.document import NUMBERS, Document

__all__ = ["MOST_DIGITS", "TooLong", "add", "is_multiple", "normalize"]

MOST_DIGITS: Final = 100_000
"""Limit of the digits in positional notation: `1e999999999` has a billion."""

_EXACTLY: Final = Context(
    prec=4 * MOST_DIGITS, Emax=10**9, Emin=-(10**9), traps=[Inexact, InvalidOperation]
)
_NUMBER: Final = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)

_Term: TypeAlias = int | Decimal


class TooLong(Exception):
    """A number has more than `MOST_DIGITS` digits."""


def add(left: Document, right: Document) -> Document | None:
    """Return the sum, or None if a value is not a number."""
    if type(left) is int and type(right) is int:
        return left + right
    one, other = _term(left), _term(right)
    if one is None or other is None:
        return None
    try:
        total = one + other if type(one) is type(other) is int else _EXACTLY.add(one, other)
    except DecimalException:
        raise TooLong from None
    return _text(total) if type(left) is str or type(right) is str else total


def normalize(value: Document) -> Document | None:
    """Return the value in the form of a sum, or None if it is not a number."""
    term = _term(value)
    return _text(term) if type(value) is str and term is not None else term


def is_multiple(value: Document, unit: Decimal) -> bool:
    """Return whether the number `value` is an integer multiple of `unit`."""
    term = _term(value)
    assert term is not None
    try:
        return _EXACTLY.remainder(term, unit) == 0
    except DecimalException:
        raise TooLong from None


def _term(value: Document) -> _Term | None:
    kind = type(value)
    if kind is int:
        return value  # type: ignore[no-any-return]
    if kind is str:
        if not _NUMBER.fullmatch(value):
            return None
        try:
            value = Decimal(value)
        except DecimalException:
            raise TooLong from None
    elif kind is float:
        value = Decimal(repr(value))
    elif kind not in NUMBERS:
        return None
    if not value.is_finite():
        return None
    if abs(value.adjusted()) > MOST_DIGITS:
        raise TooLong
    return value  # type: ignore[no-any-return]


def _text(term: _Term) -> str:
    return format(Decimal(term), "f")
