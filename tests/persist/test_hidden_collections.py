"""Hidden collections, labels of columns, and files staged by the writer."""

import pyarrow as pa
import pytest
from tests.persist.shop import SCHEMA, opened, rows

from penstock.data import DIFF, TIME
from penstock.data.schema import LABEL, label_of
from penstock.durable.memory import Shelf
from penstock.errors import UsageError
from penstock.persist import TEXT, UNIT, AppendTo, CollectionMissing, Settings, open
from penstock.persist.lake import find_collection
from penstock.persist.state import Stored


@pytest.fixture
def client():
    with opened(Shelf(), inline_bytes=200, part_bytes=2_000) as client:
        yield client


def labelled(name, kind, label, **more):
    return pa.field(name, kind, metadata={LABEL: label.encode(), b"other": b"x"}, **more)


def test_collections_lists_hidden_collections_only_on_request(client):
    client.create_or_load("shop.public.orders", schema=SCHEMA, owner="shop")
    client.create_or_load("shop/state", key=TEXT, value=UNIT, owner="shop")
    assert client.collections() == ["shop.public.orders"]
    assert client.collections(hidden=True) == ["shop.public.orders", "shop/state"]
    assert client.collection("shop/state").upper == 0
    with pytest.raises(CollectionMissing) as missing:
        client.collection("shop/stale")
    assert missing.value.detail == 'Collections there: "shop.public.orders".'


def test_find_collection_finds_hidden_collection_by_name(tmp_path):
    settings = Settings(background=False, notify="")
    with open(f"file:{tmp_path}/shop", writer="shop", settings=settings) as client:
        client.create_or_load("shop/state", key=TEXT, value=UNIT, owner="shop").seal(7).result()
    reader, found = find_collection(f"file:{tmp_path}", "shop/state", hold=False, settings=settings)
    with reader:
        assert found.upper == 7
    with pytest.raises(CollectionMissing, match="shop/other"):
        find_collection(f"file:{tmp_path}", "shop/other", hold=False, settings=settings)


def test_create_of_hidden_collection_without_owner_raises_usage_error(client):
    before = client.state
    with pytest.raises(UsageError, match='name "shop/state" cannot be used') as refused:
        client.create_or_load("shop/state", key=TEXT, value=UNIT)
    assert "owner" in refused.value.detail
    assert client.state is before


def test_column_label_is_stored_and_other_metadata_is_dropped(client):
    schema = pa.schema([labelled("k", pa.string(), "uuid"), ("n", pa.int32())])
    made = client.create_or_load("c", schema=schema, key_columns=["k"])
    assert made.schema.field("k").metadata == {LABEL: b"uuid"}
    made.compare_and_append(rows(("a", 1, 0, 1)), 0, 1)
    made.compare_and_append([({"k": "b", "n": 2}, 1, 1)], 1, 2)
    made.compare_and_append(rows(*((f"k{n}", n, 2, 1) for n in range(100))), 2, 3)
    for _ in range(2):
        for table in (
            made.snapshot(2).arrow(),
            made.lookup(pa.table({"k": ["a", "k7"]}), 2),
            next(iter(made.listen(0))).arrow(),
        ):
            assert label_of(table.schema.field("k")) == "uuid"
            assert table.schema.field("n").metadata is None
        client.compact()
    # Opening by types alone keeps the label.
    client.create_or_load("c", schema=SCHEMA, key_columns=["k"])
    assert label_of(made.schema.field("k")) == "uuid"


def test_alter_of_label_without_type_change_raises_usage_error(client):
    schema = pa.schema([labelled("k", pa.string(), "uuid"), labelled("n", pa.int32(), "integer")])
    made = client.create_or_load("c", schema=schema)
    made.compare_and_append(rows(("a", 1, 0, 1)), 0, 1)
    for changed in (
        pa.schema([schema.field("k"), labelled("n", pa.int32(), "oid")]),
        pa.schema([schema.field("k"), pa.field("n", pa.int32())]),
    ):
        with pytest.raises(UsageError, match="cannot change its label from integer"):
            made.alter(changed)
    made.alter(pa.schema([schema.field("k"), labelled("n", pa.int64(), "bigint")]))
    assert label_of(made.schema.field("n")) == "bigint"
    assert label_of(made.snapshot(0).arrow().schema.field("n")) == "integer"
    made.seal(2).result()
    assert label_of(made.snapshot(1).arrow().schema.field("n")) == "bigint"
    before = client.state
    made.alter(made.schema)
    assert client.state is before
    # Values stored as text read the same under any label.
    made.alter(pa.schema([labelled("k", pa.string(), "text"), made.schema.field("n")]))
    assert label_of(made.schema.field("k")) == "text"


def test_stage_writes_many_tables_as_stored_parts(client):
    made = client.create_or_load("c", schema=SCHEMA)
    in_memory = 0

    def tables():
        nonlocal in_memory
        for n in range(40):
            in_memory += 1
            yield rows(*((f"{n}-{i}", i, 3, 1) for i in range(25)))

    with client.staging() as staging:
        staged = client.stage(made, tables(), staging)
        nothing = client.stage(made, [rows()], staging)
        assert staged.batch is not None
        assert nothing.batch is None
        assert len(staged.batch.parts) > 3
        assert all(isinstance(part, Stored) for part in staged.batch.parts)
        few = rows(("few", 1, 4, 1))
        client.append_all([AppendTo(made, [staged, few, nothing, few.to_batches()[0]], 0, 5)])
    assert sum(u.diff for u in made.snapshot(4)) == 1_002
    assert in_memory == 40
    client.compact()
    assert sum(u.diff for u in made.snapshot(4)) == 1_002


def test_stage_with_schema_mismatch_raises_usage_error(client):
    made = client.create_or_load("c", schema=SCHEMA)
    with client.staging() as staging:
        with pytest.raises(UsageError, match="do not have the columns"):
            client.stage(made, [pa.table({"z": [1], TIME: [1], DIFF: [1]})], staging)
        with pytest.raises(UsageError, match="have no column"):
            client.stage(made, [rows(("a", 1, 1, 1)).drop_columns([TIME])], staging)
        timed = client.stage(made, [rows(("a", 1, 1, 1)).drop_columns([TIME])], staging, time=9)
        made.compare_and_append(timed, 0, 10)
    assert [u.time for u in made.snapshot(9)] == [9]


def test_append_of_batch_with_closed_staging_id_raises_usage_error(client):
    made = client.create_or_load("c", schema=SCHEMA)
    with client.staging() as staging:
        first = client.stage(made, [rows(("a", 1, 2, 1))], staging)
        made.seal(2).result()
    client.run_maintenance()  # Closes the staging id.
    with client.staging() as staging:
        second = client.stage(made, [rows(("b", 1, 2, 1))], staging)
        with pytest.raises(UsageError, match="is not in use here"):
            client.append_all([AppendTo(made, [second, first], 2, 3)])
        with pytest.raises(UsageError, match="lies below"):
            client.append_all([AppendTo(made, [second, rows(("c", 1, 1, 1))], 2, 3)])
    client.run_maintenance()
    assert staging not in client.state.staging
