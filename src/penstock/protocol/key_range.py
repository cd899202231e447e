"""Key ranges of shards: intervals of 32-bit key hashes.

Both ends are inclusive, as on the wire. The full range is [00000000, ffffffff].
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from penstock.errors import UsageError

__all__ = ["WHOLE", "KeyRange", "split_evenly"]

HASHES: Final = 1 << 32


@dataclass(frozen=True, slots=True, order=True)
class KeyRange:
    """Interval of key hashes with inclusive ends."""

    begin: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.begin <= self.end < HASHES:
            raise UsageError(
                f"key range from {self.begin:#x} to {self.end:#x} is invalid",
                detail="Both ends must be 32-bit hashes, and begin must not exceed end.",
            )

    def __str__(self) -> str:
        return f"{self.begin:08x}-{self.end:08x}"

    @property
    def width(self) -> int:
        """Return the number of hashes."""
        return self.end - self.begin + 1

    def contains(self, key_hash: int) -> bool:
        """Return whether the range contains a hash."""
        return self.begin <= key_hash <= self.end

    def overlaps(self, other: "KeyRange") -> bool:
        """Return whether both ranges contain a common hash."""
        return self.begin <= other.end and other.begin <= self.end

    def covers(self, other: "KeyRange") -> bool:
        """Return whether this range contains every hash of `other`."""
        return self.begin <= other.begin and other.end <= self.end

    def split(self) -> tuple["KeyRange", "KeyRange"]:
        """Return the two halves of this range."""
        if self.width < 2:
            raise UsageError(f"cannot split key range {self}: it contains one hash")
        pivot = (self.begin + self.end + 1) // 2
        return KeyRange(self.begin, pivot - 1), KeyRange(pivot, self.end)


WHOLE: Final = KeyRange(0, HASHES - 1)


def split_evenly(count: int) -> Sequence[KeyRange]:
    """Return `count` ranges that partition all hashes. Widths differ by at most one."""
    if not 1 <= count <= HASHES:
        raise UsageError(f"number of shards must be between 1 and {HASHES}, not {count}")
    boundaries = [HASHES * index // count for index in range(count + 1)]
    return [KeyRange(begin, end - 1) for begin, end in itertools.pairwise(boundaries)]
