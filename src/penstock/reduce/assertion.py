"""The keywords of a JSON schema that only accept or reject a value.

Each keyword becomes a function of the value. As the specification defines, a keyword about
numbers accepts every value that is not a number, and so on.
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


def _type(expected_value: Any, at: str) -> Test:
    names = [expected_value] if isinstance(expected_value, str) else expected_value
    if not isinstance(names, list) or not all(
        isinstance(name, str) and name in TYPES for name in names
    ):
        raise _invalid(at, f"one or a list of {', '.join(TYPES)}")
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


def _const(expected_value: Any, _at: str) -> Test:
    expected = rank(expected_value)
    return lambda value: rank(value) == expected


def _enum(expected_value: Any, at: str) -> Test:
    if not isinstance(expected_value, list):
        raise _invalid(at, "a list")
    expected = frozenset(map(rank, expected_value))
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
        raise _invalid(at, "a number above 0")
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


def _pattern(expected_value: Any, at: str) -> Test:
    search = regex(expected_value, at).search
    return lambda value: type(value) is not str or search(value) is not None


def _unique_items(expected_value: Any, at: str) -> Test:
    if not isinstance(expected_value, bool):
        raise _invalid(at, "true or false")
    if not expected_value:
        return lambda _: True
    return lambda value: type(value) is not list or len(set(map(rank, value))) == len(value)


def _required(expected_value: Any, at: str) -> Test:
    names = _names(expected_value, at)
    return lambda value: type(value) is not dict or names <= value.keys()


def _dependent_required(expected_value: Any, at: str) -> Test:
    if not isinstance(expected_value, dict):
        raise _invalid(at, "an object of lists of names")
    needs = {name: _names(others, f"{at}/{name}") for name, others in expected_value.items()}
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
"""Factory of each keyword: from its value and its place in the schema to a test."""


def regex(pattern: Any, at: str) -> re.Pattern[str]:
    """Compile a regular expression of a JSON schema, as far as Python supports its dialect."""
    if not isinstance(pattern, str):
        raise _invalid(at, "a regular expression")
    # In ECMA-262 `$` matches only at the end, and \d and \w are ASCII; Python's `$` also matches
    # before a final newline. One difference remains: \s is ASCII here, and Unicode in ECMA-262.
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
            f'regular expression "{at}" is not supported',
            detail=f"Python reports: {error}.",
            hint="Avoid syntax that Python does not have, such as \\p{…}.",
        ) from error


def _number(value: Any, at: str) -> int | Decimal:
    if type(value) is float:
        return Decimal(repr(value))
    if type(value) not in NUMBERS:
        raise _invalid(at, "a number")
    return value  # type: ignore[no-any-return]


def count_of(value: Any, at: str) -> int:
    """Parse the non-negative integer of the keyword at `at`."""
    number = _number(value, at)
    if number < 0 or number != int(number):
        raise _invalid(at, "a whole number from 0")
    return int(number)


def _names(value: Any, at: str) -> frozenset[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise _invalid(at, "a list of names")
    return frozenset(value)


def _invalid(at: str, valid_form: str) -> UsageError:
    return UsageError(
        f'value of JSON schema keyword "{at}" is invalid', hint=f"Write {valid_form}."
    )
