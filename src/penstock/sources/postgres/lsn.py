"""Positions in a Postgres write-ahead log."""

import re
from dataclasses import dataclass
from typing import Final, Self

from penstock.errors import UsageError

__all__ = ["Lsn"]


@dataclass(frozen=True, slots=True, order=True)
class Lsn:
    """Byte position in the WAL, printed as Postgres prints it."""

    position: int

    def __post_init__(self) -> None:
        if not 0 <= self.position < 1 << 64:
            raise UsageError(
                f"log position {self.position} is out of range",
                detail="A position is a number of bytes and has at most 64 bits.",
            )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the form `16/B374D848`."""
        printed = _PRINTED.fullmatch(text)
        if printed is None:
            raise UsageError(
                f'log position "{text}" is malformed',
                hint='Write it as Postgres does, for example "16/B374D848".',
            )
        high, low = (int(half, 16) for half in printed.groups())
        return cls(high << 32 | low)

    def __str__(self) -> str:
        return f"{self.position >> 32:X}/{self.position & 0xFFFF_FFFF:X}"

    def __int__(self) -> int:
        return self.position


_PRINTED: Final = re.compile(r"([0-9A-F]{1,8})/([0-9A-F]{1,8})", re.IGNORECASE)
