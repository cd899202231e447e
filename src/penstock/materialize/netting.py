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
from penstock.materialize.rows import field_columns

__all__ = ["Net", "net"]


@dataclass(frozen=True, slots=True)
class Net:
    """Net change of each key, in order of keys.

    For a delete, `rows` holds the row that is deleted.
    """

    rows: pa.Table
    packed_keys: pa.BinaryArray
    exists: pa.BooleanArray
    deletes: pa.BooleanArray

    def __len__(self) -> int:
        return len(self.packed_keys)

    def filter(self, kept: pa.BooleanArray) -> "Net":
        """Return the changes whose element of `kept` is true."""
        return Net(
            self.rows.filter(kept),
            self.packed_keys.filter(kept),
            self.exists.filter(kept),
            self.deletes.filter(kept),
        )

    def as_new(self) -> "Net":
        """Return the same changes with `exists` false for every key."""
        return replace(self, exists=pa.array(np.zeros(len(self), np.bool_)))


def net(changes: pa.Table, key: tuple[str, ...], *, collection: str) -> Net:
    """Return the last state of each key whose updates do not cancel out.

    Raises:
        DefiniteError: two rows have the same key.
    """
    if (found := _as_they_are(changes, key)) is not None:
        return found
    latest = pc.max(changes.column(TIME)).as_py()
    updates = changes if latest is None else consolidate(advance(changes, latest))
    order = [(name, "ascending") for name in (*key, DIFF)]
    updates = updates.take(pc.sort_indices(updates, sort_keys=order)).combine_chunks()
    diffs = updates.column(DIFF).to_numpy()
    rows = updates.drop_columns([TIME, DIFF])
    packed = pack(field_columns(rows, key)) if len(rows) else pa.array([], pa.binary())
    last = np.ones(len(rows), np.bool_)
    last[:-1] = pc.not_equal(packed[1:], packed[:-1]).to_numpy(zero_copy_only=False)
    first = np.roll(last, 1)
    _check_one_row_each(diffs, first, last, packed, collection=collection)
    kept = pa.array(last)
    # Of two rows with the same key, the retraction sorts first.
    before = np.minimum.reduceat(diffs, np.flatnonzero(first)) < 0 if len(rows) else diffs < 0
    return Net(rows.filter(kept), packed.filter(kept), pa.array(before), pa.array(diffs[last] < 0))


def _as_they_are(changes: pa.Table, key: tuple[str, ...]) -> Net | None:
    """Return the changes without a sort if all are inserts in ascending order of distinct keys."""
    if pc.min_max(changes.column(DIFF)).as_py() != {"min": 1, "max": 1}:
        return None
    rows = changes.drop_columns([TIME, DIFF]).combine_chunks()
    packed = pack(field_columns(rows, key))
    if pc.all(pc.less(packed[:-1], packed[1:])).as_py() is False:
        return None
    nothing = pa.array(np.zeros(len(rows), np.bool_))
    return Net(rows, packed, nothing, nothing)


def _check_one_row_each(
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
            f'collection "{collection}" has two rows of one key',
            detail=f"The key is {unpack_row(packed[int(np.argmax(wrong))].as_py())!r}.",
            hint="Name more columns as its key, or bind it with delta_updates: true.",
        )
