"""Pending changes are read back from side state as they were stored."""

from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.sources.postgres.old_rows import Changes, resolve
from penstock.sources.postgres.pending_changes import (
    decode_changes,
    encode_changes,
    encode_truncate,
)
from tests.sources.postgres.test_old_rows import (
    KEY,
    SCHEMA,
    after,
    changes_of,
    histories,
    lookup_in,
)


@given(histories(), st.randoms())
def test_pending_changes_resolve_as_changes_that_were_not_stored(history, rng):
    stored, table = history
    kept = encode_changes(changes_of(table.messages), np.full(len(table.messages), 7), order=100)
    shuffled = kept.take(pa.array(rng.sample(range(kept.num_rows), kept.num_rows), pa.int64()))
    held = Counter(stored.values())
    for changes in decode_changes(shuffled, from_lsn=7):
        assert changes is not None
        held = after(stored, resolve(changes, KEY, lookup_in(stored), table="public.t"))
    assert held == Counter(table.rows.values())


def test_pending_transaction_at_consistent_point_is_included():
    messages = [("I", False, None, (n, "x", n, None), False) for n in range(3)]
    kept = encode_changes(changes_of(messages), np.array([10, 20, 30]), order=0)
    (changes,) = decode_changes(kept, from_lsn=20)
    assert changes is not None
    assert changes.new.column("a").to_pylist() == [1, 2]


def test_pending_truncate_separates_earlier_and_later_changes():
    first = encode_changes(
        changes_of([("I", False, None, (1, "x", 1, None), False)]), np.array([10]), order=0
    )
    cut = encode_truncate(SCHEMA, 20, order=1)
    last = encode_changes(
        changes_of([("I", False, None, (2, "x", 1, None), False)]), np.array([30]), order=2
    )
    before, truncated, later = decode_changes(pa.concat_tables([last, cut, first]), from_lsn=0)
    assert before is not None
    assert truncated is None
    assert later is not None
    assert before.new.column("a").to_pylist() == [1]
    assert later.new.column("a").to_pylist() == [2]


def test_pending_changes_before_last_truncate_are_skipped():
    rows = [("I", False, None, (n, "x", n, None), False) for n in range(4)]
    kept = pa.concat_tables(
        [
            encode_changes(changes_of(rows[:1]), np.array([10]), order=0),
            encode_truncate(SCHEMA, 20, order=1),
            encode_changes(changes_of(rows[1:3]), np.array([30, 40]), order=2),
            encode_truncate(SCHEMA, 50, order=4),
            encode_changes(changes_of(rows[3:]), np.array([60]), order=5),
        ]
    )
    truncated, later = decode_changes(kept, from_lsn=0, from_order=4)
    assert truncated is None
    assert later is not None
    assert later.new.column("a").to_pylist() == [3]


@pytest.mark.parametrize("before", [0, 1, 3])
def test_pending_truncate_as_last_message_is_read_as_truncate(before: int):
    rows = [("I", False, None, (n, "x", n, None), False) for n in range(before)]
    parts = [encode_changes(changes_of(rows), np.full(before, 10), order=0)] if rows else []
    found = [
        *decode_changes(
            pa.concat_tables([*parts, encode_truncate(SCHEMA, 20, order=9)]), from_lsn=0
        )
    ]
    assert found[-1] is None
    assert [len(each) for each in found if each is not None] == ([before] if before else [])


@pytest.mark.parametrize("whole", [False, True], ids=["key", "full"])
def test_pending_update_keeps_each_of_several_unchanged_toast_columns(whole: bool):
    schema = pa.schema([("id", pa.int32())] + [(name, pa.string()) for name in "tuv"])
    stored = pa.table([[1, 2], ["t1", "t2"], ["u1", "u2"], ["v1", "v2"]], schema=schema)
    new = pa.table([[1, 2], [None, "T2"], [None, None], ["V1", None]], schema=schema)
    changes = Changes(
        kind=np.full(2, ord("U"), np.uint8),
        old=stored if whole else schema.empty_table(),
        old_row=np.array([0, 1] if whole else [-1, -1]),
        whole=np.full(2, whole),
        new=new,
        new_row=np.array([0, 1]),
        unchanged={
            "t": np.array([True, False]),
            "u": np.array([True, True]),
            "v": np.array([False, True]),
        },
    )
    (read,) = decode_changes(encode_changes(changes, np.array([10, 20]), order=0), from_lsn=0)
    assert read is not None
    inserts = resolve(read, ["id"], lambda _: stored, table="public.t").inserts
    assert sorted(zip(*(column.to_pylist() for column in inserts.columns), strict=True)) == [
        (1, "t1", "u1", "V1"),
        (2, "T2", "u2", "v2"),
    ]
