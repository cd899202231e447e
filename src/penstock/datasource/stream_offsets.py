"""How far a stream has come, and how much more of it to admit. Pure.

A stream gives each update of a collection once, in order of time, from the
time it begins at:

    begins                    upper
    ──┼─────────────────────────┼─────────────► time
      │ given                   │ not yet

With a snapshot all that lies before `begins` is given at that time, so nothing
tells the two cases apart but the first batch.

Spark writes down where a batch ends before it runs, and nothing else; on a
restart it asks where the stream begins a second time. By then "latest" means
something else. So the end of the first batch says where it began, and that
counts.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from penstock.errors import UsageError
from penstock.persist.state import END, CollectionState, SchemaVersion, columns_of

__all__ = ["Offset", "admitted", "begun_at", "schema_ends"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offset:
    """Everything below `upper` has been given."""

    collection: str
    """Which one, for all time: another of the same name is not it."""

    upper: int
    begins: int | None = None
    """The stream's first time; known up to the end of its first batch."""

    snapshot: bool = False
    """Whether all that was before is given at `begins`."""

    @property
    def fresh(self) -> bool:
        """Whether nothing has been given yet."""
        return self.upper == self.begins

    @property
    def needs(self) -> int:
        """The time from which on history must be kept, to go on from here."""
        return self.upper if self.fresh and self.snapshot else max(self.upper - 1, 0)

    def up_to(self, upper: int) -> "Offset":
        """Where a batch ends that begins here."""
        if not self.fresh:
            return Offset(collection=self.collection, upper=upper)
        return Offset(
            collection=self.collection, upper=upper, begins=self.begins, snapshot=self.snapshot
        )

    def to_json(self) -> dict[str, Any]:
        """As Spark keeps it."""
        told: dict[str, Any] = {"collection": self.collection, "upper": self.upper}
        return (
            told
            if self.begins is None
            else {
                **told,
                "begins": self.begins,
                "snapshot": self.snapshot,
            }
        )

    @staticmethod
    def from_json(told: dict[str, Any]) -> "Offset":
        """What Spark kept."""
        try:
            return Offset(**told)
        except TypeError as error:
            raise UsageError(
                "checkpoint was not made by a stream of this format",
                detail=f"It holds the offset {told!r:.200}.",
                hint="Give the query a checkpoint location of its own.",
            ) from error


def begun_at(start: Offset, end: Offset) -> Offset:
    """Where a first batch that ends at `end` began, whatever its beginning is said to be now."""
    if end.begins is None:
        return start
    return Offset(
        collection=start.collection, upper=end.begins, begins=end.begins, snapshot=end.snapshot
    )


def schema_ends(collection: CollectionState, schema: SchemaVersion) -> int:
    """The first time whose rows have other columns than `schema`."""
    columns = columns_of(schema)
    later = (version for version in collection.schemas if version.version > schema.version)
    return next((v.since for v in later if not columns_of(v).equals(columns)), END)


def admitted(counts: Iterable[tuple[int, int]], upper: int, limit: int) -> int:
    """The largest upper, up to `upper`, with at most `limit` updates below it.

    `counts` says how many updates each time has, in order. A time is given as
    a whole, so the first one is admitted however many it has.

        >>> admitted([(3, 2), (5, 2), (9, 1)], 20, 4)
        9
        >>> admitted([(3, 7), (5, 2)], 20, 4)
        5
    """
    total = 0
    for time, count in counts:
        if total and total + count > limit:
            return time
        total += count
    return upper
