"""Lengths of time and sizes as people write them: 250ms, 1s, 5m, 24h, 7d; 64MiB, 1GiB.

And plain numbers and flags, of which a variable's value is the text.
"""

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field

from penstock.errors import UsageError
from penstock.pipeline.problems import told

__all__ = ["Duration", "Flag", "FromOne", "FromZero", "Size", "bytes_of", "milliseconds"]

TIMES: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
SIZES: Final = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}

LONGEST_DAYS: Final = 36_500
LARGEST_TIB: Final = 1 << 20
DIGITS_AT_MOST: Final = 18
"""Longer numbers are not even read."""


def milliseconds(text: object) -> int:
    """The milliseconds in `text`.

    Raises:
        UsageError: it is not a number followed by a unit, or longer than anybody lives.
    """
    measured = _measured(text, TIMES, "a length of time", "250ms, 1s, 5m, 24h or 7d")
    return _at_most(measured, LONGEST_DAYS, "d", TIMES)


def bytes_of(text: object) -> int:
    """The bytes in `text`.

    Raises:
        UsageError: it is not a number followed by a unit, or more than there is.
    """
    return _at_most(_measured(text, SIZES, "a size", "64MiB or 1GiB"), LARGEST_TIB, "TiB", SIZES)


def _pattern(units: Mapping[str, int]) -> str:
    return rf"^\s*([0-9]+)\s*({'|'.join(units)})\s*$"


def _at_most(measured: int | None, most: int, unit: str, units: Mapping[str, int]) -> int:
    if measured is None or measured > most * units[unit]:
        raise UsageError("this is too much", hint=f"Give {most}{unit} at most.")
    return measured


def _measured(text: object, units: Mapping[str, int], what: str, examples: str) -> int | None:
    """What `text` says; None if it is a number that nobody means."""
    written = re.search(_pattern(units), text) if isinstance(text, str) else None
    if written is None:
        raise UsageError(
            f"this is not {what}", hint=f"Write a whole number and a unit, such as {examples}."
        )
    digits = written[1].lstrip("0") or "0"
    return int(digits) * units[written[2]] if len(digits) <= DIGITS_AT_MOST else None


def _measure(parse: Callable[[object], int], units: Mapping[str, int]) -> BeforeValidator:
    def parsed(value: object) -> int:
        try:
            return parse(value)
        except UsageError as error:
            raise told(error) from None

    return BeforeValidator(
        parsed, json_schema_input_type=Annotated[str, Field(pattern=_pattern(units))]
    )


def _whole(value: object) -> object:
    if not isinstance(value, str) or not re.search(DIGITS, value):
        return value
    if len(value.strip()) > DIGITS_AT_MOST:
        raise ValueError(f"give a number of {DIGITS_AT_MOST} digits at most")
    return int(value)


def _flag(value: object) -> object:
    return {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value


DIGITS: Final = r"^\s*[0-9]+\s*$"
_Digits = Annotated[str, Field(pattern=DIGITS)]

Duration = Annotated[int, _measure(milliseconds, TIMES)]
Size = Annotated[int, Field(gt=0), _measure(bytes_of, SIZES)]
FromZero = Annotated[
    int,
    Field(strict=True, ge=0),
    BeforeValidator(_whole, json_schema_input_type=Annotated[int, Field(ge=0)] | _Digits),
]
FromOne = Annotated[
    int,
    Field(strict=True, ge=1),
    BeforeValidator(_whole, json_schema_input_type=Annotated[int, Field(ge=1)] | _Digits),
]
Flag = Annotated[
    bool,
    Field(strict=True),
    BeforeValidator(_flag, json_schema_input_type=bool | Literal["true", "false"]),
]
