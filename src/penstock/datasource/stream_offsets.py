"""Offsets of a stream, and its admission control. Pure.

A stream delivers each update of a collection once, in the order of time, from its first time
on:

    begins                    upper
    ──┼─────────────────────────┼─────────────► time
      │ delivered               │ not yet

With a snapshot, all updates before `begins` are delivered at that time. Only the first batch
differs between the two cases.

Spark logs the end of a batch before it runs the batch, and nothing else. After a restart it
requests the initial offset again, and "latest" has another meaning by then. The end of the
first batch therefore contains its start, which has priority.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from penstock.errors import UsageError
from penstock.persist.state import END, CollectionState, SchemaVersion, columns_of

__all__ = ["Offset", "admit", "first_batch_start", "schema_end"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offset:
    """A position of a stream: all updates below `upper` have been delivered."""

    collection: str
    """Unique id of the collection: another collection of the same name has another id."""

    upper: int
    begins: int | None = None
    """First time of the stream; known until the end of its first batch."""

    snapshot: bool = False
    """All earlier updates are delivered at `begins`."""

    @property
    def fresh(self) -> bool:
        """Return whether the stream has delivered nothing yet."""
        return self.upper == self.begins

    @property
    def needs(self) -> int:
        """Earliest time whose history is needed to continue from here."""
        return self.upper if self.fresh and self.snapshot else max(self.upper - 1, 0)

    def up_to(self, upper: int) -> "Offset":
        """Return the end of a batch that starts here."""
        if not self.fresh:
            return Offset(collection=self.collection, upper=upper)
        return Offset(
            collection=self.collection, upper=upper, begins=self.begins, snapshot=self.snapshot
        )

    def to_json(self) -> dict[str, Any]:
        """Return the form that Spark stores."""
        values: dict[str, Any] = {"collection": self.collection, "upper": self.upper}
        return (
            values
            if self.begins is None
            else {
                **values,
                "begins": self.begins,
                "snapshot": self.snapshot,
            }
        )

    @staticmethod
    def from_json(values: dict[str, Any]) -> "Offset":
        """Parse the form that Spark stores."""
        try:
            return Offset(**values)
        except TypeError as error:
            raise UsageError(
                'checkpoint was not written by a stream of format "penstock"',
                detail=f"The checkpoint contains the offset {values!r:.200}.",
                hint="Use a separate checkpoint location for the query.",
            ) from error


def first_batch_start(start: Offset, end: Offset) -> Offset:
    """Return the logged start of the first batch, which ends at `end`."""
    if end.begins is None:
        return start
    return Offset(
        collection=start.collection, upper=end.begins, begins=end.begins, snapshot=end.snapshot
    )


def schema_end(collection: CollectionState, schema: SchemaVersion) -> int:
    """Return the first time whose rows have other columns than `schema`."""
    columns = columns_of(schema)
    later = (version for version in collection.schemas if version.version > schema.version)
    return next((v.since for v in later if not columns_of(v).equals(columns)), END)


def admit(counts: Iterable[tuple[int, int]], upper: int, limit: int) -> int:
    """Return the largest upper, up to `upper`, with at most `limit` updates below it.

    `counts` has the number of updates per time, in order. A time is never divided, so the
    first one is admitted regardless of its count.

        >>> admit([(3, 2), (5, 2), (9, 1)], 20, 4)
        9
        >>> admit([(3, 7), (5, 2)], 20, 4)
        5
    """
    total = 0
    for time, count in counts:
        if total and total + count > limit:
            return time
        total += count
    return upper
