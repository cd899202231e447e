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
from penstock.sources.debezium.last_by_key import is_unavailable
from penstock.sources.kafka.output_schema import Envelope

__all__ = ["INTERPRETERS", "Interpreted"]


@dataclass(frozen=True, slots=True)
class Interpreted:
    """Records, as an envelope interprets them."""

    columns: Mapping[str, pa.ChunkedArray]
    deleted: pa.ChunkedArray
    """True for each record that deletes the row of its key."""

    skipped: npt.NDArray[np.bool_]
    """True for each record that has no effect."""

    reasons: Mapping[int, str]
    """Reason by row number, for records that were decoded but are invalid in the envelope."""

    log: pa.Table | None = None
    """Origin, time and log position of each event; None if the envelope has none."""


def _interpret_none(records: pa.Table, values: pa.Table) -> Interpreted:
    no_key, no_value = _missing(records)
    reason = "it has a key and no value, which is a deletion; envelope none has no deletions"
    return Interpreted(
        _columns(values),
        pa.chunked_array([pa.array(no_value)]),
        no_key & no_value,
        dict.fromkeys(np.flatnonzero(no_value & ~no_key).tolist(), reason),
    )


def _interpret_upsert(records: pa.Table, values: pa.Table) -> Interpreted:
    no_key, no_value = _missing(records)
    reason = "it has no key, which identifies its row"
    return Interpreted(
        _columns(values),
        pa.chunked_array([pa.array(no_value)]),
        no_key & no_value,
        dict.fromkeys(np.flatnonzero(no_key).tolist(), reason),
    )


def _interpret_debezium(_records: pa.Table, values: pa.Table) -> Interpreted:
    ops, after, before = (
        values.column(name).combine_chunks() for name in ("op", "after", "before")
    )
    is_delete = pc.fill_null(pc.equal(ops, "d"), fill_value=False)
    is_insert = pc.is_in(ops, pa.array(["c", "r"]))
    rows = pc.if_else(is_delete, before, after)
    defects = {
        f'it creates a row without the value of column "{field.name}", as an event after a change '
        "of the key does": pc.and_(is_insert, is_unavailable(pc.struct_field(after, [index])))
        for index, field in enumerate(after.type)
        if pa.types.is_string(field.type) or pa.types.is_binary(field.type)
    } | {
        "it reports that its table was truncated, and names no row": pc.equal(ops, "t"),
        "it deletes a row without naming the row: before is null": pc.and_(
            is_delete, pc.is_null(before)
        ),
    }
    reasons = {
        row: reason
        for reason, mask in defects.items()
        for row in np.flatnonzero(_true_where(mask)).tolist()
    }
    return Interpreted(
        {
            field.name: pa.chunked_array([pc.struct_field(rows, [index])])
            for index, field in enumerate(rows.type)
        },
        pa.chunked_array([is_delete]),
        _true_where(pc.is_null(ops)) | _true_where(pc.equal(ops, "m")),
        reasons,
        values.select(LOG.names),
    )


INTERPRETERS: Final[Mapping[Envelope, Callable[[pa.Table, pa.Table], Interpreted]]] = {
    "none": _interpret_none,
    "upsert": _interpret_upsert,
    "debezium": _interpret_debezium,
}
"""Interpreter by envelope; its arguments are the raw records and their decoded values."""


def _true_where(mask: pa.Array) -> npt.NDArray[np.bool_]:
    """Return the mask with false for null."""
    flags: npt.NDArray[np.bool_] = pc.fill_null(mask, fill_value=False).to_numpy(
        zero_copy_only=False
    )
    return flags


def _columns(values: pa.Table) -> dict[str, pa.ChunkedArray]:
    return dict(zip(values.column_names, values.columns, strict=True))


def _missing(records: pa.Table) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return which records have no key, and which have no value."""
    no_key, no_value = (
        pc.is_null(records.column(name)).to_numpy(zero_copy_only=False).copy()
        for name in ("key", "value")
    )
    return no_key, no_value
