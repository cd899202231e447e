"""Detection of duplicate Debezium events, which a connector sends again after a restart.

A duplicate has a lower log position than an earlier event of its partition, and its commit time is
not later. Both conditions are necessary. A log may restart at a lower position, for example on
another server after a failover, or in a restored database. An event with a lower position and a
later time is new. It starts another age of the log, and positions are compared within an age.
Positions of two databases are not comparable, so each origin has its own mark.

An indeterminate event is applied. It holds the complete row, so applying it twice is idempotent.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["LOG", "MARKED", "Mark", "Marks", "highest", "marks_in", "note_of", "raised", "resent"]

LOG: Final = pa.schema(
    [("origin", pa.string()), ("happened_ms", pa.int64()), ("position", pa.binary())]
)
"""Log, commit time and log position of an event; null if the event does not have them."""

MARKED: Final = pa.schema([*list(LOG), ("age", pa.int64())])
"""State of the log up to an event: its latest time, highest position, and age."""


class Mark(NamedTuple):
    """Progress of one log."""

    age: int
    """Number of times that the log restarted at a lower position."""

    happened_ms: int
    position: bytes


Place: TypeAlias = tuple[int, str]
"""A partition and an origin."""

Marks: TypeAlias = Mapping[Place, Mark]

Flags: TypeAlias = npt.NDArray[np.bool_]
Numbers: TypeAlias = npt.NDArray[np.int64]


def resent(
    log: pa.Table, partitions: npt.NDArray[np.int32], marks: dict[Place, Mark]
) -> tuple[Flags, pa.Table]:
    """Return which events are duplicates, and the state of the log up to each event.

    Updates `marks` with the progress of each log.
    """
    again = np.zeros(log.num_rows, bool)
    ages = np.zeros(log.num_rows, np.int64)
    happened = log.column("happened_ms").combine_chunks().fill_null(0).to_numpy().copy()
    # By row, the row with the highest position up to it; marks have the indexes after all rows.
    highest_at = np.arange(log.num_rows)
    positions = [log.column("position").combine_chunks()]
    for at in _by_place(log, partitions):
        place = (int(partitions[at[0]]), log.column("origin")[int(at[0])].as_py())
        mark = marks.get(place)
        if mark is None:
            first = log.slice(int(at[0]), 1).to_pylist()[0]
            mark = Mark(0, first["happened_ms"], first["position"])
        marked = log.num_rows + len(positions) - 1
        positions.append(pa.array([mark.position], pa.binary()))
        here = pa.concat_arrays([positions[-1], positions[0].take(pa.array(at))])
        # Ranks compare as the bytes do, and are faster to accumulate.
        places = pc.rank(here, tiebreaker="dense").to_numpy().astype(np.int64)
        times = np.concatenate([[mark.happened_ms], happened[at]])
        again[at], ages[at], happened[at], where = _followed(places, times, mark.age)
        highest_at[at] = np.where(where == 0, marked, at[np.maximum(where - 1, 0)])
        last = int(at[-1])
        position = here[int(where[-1])].as_py()
        marks[place] = Mark(int(ages[last]), int(happened[last]), position)
    taken = pa.concat_arrays(positions).take(pa.array(highest_at))
    latest = pc.if_else(pc.is_valid(log.column("happened_ms")), pa.array(happened), None)
    columns = [log.column("origin"), latest, taken, pa.array(ages)]
    return again, pa.table(columns, schema=MARKED)


def _followed(places: Numbers, times: Numbers, age: int) -> tuple[Flags, Numbers, Numbers, Numbers]:
    """Return which events are duplicates; the first element is the mark, and is left out.

    Also returns, for each event, the age of the log, its latest time, and the index of the event
    with its highest position.
    """
    again = np.zeros(len(places), bool)
    ages = np.zeros(len(places), np.int64)
    latest = np.zeros(len(places), np.int64)
    highest_at = np.zeros(len(places), np.int64)
    first = 0
    while first < len(places):
        here, then = places[first:], times[first:]
        tops, lates = np.maximum.accumulate(here), np.maximum.accumulate(then)
        lower = here[1:] < tops[:-1]
        begins = np.flatnonzero(lower & (then[1:] > lates[:-1]))
        count = len(here) if not len(begins) else int(begins[0]) + 1
        up_to = first + count
        again[first + 1 : up_to] = lower[: count - 1]
        ages[first:up_to] = age
        latest[first:up_to] = lates[:count]
        rises = np.where(here[:count] == tops[:count], np.arange(count), 0)
        highest_at[first:up_to] = first + np.maximum.accumulate(rises)
        first, age = up_to, age + 1
    return again[1:], ages[1:], latest[1:], highest_at[1:]


def highest(marked: pa.Table, partitions: npt.NDArray[np.int32]) -> dict[Place, Mark]:
    """Return, by partition and origin, the progress of the log in these events."""
    found = {}
    names = ("age", "happened_ms", "position")
    for at in _by_place(marked, partitions):
        rows = marked.take(pa.array(at)).sort_by([(name, "descending") for name in names])
        row = rows.slice(0, 1).to_pylist()[0]
        found[int(partitions[at[0]]), row["origin"]] = Mark(*(row[name] for name in names))
    return found


def raised(marks: Marks, told: Iterable[Marks]) -> dict[Place, Mark]:
    """Return the marks, raised to the marks that tasks reported."""
    found = dict(marks)
    for each in told:
        for place, mark in each.items():
            found[place] = max(mark, found.get(place, mark))
    return found


def note_of(marks: Marks) -> list[list[Any]]:
    """Return the marks in their stored form."""
    return [
        [*place, mark.age, mark.happened_ms, mark.position.hex()]
        for place, mark in sorted(marks.items())
    ]


def marks_in(note: Iterable[Any] | None) -> dict[Place, Mark]:
    """Parse the stored form of marks."""
    return {
        (partition, origin): Mark(age, happened_ms, bytes.fromhex(position))
        for partition, origin, age, happened_ms, position in note or ()
    }


def _by_place(log: pa.Table, partitions: npt.NDArray[np.int32]) -> list[Numbers]:
    """Return the row numbers with a known log position, by partition and origin, in order."""
    known = np.ones(log.num_rows, bool)
    for name in LOG.names:
        known &= pc.is_valid(log.column(name)).to_numpy(zero_copy_only=False)
    rows = np.flatnonzero(known)
    if not len(rows):
        return []
    origins = log.column("origin").take(pa.array(rows)).combine_chunks().dictionary_encode()
    codes = origins.indices.to_numpy().astype(np.int64)
    groups = partitions[rows].astype(np.int64) * len(origins.dictionary) + codes
    return [rows[groups == group] for group in np.unique(groups).tolist()]
