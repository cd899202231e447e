"""Ranges of key hashes: who has which keys.

Both ends are within the range, as on the wire; the whole is [00000000, ffffffff].
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from penstock.errors import UsageError

__all__ = ["WHOLE", "KeyRange", "shards"]

HASHES: Final = 1 << 32


@dataclass(frozen=True, slots=True, order=True)
class KeyRange:
    """Hashes from `begin` to `end`, both included."""

    begin: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.begin <= self.end < HASHES:
            raise UsageError(
                f"there is no key range from {self.begin:#x} to {self.end:#x}",
                detail="Both ends are 32-bit hashes, and the first is not above the last.",
            )

    def __str__(self) -> str:
        return f"{self.begin:08x}-{self.end:08x}"

    @property
    def width(self) -> int:
        """How many hashes there are in it."""
        return self.end - self.begin + 1

    def contains(self, key_hash: int) -> bool:
        """Whether a key of this hash is one of ours."""
        return self.begin <= key_hash <= self.end

    def overlaps(self, other: "KeyRange") -> bool:
        """Whether some hash is in both."""
        return self.begin <= other.end and other.begin <= self.end

    def covers(self, other: "KeyRange") -> bool:
        """Whether every hash of `other` is in this one."""
        return self.begin <= other.begin and other.end <= self.end

    def split(self) -> tuple["KeyRange", "KeyRange"]:
        """Two ranges that are this one together."""
        if self.width < 2:
            raise UsageError(f"key range {self} cannot be split: it has one hash")
        pivot = (self.begin + self.end + 1) // 2
        return KeyRange(self.begin, pivot - 1), KeyRange(pivot, self.end)


WHOLE: Final = KeyRange(0, HASHES - 1)


def shards(count: int) -> Sequence[KeyRange]:
    """`count` ranges that are the whole together, as even as can be."""
    if not 1 <= count <= HASHES:
        raise UsageError(f"there cannot be {count} shards")
    ends = [HASHES * each // count for each in range(count + 1)]
    return [KeyRange(begin, end - 1) for begin, end in itertools.pairwise(ends)]
