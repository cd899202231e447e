"""Net changes of a table: the last row per key."""

import json
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.data import DIFF, TIME
from penstock.data.packed import unpack_row
from penstock.errors import DefiniteError
from penstock.materialize.last_row_per_key import select_last_rows
from penstock.materialize.row_encoder import encode_documents

SCHEMA = pa.schema(
    [("a", pa.int64()), ("b", pa.string()), ("note", pa.string()), (TIME, pa.int64())]
).append(pa.field(DIFF, pa.int64()))

keys = st.tuples(st.integers(-3, 3), st.sampled_from(["", "x", 'q"uote\\', "new\nline", "ä"]))
tables = st.dictionaries(keys, st.none() | st.text(max_size=3), max_size=6)


def changes_between(histories: list[dict[Any, Any]]) -> pa.Table:
    """Return the updates from each table to the next, at one time each."""
    updates: list[tuple[Any, ...]] = []
    for time, (before, after) in enumerate(pairwise(histories)):
        for key in sorted({*before, *after}):
            if before.get(key, ...) == after.get(key, ...):
                continue
            if key in after:
                updates.append((*key, after[key], time, +1))
            if key in before:
                updates.append((*key, before[key], time, -1))
    columns = list(zip(*updates, strict=True)) or [[]] * len(SCHEMA)
    return pa.table(
        [pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)], schema=SCHEMA
    )


@given(st.lists(tables, min_size=2, max_size=5))
def test_net_changes_transform_first_table_into_last(histories) -> None:
    found = select_last_rows(changes_between(histories), ("a", "b"), collection="t")
    state = dict(histories[0])
    for row, packed, exists, gone in zip(
        found.rows.to_pylist(), found.packed_keys, found.exists, found.deletes, strict=True
    ):
        key = (row["a"], row["b"])
        assert unpack_row(packed.as_py()) == key
        assert exists.as_py() == (key in histories[0])
        if gone.as_py():
            del state[key]
        else:
            state[key] = row["note"]
    assert state == histories[-1]
    assert found.packed_keys.to_pylist() == sorted(found.packed_keys.to_pylist())
    assert len(found) == len(set(found.packed_keys.to_pylist()))


@given(st.lists(tables, min_size=2, max_size=5))
def test_documents_of_net_rows_decode_to_rows(histories) -> None:
    found = select_last_rows(changes_between(histories), ("a", "b"), collection="t")
    assert [
        json.loads(each.as_py()) for each in encode_documents(found.rows)
    ] == found.rows.to_pylist()


@pytest.mark.parametrize("diffs", [(+1, +1), (-1, -1)])
def test_net_with_two_rows_of_one_key_raises_definite_error(diffs) -> None:
    rows = pa.table([[1, 1], ["x", "x"], ["one", "two"], [0, 0], list(diffs)], names=SCHEMA.names)
    with pytest.raises(DefiniteError, match="two rows with the same key") as raised:
        select_last_rows(rows, ("a", "b"), collection="t")
    assert "(1, 'x')" in raised.value.detail


def test_net_with_row_of_diff_two_raises_definite_error() -> None:
    rows = pa.table([[1], ["x"], ["one"], [0], [2]], names=SCHEMA.names)
    with pytest.raises(DefiniteError, match="two rows with the same key"):
        select_last_rows(rows, ("a", "b"), collection="t")
