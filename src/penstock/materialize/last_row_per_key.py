"""Last row per key of the changes of a table: a row to store, or a delete.

The changes alone determine the last state of a key, so no document is loaded. A retraction
shows that the key had a row before the changes. `exists` records this fact as a hint.
"""

from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.data import DIFF, TIME, advance, consolidate
from penstock.data.packed import pack, unpack_row
from penstock.errors import DefiniteError
from penstock.materialize.row_encoder import encode_fields

__all__ = ["LastRows", "select_last_rows"]


@dataclass(frozen=True, slots=True)
class LastRows:
    """LastRows change of each key, in order of keys.

    For a delete, `rows` holds the row that is deleted.
    """

    rows: pa.Table
    packed_keys: pa.BinaryArray
    exists: pa.BooleanArray
    deletes: pa.BooleanArray

    def __len__(self) -> int:
        return len(self.packed_keys)

    def filter(self, mask: pa.BooleanArray) -> "LastRows":
        """Return the changes whose element of `mask` is true."""
        return LastRows(
            self.rows.filter(mask),
            self.packed_keys.filter(mask),
            self.exists.filter(mask),
            self.deletes.filter(mask),
        )

    def as_new(self) -> "LastRows":
        """Return the same changes with `exists` false for every key."""
        return replace(self, exists=pa.array(np.zeros(len(self), np.bool_)))


def select_last_rows(changes: pa.Table, key: tuple[str, ...], *, collection: str) -> LastRows:
    """Return the last state of each key whose updates do not cancel out.

    Raises:
        DefiniteError: two rows have the same key.
    """
    if (last_rows := _without_sort(changes, key)) is not None:
        return last_rows
    latest = pc.max(changes.column(TIME)).as_py()
    updates = changes if latest is None else consolidate(advance(changes, latest))
    order = [(name, "ascending") for name in (*key, DIFF)]
    updates = updates.take(pc.sort_indices(updates, sort_keys=order)).combine_chunks()
    diffs = updates.column(DIFF).to_numpy()
    rows = updates.drop_columns([TIME, DIFF])
    packed = pack(encode_fields(rows, key)) if len(rows) else pa.array([], pa.binary())
    last = np.ones(len(rows), np.bool_)
    last[:-1] = pc.not_equal(packed[1:], packed[:-1]).to_numpy(zero_copy_only=False)
    first = np.roll(last, 1)
    _check_keys_unique(diffs, first, last, packed, collection=collection)
    mask = pa.array(last)
    # Of two rows with the same key, the retraction sorts first.
    before = np.minimum.reduceat(diffs, np.flatnonzero(first)) < 0 if len(rows) else diffs < 0
    return LastRows(
        rows.filter(mask), packed.filter(mask), pa.array(before), pa.array(diffs[last] < 0)
    )


def _without_sort(changes: pa.Table, key: tuple[str, ...]) -> LastRows | None:
    """Return the changes without a sort if all are inserts in ascending order of distinct keys."""
    if pc.min_max(changes.column(DIFF)).as_py() != {"min": 1, "max": 1}:
        return None
    rows = changes.drop_columns([TIME, DIFF]).combine_chunks()
    packed = pack(encode_fields(rows, key))
    if pc.all(pc.less(packed[:-1], packed[1:])).as_py() is False:
        return None
    nothing = pa.array(np.zeros(len(rows), np.bool_))
    return LastRows(rows, packed, nothing, nothing)


def _check_keys_unique(
    diffs: "np.ndarray[tuple[int], np.dtype[np.int64]]",
    first: "np.ndarray[tuple[int], np.dtype[np.bool_]]",
    last: "np.ndarray[tuple[int], np.dtype[np.bool_]]",
    packed: pa.BinaryArray,
    *,
    collection: str,
) -> None:
    """Check that each key has at most one row, both before and after the changes."""
    wrong = (np.abs(diffs) > 1) | (~first & ~last) | (~first & last & (diffs < 0))
    wrong |= first & ~last & (diffs > 0)
    if wrong.any():
        raise DefiniteError(
            f'collection "{collection}" has two rows with the same key',
            detail=f"The key is {unpack_row(packed[int(np.argmax(wrong))].as_py())!r}.",
            hint="Add columns to its key, or bind the collection with delta_updates: true.",
        )
