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

__all__ = [
    "LOG",
    "MARKED_LOG",
    "Mark",
    "Marks",
    "find_duplicates",
    "highest_marks",
    "marks_from_json",
    "marks_to_json",
    "raise_marks",
]

LOG: Final = pa.schema(
    [("origin", pa.string()), ("happened_ms", pa.int64()), ("position", pa.binary())]
)
"""Log, commit time and log position of an event; null if the event does not have them."""

MARKED_LOG: Final = pa.schema([*list(LOG), ("age", pa.int64())])
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


def find_duplicates(
    log: pa.Table, partitions: npt.NDArray[np.int32], marks: dict[Place, Mark]
) -> tuple[Flags, pa.Table]:
    """Return which events are duplicates, and the state of the log up to each event.

    Updates `marks` with the progress of each log.
    """
    is_duplicate = np.zeros(log.num_rows, bool)
    ages = np.zeros(log.num_rows, np.int64)
    times = log.column("happened_ms").combine_chunks().fill_null(0).to_numpy().copy()
    # By row, the row with the highest position up to it; marks have the indexes after all rows.
    highest_rows = np.arange(log.num_rows)
    positions = [log.column("position").combine_chunks()]
    for rows in _rows_by_place(log, partitions):
        first, last = int(rows[0]), int(rows[-1])
        place = (int(partitions[first]), log.column("origin")[first].as_py())
        mark = marks.get(place)
        if mark is None:
            event = log.slice(first, 1).to_pylist()[0]
            mark = Mark(0, event["happened_ms"], event["position"])
        mark_row = log.num_rows + len(positions) - 1
        positions.append(pa.array([mark.position], pa.binary()))
        place_positions = pa.concat_arrays([positions[-1], positions[0].take(pa.array(rows))])
        # Ranks compare as the bytes do, and are faster to accumulate.
        ranks = pc.rank(place_positions, tiebreaker="dense").to_numpy().astype(np.int64)
        place_times = np.concatenate([[mark.happened_ms], times[rows]])
        is_duplicate[rows], ages[rows], times[rows], highest = _track_log(
            ranks, place_times, mark.age
        )
        highest_rows[rows] = np.where(highest == 0, mark_row, rows[np.maximum(highest - 1, 0)])
        position = place_positions[int(highest[-1])].as_py()
        marks[place] = Mark(int(ages[last]), int(times[last]), position)
    highest_positions = pa.concat_arrays(positions).take(pa.array(highest_rows))
    latest = pc.if_else(pc.is_valid(log.column("happened_ms")), pa.array(times), None)
    columns = [log.column("origin"), latest, highest_positions, pa.array(ages)]
    return is_duplicate, pa.table(columns, schema=MARKED_LOG)


def _track_log(
    positions: Numbers, times: Numbers, age: int
) -> tuple[Flags, Numbers, Numbers, Numbers]:
    """Return which events are duplicates; the first element is the mark, and is left out.

    Also returns, for each event, the age of the log, its latest time, and the index of the event
    with its highest position.
    """
    is_duplicate = np.zeros(len(positions), bool)
    ages = np.zeros(len(positions), np.int64)
    latest = np.zeros(len(positions), np.int64)
    highest = np.zeros(len(positions), np.int64)
    start = 0
    while start < len(positions):
        age_positions, age_times = positions[start:], times[start:]
        max_positions = np.maximum.accumulate(age_positions)
        max_times = np.maximum.accumulate(age_times)
        is_lower = age_positions[1:] < max_positions[:-1]
        restarts = np.flatnonzero(is_lower & (age_times[1:] > max_times[:-1]))
        count = len(age_positions) if not len(restarts) else int(restarts[0]) + 1
        end = start + count
        is_duplicate[start + 1 : end] = is_lower[: count - 1]
        ages[start:end] = age
        latest[start:end] = max_times[:count]
        is_highest = age_positions[:count] == max_positions[:count]
        highest[start:end] = start + np.maximum.accumulate(
            np.where(is_highest, np.arange(count), 0)
        )
        start, age = end, age + 1
    return is_duplicate[1:], ages[1:], latest[1:], highest[1:]


def highest_marks(marked: pa.Table, partitions: npt.NDArray[np.int32]) -> dict[Place, Mark]:
    """Return, by partition and origin, the progress of the log in these events."""
    marks = {}
    names = ("age", "happened_ms", "position")
    for rows in _rows_by_place(marked, partitions):
        events = marked.take(pa.array(rows)).sort_by([(name, "descending") for name in names])
        event = events.slice(0, 1).to_pylist()[0]
        place = (int(partitions[rows[0]]), event["origin"])
        marks[place] = Mark(*(event[name] for name in names))
    return marks


def raise_marks(marks: Marks, reported: Iterable[Marks]) -> dict[Place, Mark]:
    """Return the marks, raised to the marks that tasks reported."""
    raised = dict(marks)
    for task_marks in reported:
        for place, mark in task_marks.items():
            raised[place] = max(mark, raised.get(place, mark))
    return raised


def marks_to_json(marks: Marks) -> list[list[Any]]:
    """Return the marks in their stored form."""
    return [
        [*place, mark.age, mark.happened_ms, mark.position.hex()]
        for place, mark in sorted(marks.items())
    ]


def marks_from_json(stored: Iterable[Any] | None) -> dict[Place, Mark]:
    """Parse the stored form of marks."""
    return {
        (partition, origin): Mark(age, happened_ms, bytes.fromhex(position))
        for partition, origin, age, happened_ms, position in stored or ()
    }


def _rows_by_place(log: pa.Table, partitions: npt.NDArray[np.int32]) -> list[Numbers]:
    """Return the row numbers with a known log position, by partition and origin, in order."""
    is_known = np.ones(log.num_rows, bool)
    for name in LOG.names:
        is_known &= pc.is_valid(log.column(name)).to_numpy(zero_copy_only=False)
    rows = np.flatnonzero(is_known)
    if not len(rows):
        return []
    origins = log.column("origin").take(pa.array(rows)).combine_chunks().dictionary_encode()
    codes = origins.indices.to_numpy().astype(np.int64)
    groups = partitions[rows].astype(np.int64) * len(origins.dictionary) + codes
    return [rows[groups == group] for group in np.unique(groups).tolist()]
