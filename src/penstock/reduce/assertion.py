"""The keywords of a JSON schema that say yes or no to a value, and nothing else.

Each becomes a function of the value. A keyword about numbers says yes to everything
that is no number, and so on, as the specification has it.
"""

import re
from collections.abc import Callable, Mapping, Sized
from decimal import Decimal
from typing import Any, Final, TypeAlias

from penstock.errors import UsageError
from penstock.reduce.document import NUMBERS, Document, rank
from penstock.reduce.number import is_multiple

__all__ = ["ASSERTIONS", "TYPES", "Test", "count_of", "regex"]

Test: TypeAlias = Callable[[Document], bool]

TYPES: Final[Mapping[str, frozenset[type]]] = {
    "array": frozenset((list,)),
    "boolean": frozenset((bool,)),
    "integer": frozenset((int,)),
    "null": frozenset((type(None),)),
    "number": NUMBERS,
    "object": frozenset((dict,)),
    "string": frozenset((str,)),
}


def _type(wanted: Any, at: str) -> Test:
    names = [wanted] if isinstance(wanted, str) else wanted
    if not isinstance(names, list) or not all(
        isinstance(name, str) and name in TYPES for name in names
    ):
        raise _unfit(at, f"one or a list of {', '.join(TYPES)}")
    kinds = frozenset[type]().union(*(TYPES[name] for name in names))
    if "integer" in names and "number" not in names:
        return lambda value: type(value) in kinds or _is_whole(value)
    if len(kinds) == 1:
        (kind,) = kinds
        return lambda value: type(value) is kind
    return lambda value: type(value) in kinds


def _is_whole(value: Document) -> bool:
    if type(value) is float:
        return value.is_integer()
    return type(value) is Decimal and value == value.to_integral_value()


def _const(wanted: Any, _at: str) -> Test:
    expected = rank(wanted)
    return lambda value: rank(value) == expected


def _enum(wanted: Any, at: str) -> Test:
    if not isinstance(wanted, list):
        raise _unfit(at, "a list")
    expected = frozenset(map(rank, wanted))
    return lambda value: rank(value) in expected


def _minimum(bound: Any, at: str) -> Test:
    least = _number(bound, at)
    return lambda value: type(value) not in NUMBERS or value >= least


def _maximum(bound: Any, at: str) -> Test:
    most = _number(bound, at)
    return lambda value: type(value) not in NUMBERS or value <= most


def _exclusive_minimum(bound: Any, at: str) -> Test:
    below = _number(bound, at)
    return lambda value: type(value) not in NUMBERS or value > below


def _exclusive_maximum(bound: Any, at: str) -> Test:
    above = _number(bound, at)
    return lambda value: type(value) not in NUMBERS or value < above


def _multiple_of(bound: Any, at: str) -> Test:
    unit = Decimal(_number(bound, at))
    if unit <= 0:
        raise _unfit(at, "a number above 0")
    return lambda value: type(value) not in NUMBERS or is_multiple(value, unit)


def _at_least(kind: type[Sized]) -> Callable[[Any, str], Test]:
    def make(bound: Any, at: str) -> Test:
        least = count_of(bound, at)
        return lambda value: type(value) is not kind or len(value) >= least

    return make


def _at_most(kind: type[Sized]) -> Callable[[Any, str], Test]:
    def make(bound: Any, at: str) -> Test:
        most = count_of(bound, at)
        return lambda value: type(value) is not kind or len(value) <= most

    return make


def _pattern(wanted: Any, at: str) -> Test:
    search = regex(wanted, at).search
    return lambda value: type(value) is not str or search(value) is not None


def _unique_items(wanted: Any, at: str) -> Test:
    if not isinstance(wanted, bool):
        raise _unfit(at, "true or false")
    if not wanted:
        return lambda _: True
    return lambda value: type(value) is not list or len(set(map(rank, value))) == len(value)


def _required(wanted: Any, at: str) -> Test:
    names = _names(wanted, at)
    return lambda value: type(value) is not dict or names <= value.keys()


def _dependent_required(wanted: Any, at: str) -> Test:
    if not isinstance(wanted, dict):
        raise _unfit(at, "an object of lists of names")
    needs = {name: _names(others, f"{at}/{name}") for name, others in wanted.items()}
    return lambda value: (
        type(value) is not dict
        or all(others <= value.keys() for name, others in needs.items() if name in value)
    )


ASSERTIONS: Final[Mapping[str, Callable[[Any, str], Test]]] = {
    "type": _type,
    "const": _const,
    "enum": _enum,
    "minimum": _minimum,
    "maximum": _maximum,
    "exclusiveMinimum": _exclusive_minimum,
    "exclusiveMaximum": _exclusive_maximum,
    "multipleOf": _multiple_of,
    "minLength": _at_least(str),
    "maxLength": _at_most(str),
    "pattern": _pattern,
    "minItems": _at_least(list),
    "maxItems": _at_most(list),
    "uniqueItems": _unique_items,
    "minProperties": _at_least(dict),
    "maxProperties": _at_most(dict),
    "required": _required,
    "dependentRequired": _dependent_required,
}
"""From each keyword to what makes a test of what it says, at its place in the schema."""


def regex(pattern: Any, at: str) -> re.Pattern[str]:
    """A pattern of the kind that JSON schemas use, as far as Python has it."""
    if not isinstance(pattern, str):
        raise _unfit(at, "a regular expression")
    # There `$` is the very end and \d, \w are ASCII; Python's `$` is also before a last newline.
    # That \s, which is not, is ASCII too is a difference that is left.
    ours = re.sub(
        r"\\.|\[(?:\\.|[^\]\\])*\]|\$",
        lambda m: r"\Z" if m[0] == "$" else m[0],
        pattern,
        flags=re.DOTALL,
    )
    try:
        return re.compile(ours, re.ASCII)
    except (re.error, RecursionError, OverflowError) as error:
        raise UsageError(
            f'regular expression "{at}" cannot be used',
            detail=f"Python says: {error}.",
            hint="Write it without what only other dialects have, such as \\p{…}.",
        ) from error


def _number(value: Any, at: str) -> int | Decimal:
    if type(value) is float:
        return Decimal(repr(value))
    if type(value) not in NUMBERS:
        raise _unfit(at, "a number")
    return value  # type: ignore[no-any-return]


def count_of(value: Any, at: str) -> int:
    """What the keyword at `at` says, a whole number."""
    number = _number(value, at)
    if number < 0 or number != int(number):
        raise _unfit(at, "a whole number from 0")
    return int(number)


def _names(value: Any, at: str) -> frozenset[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise _unfit(at, "a list of names")
    return frozenset(value)


def _unfit(at: str, wanted: str) -> UsageError:
    return UsageError(f'keyword "{at}" of a JSON schema cannot be used', hint=f"Give it {wanted}.")
