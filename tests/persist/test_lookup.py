"""A lookup by key returns the rows of the snapshot, after merges and schema changes too."""

import random
import struct
from collections import Counter
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.persist.shop import opened

from penstock.data import DIFF, TIME, stored_schema
from penstock.durable.memory import Shelf
from penstock.errors import Corruption, InternalError, UsageError
from penstock.persist import (
    TEXT,
    AppendTo,
    CollectionErrored,
    Fail,
    NotYetComplete,
    SinceError,
    StoredError,
)
from penstock.persist.state import Stored

NAN = struct.unpack("<d", struct.pack("<Q", 0x7FF8_0000_0000_0001))[0]
VALUES: dict[pa.DataType, list[Any]] = {
    pa.int64(): [0, 1, 2, -3, 2**62],
    pa.int32(): [0, 1, 2, -3, 2**31 - 1],
    pa.uint64(): [0, 1, 2, 2**64 - 1],
    pa.string(): ["", "a", "b", "ä", "z" * 40],
    pa.binary(): [b"", b"a", b"\xff"],
    pa.float64(): [0.0, -0.0, 1.5, float("nan"), NAN, float("inf")],
    pa.decimal128(9, 2): [Decimal("0.00"), Decimal("-1.50"), Decimal("7.25")],
    pa.date32(): [date(1970, 1, 1), date(2026, 11, 15), date(1, 1, 1)],
    pa.timestamp("us", "UTC"): [datetime(2026, 11, day, tzinfo=UTC) for day in (1, 2, 3)],
    pa.timestamp("ms"): [datetime(2026, 11, day) for day in (1, 2, 3)],  # noqa: DTZ001
    pa.bool_(): [True, False],
}

kinds = st.sampled_from(list(VALUES))


@st.composite
def histories(choose):
    """Draw key types, then batches of updates with occasional compactions between them."""
    types = choose(st.lists(kinds, min_size=1, max_size=3))
    keys = st.tuples(*[st.sampled_from([*VALUES[kind], None]) for kind in types])
    update = st.tuples(
        keys, st.sampled_from(["x", "y"]), st.integers(0, 3), st.sampled_from([1, 2, -1])
    )
    steps = st.lists(st.one_of(st.lists(update, min_size=1, max_size=12), st.none()), max_size=5)
    return types, choose(steps), choose(st.lists(keys, max_size=8))


def bits(row):
    return tuple(struct.pack("<d", v) if isinstance(v, float) else v for v in row)


@given(history=histories(), inline_bytes=st.sampled_from([0, 10_000]), since=st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_lookup_equals_snapshot_restricted_to_keys(history, inline_bytes, since):
    types, steps, wanted = history
    names = [f"k.{at}" for at in range(len(types))]
    # The key is not first, a name can look like a path, and nested columns have several leaves.
    fields = [
        pa.field("tags", pa.struct([("a", pa.string()), ("b", pa.list_(pa.int32()))])),
        *(pa.field(name, kind) for name, kind in zip(names, types, strict=True)),
        pa.field("note", pa.string()),
    ]
    schema = pa.schema(fields)
    with opened(Shelf(), inline_bytes=inline_bytes, part_bytes=400, fan_in=2) as client:
        rows = client.create_or_load("rows", schema=schema, key_columns=names)
        upper = 0
        for step in steps:
            if step is None:
                rows.allow_compaction(max(0, upper - 1 - since)).result()
                client.compact()
                continue
            columns = [pa.array([{"a": u[1], "b": [1, 2]} for u in step], schema.field(0).type)]
            columns += [pa.array([u[0][at] for u in step], kind) for at, kind in enumerate(types)]
            columns.append(pa.array([u[1] for u in step]))
            columns.append(pa.array([upper + u[2] for u in step], pa.int64()))
            columns.append(pa.array([u[3] for u in step], pa.int64()))
            table = pa.Table.from_arrays(columns, schema=stored_schema(schema))
            rows.compare_and_append(table, upper, upper + 4)
            upper += 4
        keys = pa.table(
            [pa.array([k[at] for k in wanted], kind) for at, kind in enumerate(types)],
            names=names,
        )
        asked = {bits(key) for key in wanted}
        for as_of in {rows.since, (rows.since + upper) // 2, upper - 1}:
            if not rows.since <= as_of < upper:
                continue
            expected: Counter[tuple[str, bytes]] = Counter()
            for row, count in plain(rows.snapshot(as_of).arrow(), names).items():
                if row[1] in asked:
                    expected[row] = count
            if any(count < 0 for count in expected.values()):
                with pytest.raises(InternalError, match="holds -"):
                    rows.lookup(keys, as_of)
            else:
                found = rows.lookup(keys, as_of)
                assert found.schema.names == [*schema.names, DIFF]
                assert plain(found, names) == expected


def plain(table, names):
    """Return the multiplicity of each row, identified by its text and key."""
    found: Counter[tuple[str, bytes]] = Counter()
    for row in table.to_pylist():
        data = {name: value for name, value in row.items() if name not in (TIME, DIFF, *names)}
        found[repr(data), bits(row[name] for name in names)] += row[DIFF]
    return found


ORDERS = pa.schema([pa.field("id", pa.int32()), ("item", pa.string())])
WIDER = pa.schema([("id", pa.int64()), ("item", pa.string()), ("count", pa.int32())])


@pytest.fixture
def client():
    with opened(Shelf(), inline_bytes=100, part_bytes=20_000, fan_in=2) as client:
        yield client


@pytest.fixture
def orders(client):
    orders = client.create_or_load("orders", schema=ORDERS, key_columns=["id"])
    table = pa.table(
        {
            "id": pa.array(range(5_000), pa.int32()),
            "item": [f"item {n}" for n in range(5_000)],
            TIME: pa.array([1] * 5_000),
        }
    )
    orders.compare_and_append(table, 0, 10)
    return orders


def ids(*numbers, kind=None):
    return pa.table({"id": pa.array(numbers, kind or pa.int32())})


def items(table):
    return dict(zip(table["id"].to_pylist(), table["item"].to_pylist(), strict=True))


def test_lookup_finds_keys_in_every_schema_version(client, orders):
    orders.alter(WIDER, defaults={"count": 1})
    orders.compare_and_append([({"id": 2**40, "item": "big", "count": 3}, 12, 1)], 10, 20)
    assert items(orders.lookup(ids(7, 4_999, 5_000), 9)) == {7: "item 7", 4_999: "item 4999"}
    found = orders.lookup(ids(7, 2**40, kind=pa.int64()), 19)
    assert sorted(found.to_pylist(), key=lambda row: row["id"]) == [
        {"id": 7, "item": "item 7", "count": 1, DIFF: 1},
        {"id": 2**40, "item": "big", "count": 3, DIFF: 1},
    ]
    client.compact()
    assert orders.lookup(ids(2**40, kind=pa.int64()), 19)["count"].to_pylist() == [3]
    assert items(orders.lookup(ids(7), 9)) == {7: "item 7"}


def test_lookup_reads_only_parts_whose_range_contains_the_key(client, orders):
    orders.allow_compaction(5).result()
    client.compact()  # Sorts rows by key.
    parts = [p for b in orders.state.batches for p in b.parts if isinstance(p, Stored)]
    assert len(parts) > 3
    orders.lookup(ids(0), 9)  # Caches the footers.
    before = client.statistics()
    assert items(orders.lookup(ids(2_500), 9)) == {2_500: "item 2500"}
    assert client.statistics().bytes_read - before.bytes_read <= max(p.size for p in parts)
    before = client.statistics()
    assert orders.lookup(ids(-1, 5_000), 9).num_rows == 0
    assert client.statistics().bytes_read == before.bytes_read


def test_lookup_of_many_keys_returns_all_existing_rows(client, orders):
    chosen = random.Random(3).sample(range(-500, 5_500), 3_000)
    expected = {n: f"item {n}" for n in chosen if 0 <= n < 5_000}
    assert items(orders.lookup(ids(*chosen, *chosen[:50]), 9)) == expected
    client.compact()
    assert items(orders.lookup(ids(*chosen), 9)) == expected


def test_lookup_omits_discarded_and_unsealed_updates(client, orders):
    orders.write([({"id": 1, "item": "late"}, 11, 1), ({"id": 1, "item": "later"}, 15, 1)]).result()
    orders.seal(12).result()
    client.discard_unsealed()
    orders.write([({"id": 1, "item": "unsealed"}, 20, 1)]).result()
    orders.seal(20).result()
    assert sorted(orders.lookup(ids(1), 19)["item"].to_pylist()) == ["item 1", "late"]


def test_lookup_outside_readable_times_raises_errors_of_snapshot(client, orders):
    orders.allow_compaction(5).result()
    with pytest.raises(SinceError):
        orders.lookup(ids(1), 4)
    with pytest.raises(NotYetComplete):
        orders.lookup(ids(1), 10)
    client.append_all([AppendTo(orders, [], 10, 20)], [Fail(orders, 15, StoredError("E", "lost"))])
    assert orders.lookup(ids(1), 14).num_rows == 1
    with pytest.raises(CollectionErrored, match="lost"):
        orders.lookup(ids(1), 15)


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        (pa.table({"item": ["x"]}), "do not have the key columns"),
        (pa.table({"id": pa.array([1], pa.int32()), "item": ["x"]}), "do not have the key columns"),
        (pa.table({"id": pa.array([1], pa.int64())}), "is int64, not int32"),
    ],
)
def test_lookup_with_malformed_keys_raises_usage_error(orders, keys, match):
    with pytest.raises(UsageError, match=match):
        orders.lookup(keys, 9)


def test_lookup_in_collection_without_key_columns_raises_usage_error(client):
    bag = client.create_or_load("bag", schema=ORDERS)
    pairs = client.create_or_load("pairs", key=TEXT, value=TEXT)
    for each in (bag, pairs):
        each.seal(1).result()
        with pytest.raises(UsageError, match="has no key columns"):
            each.lookup(pa.table({"key": ["x"]}), 0)


@pytest.mark.parametrize("place", ["footer", "page"])
def test_lookup_in_damaged_part_raises_corruption(place):
    shelf = Shelf()
    with opened(shelf, inline_bytes=0, cache_bytes=0) as client:
        orders = client.create_or_load("orders", schema=ORDERS, key_columns=["id"])
        orders.compare_and_append([({"id": 1, "item": "x"}, 0, 1)], 0, 1)
        (part,) = orders.state.batches[0].parts
        assert isinstance(part, Stored)
        data, modified = shelf.objects[part.key]
        at = part.size - part.footer // 2 if place == "footer" else 10
        flipped = bytearray(data)
        flipped[at] ^= 1
        shelf.objects[part.key] = (bytes(flipped), modified)
        with pytest.raises(Corruption, match=part.key):
            orders.lookup(ids(1), 0)
