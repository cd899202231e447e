"""What an envelope makes of records: rows that come or go, records that say nothing or are wrong.

    none      a record is a row that comes; a deletion cannot be taken
    upsert    a record is the row of its key; without a value that is gone
    debezium  a record is a change event, and speaks of the row after it or before it

A connector of Debezium that is started again may send events again that it had sent before.
They stand at a lower place of the database's log than one before them in the partition, by
which they are known, and are dropped.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.sources.kafka.layout import Envelope

__all__ = ["JUDGES", "Judged", "sent_again"]


@dataclass(frozen=True, slots=True)
class Judged:
    """What an envelope makes of records."""

    columns: Mapping[str, pa.ChunkedArray]
    gone: pa.ChunkedArray
    """Whether the row of this key is gone."""

    skipped: npt.NDArray[np.bool_]
    """Whether a record says nothing."""

    reasons: Mapping[int, str]
    """Why a record cannot be taken, although it was decoded."""

    positions: pa.ChunkedArray | None = None
    """Where in a database's log an event stands."""


def _none(read: pa.Table, values: pa.Table) -> Judged:
    no_key, no_value = _missing(read)
    wrong = no_value & ~no_key
    reason = "it has a key and no value, which is a deletion to others; envelope none has none"
    return Judged(
        _columns(values),
        pa.chunked_array([pa.array(no_value)]),
        no_key & no_value,
        dict.fromkeys(np.flatnonzero(wrong).tolist(), reason),
    )


def _upsert(read: pa.Table, values: pa.Table) -> Judged:
    no_key, no_value = _missing(read)
    reason = "it has no key, and its row would be known by that"
    return Judged(
        _columns(values),
        pa.chunked_array([pa.array(no_value)]),
        no_key & no_value,
        dict.fromkeys(np.flatnonzero(no_key).tolist(), reason),
    )


def _debezium(read: pa.Table, values: pa.Table) -> Judged:
    ops, after, before = (
        values.column(name).combine_chunks() for name in ("op", "after", "before")
    )
    deleted = pc.fill_null(pc.equal(ops, "d"), fill_value=False)
    rows = pc.if_else(deleted, before, after)
    reasons: dict[int, str] = {}
    for op, reason in _NOT_TAKEN.items():
        found = pc.fill_null(pc.equal(ops, op), fill_value=False).to_numpy(zero_copy_only=False)
        reasons.update(dict.fromkeys(np.flatnonzero(found).tolist(), reason))
    lacking = pc.and_(deleted, pc.is_null(before)).to_numpy(zero_copy_only=False)
    reason = "it deletes a row and does not say which: before is null"
    reasons.update(dict.fromkeys(np.flatnonzero(lacking).tolist(), reason))
    says_nothing = pc.or_kleene(pc.is_null(ops), pc.fill_null(pc.equal(ops, "m"), fill_value=False))
    names = [field.name for field in rows.type]
    fields = pc.struct_field
    return Judged(
        {name: pa.chunked_array([fields(rows, [at])]) for at, name in enumerate(names)},
        pa.chunked_array([deleted]),
        says_nothing.to_numpy(zero_copy_only=False).copy(),
        reasons,
        values.column("position"),
    )


_NOT_TAKEN: Final = {
    "t": "it says that its table was truncated, of which no row is named",
}

JUDGES: Final[Mapping[Envelope, Callable[[pa.Table, pa.Table], Judged]]] = {
    "none": _none,
    "upsert": _upsert,
    "debezium": _debezium,
}
"""By envelope, what judges records as they were read and their values as they were decoded."""


def sent_again(
    positions: pa.ChunkedArray, partitions: npt.NDArray[np.int32], marks: dict[int, bytes]
) -> npt.NDArray[np.bool_]:
    """Which events were sent before, and raises `marks` by the others."""
    found = np.zeros(len(partitions), bool)
    known = pc.is_valid(positions).to_numpy(zero_copy_only=False)
    for partition in np.unique(partitions[known]).tolist():
        at = np.flatnonzero(known & (partitions == partition))
        here = positions.take(pa.array(at)).combine_chunks()
        mark = marks.get(partition, b"")
        # As numbers that compare as the bytes do; the first is that of the mark.
        ranks = pc.rank(pa.concat_arrays([pa.array([mark], here.type), here]), tiebreaker="dense")
        numbers = ranks.to_numpy().astype(np.int64)
        found[at] = numbers[1:] < np.maximum.accumulate(numbers)[:-1]
        marks[partition] = max(mark, pc.max(here).as_py())
    return found


def _columns(values: pa.Table) -> dict[str, pa.ChunkedArray]:
    return dict(zip(values.column_names, values.columns, strict=True))


def _missing(read: pa.Table) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Which records have no key, and which no value."""
    no_key, no_value = (
        pc.is_null(read.column(name)).to_numpy(zero_copy_only=False).copy()
        for name in ("key", "value")
    )
    return no_key, no_value
