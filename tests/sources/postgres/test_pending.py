"""What is kept of the stream comes back as it was."""

from collections import Counter

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from penstock.sources.postgres.pending import keep, keep_truncate, unkept
from penstock.sources.postgres.resolve import resolve
from tests.sources.postgres.test_resolve import (
    KEY,
    SCHEMA,
    after,
    changes_of,
    histories,
    lookup_in,
)


@given(histories(), st.randoms())
def test_kept_messages_resolve_as_if_they_had_come_just_now(history, chance):
    stored, table = history
    kept = keep(changes_of(table.messages), np.full(len(table.messages), 7), order=100)
    shuffled = kept.take(pa.array(chance.sample(range(kept.num_rows), kept.num_rows), pa.int64()))
    held = Counter(stored.values())
    for changes in unkept(shuffled, from_lsn=7):
        assert changes is not None
        held = after(stored, resolve(changes, KEY, lookup_in(stored), table="public.t"))
    assert held == Counter(table.rows.values())


def test_a_transaction_that_committed_exactly_at_the_consistent_point_is_kept():
    messages = [("I", False, None, (n, "x", n, None), False) for n in range(3)]
    kept = keep(changes_of(messages), np.array([10, 20, 30]), order=0)
    (changes,) = unkept(kept, from_lsn=20)
    assert changes is not None
    assert changes.new.column("a").to_pylist() == [1, 2]


def test_a_truncate_stands_between_what_was_before_and_after_it():
    first = keep(
        changes_of([("I", False, None, (1, "x", 1, None), False)]), np.array([10]), order=0
    )
    cut = keep_truncate(SCHEMA, 20, order=1)
    last = keep(changes_of([("I", False, None, (2, "x", 1, None), False)]), np.array([30]), order=2)
    before, truncated, later = unkept(pa.concat_tables([last, cut, first]), from_lsn=0)
    assert before is not None
    assert truncated is None
    assert later is not None
    assert before.new.column("a").to_pylist() == [1]
    assert later.new.column("a").to_pylist() == [2]
