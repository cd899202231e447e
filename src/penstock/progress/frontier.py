"""Frontiers of a source: one position for each partition.

A frontier divides the events of a source into those below it and the rest. A position is
exclusive: 42 covers the 42 offsets from 0 to 41. Partitions differ by source: numbers in Kafka,
names of objects in S3. A source that is one log, such as Postgres, has the partition
`SINGLE_PARTITION`.

A frontier has a position for every possible partition; a partition that is not listed is at 0.
Frontiers are ordered by position in each partition, and have least upper bounds:

    a <= b  ⟺  a[p] <= b[p] for all p  ⟺  a | b == b
"""

from collections.abc import ItemsView, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Generic, TypeAlias, TypeVar

__all__ = ["SINGLE_PARTITION", "Frontier", "Partition"]

Partition: TypeAlias = int | str | tuple[()]
"""Identifier of a partition: a number, a name, or `SINGLE_PARTITION`."""

SINGLE_PARTITION: Final[tuple[()]] = ()
"""The only partition of a source without partitions."""

P = TypeVar("P", bound=Partition)


@dataclass(frozen=True, slots=True, eq=False)
class Frontier(Generic[P]):
    """The position of each partition. Immutable and picklable."""

    _positions: Mapping[P, int] = field(default_factory=dict[P, int])

    def __post_init__(self) -> None:
        object.__setattr__(self, "_positions", dict(self._positions))

    def __getitem__(self, partition: P) -> int:
        """Return the position of a partition, 0 if it is not listed."""
        return self._positions.get(partition, 0)

    def get(self, partition: P) -> int | None:
        """Return the position of a partition, None if it is not listed."""
        return self._positions.get(partition)

    def __iter__(self) -> Iterator[P]:
        """Yield the listed partitions."""
        return iter(self._positions)

    def items(self) -> ItemsView[P, int]:
        """Return the listed partitions with their positions."""
        return self._positions.items()

    def __eq__(self, other: object) -> bool:
        """Return whether all positions are equal. A partition at 0 need not be listed."""
        if not isinstance(other, Frontier):
            return NotImplemented
        return self <= other and other <= self

    def __hash__(self) -> int:
        """Return a hash of the positions above 0."""
        return hash(frozenset(item for item in self.items() if item[1]))

    def __le__(self, other: "Frontier[P]") -> bool:
        """Return whether every event below this frontier is below the other."""
        return all(position <= other[partition] for partition, position in self.items())

    def __or__(self, other: "Frontier[P]") -> "Frontier[P]":
        """Return the least frontier at or above both."""
        ahead = {
            partition: position
            for partition, position in other.items()
            if position >= self[partition]
        }
        return Frontier({**self._positions, **ahead})
