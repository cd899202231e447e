"""Durations and sizes with units: 250ms, 1s, 5m, 24h, 7d; 64MiB, 1GiB.

Integers and booleans also accept text, because the value of a variable is text.
"""

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field

from penstock.errors import UsageError
from penstock.pipeline.validation_errors import to_value_error

__all__ = ["Duration", "Flag", "FromOne", "FromZero", "Size", "parse_duration_ms", "parse_size"]

TIMES: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
SIZES: Final = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}

LONGEST_DAYS: Final = 36_500
LARGEST_TIB: Final = 1 << 20
DIGITS_AT_MOST: Final = 18
"""Longer numbers are rejected before they are parsed."""


def parse_duration_ms(text: object) -> int:
    """Parse a duration into milliseconds.

    Raises:
        UsageError: The text is not an integer with a unit, or is too long.
    """
    amount = _parse(text, TIMES, "a length of time", "250ms, 1s, 5m, 24h or 7d")
    return _at_most(amount, LONGEST_DAYS, "d", TIMES)


def parse_size(text: object) -> int:
    """Parse a size into bytes.

    Raises:
        UsageError: The text is not an integer with a unit, or is too large.
    """
    return _at_most(_parse(text, SIZES, "a size", "64MiB or 1GiB"), LARGEST_TIB, "TiB", SIZES)


def _pattern(units: Mapping[str, int]) -> str:
    return rf"^\s*([0-9]+)\s*({'|'.join(units)})\s*$"


def _at_most(amount: int | None, most: int, unit: str, units: Mapping[str, int]) -> int:
    if amount is None or amount > most * units[unit]:
        raise UsageError("this is too much", hint=f"Give {most}{unit} at most.")
    return amount


def _parse(text: object, units: Mapping[str, int], what: str, examples: str) -> int | None:
    """Parse a number with a unit; None if it has too many digits."""
    match = re.search(_pattern(units), text) if isinstance(text, str) else None
    if match is None:
        raise UsageError(
            f"this is not {what}", hint=f"Write a whole number and a unit, such as {examples}."
        )
    digits = match[1].lstrip("0") or "0"
    return int(digits) * units[match[2]] if len(digits) <= DIGITS_AT_MOST else None


def _validator(parse: Callable[[object], int], units: Mapping[str, int]) -> BeforeValidator:
    def validate(value: object) -> int:
        try:
            return parse(value)
        except UsageError as error:
            raise to_value_error(error) from None

    return BeforeValidator(
        validate, json_schema_input_type=Annotated[str, Field(pattern=_pattern(units))]
    )


def _integer(value: object) -> object:
    if not isinstance(value, str) or not re.search(DIGITS, value):
        return value
    if len(value.strip()) > DIGITS_AT_MOST:
        raise ValueError(f"give a number of {DIGITS_AT_MOST} digits at most")
    return int(value)


def _flag(value: object) -> object:
    return {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value


DIGITS: Final = r"^\s*[0-9]+\s*$"
_Digits = Annotated[str, Field(pattern=DIGITS)]

Duration = Annotated[int, _validator(parse_duration_ms, TIMES)]
Size = Annotated[int, Field(gt=0), _validator(parse_size, SIZES)]
FromZero = Annotated[
    int,
    Field(strict=True, ge=0),
    BeforeValidator(_integer, json_schema_input_type=Annotated[int, Field(ge=0)] | _Digits),
]
FromOne = Annotated[
    int,
    Field(strict=True, ge=1),
    BeforeValidator(_integer, json_schema_input_type=Annotated[int, Field(ge=1)] | _Digits),
]
Flag = Annotated[
    bool,
    Field(strict=True),
    BeforeValidator(_flag, json_schema_input_type=bool | Literal["true", "false"]),
]
