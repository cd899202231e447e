"""Envelopes: interpretation of decoded records as inserts, deletes, no-ops or bad records.

none      a record is an inserted row; a record with a key and no value is bad
upsert    a record is the row of its key; a record without a value deletes that row
debezium  a record is a change event, with the row after the change or before it
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.sources.debezium.dedup import LOG
from penstock.sources.kafka.changes import is_word
from penstock.sources.kafka.layout import Envelope

__all__ = ["JUDGES", "Judged"]


@dataclass(frozen=True, slots=True)
class Judged:
    """Records, as an envelope interprets them."""

    columns: Mapping[str, pa.ChunkedArray]
    gone: pa.ChunkedArray
    """True for each record that deletes the row of its key."""

    skipped: npt.NDArray[np.bool_]
    """True for each record that has no effect."""

    reasons: Mapping[int, str]
    """Reason by row number, for records that were decoded but are invalid in the envelope."""

    log: pa.Table | None = None
    """Origin, time and log position of each event; None if the envelope has none."""


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
    made = pc.is_in(ops, pa.array(["c", "r"]))
    wrong = {
        f'it makes a row without the value of column "{field.name}", which it lacks as after a '
        "change of its key": pc.and_(made, is_word(pc.struct_field(after, [at])))
        for at, field in enumerate(after.type)
        if pa.types.is_string(field.type) or pa.types.is_binary(field.type)
    } | {
        "it says that its table was truncated, of which no row is named": pc.equal(ops, "t"),
        "it deletes a row and does not say which: before is null": pc.and_(
            deleted, pc.is_null(before)
        ),
    }
    reasons = {
        row: reason
        for reason, claims in wrong.items()
        for row in np.flatnonzero(_is(claims)).tolist()
    }
    names = [field.name for field in rows.type]
    return Judged(
        {name: pa.chunked_array([pc.struct_field(rows, [at])]) for at, name in enumerate(names)},
        pa.chunked_array([deleted]),
        _is(pc.is_null(ops)) | _is(pc.equal(ops, "m")),
        reasons,
        values.select(LOG.names),
    )


JUDGES: Final[Mapping[Envelope, Callable[[pa.Table, pa.Table], Judged]]] = {
    "none": _none,
    "upsert": _upsert,
    "debezium": _debezium,
}
"""Interpreter by envelope; its arguments are the raw records and their decoded values."""


def _is(claims: pa.Array) -> npt.NDArray[np.bool_]:
    """Return a mask with false for null."""
    found: npt.NDArray[np.bool_] = pc.fill_null(claims, fill_value=False).to_numpy(
        zero_copy_only=False
    )
    return found


def _columns(values: pa.Table) -> dict[str, pa.ChunkedArray]:
    return dict(zip(values.column_names, values.columns, strict=True))


def _missing(read: pa.Table) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return which records have no key, and which have no value."""
    no_key, no_value = (
        pc.is_null(read.column(name)).to_numpy(zero_copy_only=False).copy()
        for name in ("key", "value")
    )
    return no_key, no_value
