"""`difference` returns the updates that give a collection its requested contents."""

from collections import Counter

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.persist.shop import SCHEMA, opened, rows

from penstock.durable.memory import Shelf
from penstock.persist import AppendTo, Grow, Staged

WIDER = pa.schema([*SCHEMA, ("a", pa.string())])

ROWS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2)), max_size=12)


def staged(client, shop, held, staging, **more):
    table = pa.Table.from_pylist([{"k": k, "n": n} for k, n in held], schema=SCHEMA)
    return client.stage(shop, [table], staging, **more)


def contents(shop, as_of):
    return Counter({tuple(data.values()): diff for data, _, diff in shop.snapshot(as_of)})


@given(sealed=ROWS, beyond=ROWS, waiting=ROWS, rows_due=ROWS | st.none())
def test_contents_plus_difference_equal_rows_due(sealed, beyond, waiting, rows_due):
    with opened(Shelf()) as client:
        shop = client.create_or_load("shop", schema=SCHEMA, key_columns=["k"])
        shop.compare_and_append(rows(*((k, n, 3, 1) for k, n in sealed)), 0, 4)
        shop.write(rows(*((k, n, 7, 1) for k, n in beyond))).result()
        with client.staging() as staging:
            goal = None if rows_due is None else staged(client, shop, rows_due, staging, time=0)
            more = staged(client, shop, waiting, staging, time=9)
            found = client.difference(shop, goal, staging, time=9, staged=[more])
            assert isinstance(found, pa.Table)
            assert set(found.column("mz_timestamp").to_pylist()) <= {9}
            client.append_all([AppendTo(shop, [more, found], 4, 10)])
        assert contents(shop, 3) == Counter(sealed)
        assert contents(shop, 9) == Counter(rows_due or ())


def test_difference_with_growing_schema_compares_in_new_schema():
    with opened(Shelf()) as client:
        shop = client.create_or_load("shop", schema=SCHEMA, key_columns=["k"])
        shop.compare_and_append(rows(("a", 1, 0, 1), ("b", 2, 0, 1)), 0, 1)
        grow = Grow(shop, WIDER, {"a": "old"})
        with client.staging() as staging:
            table = pa.table({"k": ["a", "b"], "n": [1, 2], "a": ["old", "new"]})
            goal = client.stage(shop, [table.cast(WIDER)], staging, time=0, growing=[grow])
            found = client.difference(shop, goal, staging, time=1, growing=[grow])
            assert isinstance(found, pa.Table)
            assert found.num_rows == 2
            client.append_all([AppendTo(shop, found, 1, 2)], [grow])
        assert contents(shop, 1) == {("a", 1, "old"): 1, ("b", 2, "new"): 1}


def test_parts_are_in_write_order_without_consolidation():
    with opened(Shelf(), inline_bytes=0) as client:
        shop = client.create_or_load("shop", schema=SCHEMA)
        for time in range(3):
            shop.compare_and_append(rows(("a", time, time, 1)), time, time + 1)
        with client.staging() as staging:
            last = [staged(client, shop, [("a", n)], staging, time=5) for n in (3, 4)]
            told = list(shop.parts(last))
        assert [part.column("n").to_pylist() for part in told] == [[0], [1], [2], [3], [4]]


@pytest.mark.parametrize("delegated", [True, False])
def test_difference_beyond_merge_bytes_is_delegated(delegated):
    class MergeRequests:
        def merge(self, collection, inputs, staging, *, since):
            raise AssertionError("a merge was delegated")

        def difference(self, collection, minus, plus, staging, *, time):
            asked.append((collection.name, len(minus), len(plus), time))

    asked: list[tuple[str, int, int, int]] = []
    with opened(Shelf(), merge_bytes=1) as client:
        shop = client.create_or_load("shop", schema=SCHEMA)
        shop.compare_and_append(rows(("a", 1, 0, 1)), 0, 1)
        client.delegate_big_merges(MergeRequests() if delegated else None)
        with client.staging() as staging:
            goal = staged(client, shop, [("b", 2)], staging, time=0)
            found = client.difference(shop, goal, staging, time=8)
        if delegated:
            assert asked == [("shop", 1, 1, 8)]
            assert isinstance(found, Staged)
            assert found.batch is None
        else:
            assert isinstance(found, pa.Table)
            assert found.num_rows == 2


@pytest.mark.parametrize("upper", [0, 9])
def test_parts_and_difference_of_writer_continue_while_since_advances(upper):
    with opened(Shelf(), inline_bytes=0) as client:
        shop = client.create_or_load("shop", schema=SCHEMA, key_columns=["k"])
        for time in range(upper):
            shop.compare_and_append(rows(("a", time, time, 1)), time, time + 1)
        shop.write(rows(("b", 0, upper, 1))).result()
        told = shop.parts([])
        parts = [next(told)]
        if upper:
            # The first parts are merged and deleted, and the patched state is stale.
            seen = shop.state
            shop.allow_compaction(upper - 1)
            client.compact()
            assert shop.since == upper - 1
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(type(shop), "state", seen)
                assert shop.written(pa.table({"k": ["a"]})).num_rows == upper
                with client.staging() as staging:
                    found = client.difference(shop, None, staging, time=upper)
                assert isinstance(found, pa.Table)
                assert sum(found.column("mz_diff").to_pylist()) == -upper - 1
        parts += told
        assert sum(part.num_rows for part in parts) == upper + 1
