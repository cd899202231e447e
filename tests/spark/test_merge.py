"""Merges by Spark: contents are the same at every retained time."""

import math
import random
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest
from msgspec.structs import replace
from tests.persist.shop import by_hand

import penstock.persist as persist
import penstock.spark as ps
from penstock.data import TIME
from penstock.errors import Corruption, PenstockError, UsageError
from penstock.persist.batch import part_scans_of
from penstock.persist.merge.merger import BigMerges, merge_since
from penstock.persist.merge.ranges import range_boundaries, sample
from penstock.persist.merge.spark import SparkMerges, _Job
from penstock.persist.paths import marker_key
from penstock.persist.state import Batch, CollectionState, Inline, files_of

OTHER_NAN = struct.unpack(">d", bytes.fromhex("fff8000000000001"))[0]

PLAIN = pa.schema([("k", pa.string()), ("n", pa.int32()), ("x", pa.float64())])

NESTED = pa.schema(
    [
        ("k", pa.int64()),
        ("tags", pa.map_(pa.string(), pa.float64())),
        ("inner", pa.struct([("at", pa.timestamp("ns")), ("half", pa.float16())])),
        ("u", pa.uint64()),
        ("d", pa.decimal256(50, 3)),
        ("nothing", pa.null()),
        ("t", pa.time64("ns")),
    ]
)


def plain_row(chance: random.Random) -> dict[str, Any]:
    return {
        "k": chance.choice([None, *(f"key {i}" for i in range(40))]),
        "n": chance.choice([None, -1, 0, 1]),
        "x": chance.choice([None, 0.0, -0.0, math.nan, OTHER_NAN, 1.5]),
    }


def nested_row(chance: random.Random) -> dict[str, Any]:
    return {
        "k": chance.randrange(30),
        "tags": chance.choice([None, [], [("a", -0.0)], [("a", 0.0)], [("a", math.nan)]]),
        "inner": chance.choice([None, {"at": 1, "half": -0.0}, {"at": None, "half": 1.5}]),
        "u": chance.choice([None, 0, 2**64 - 1]),
        "d": None,
        "nothing": None,
        "t": chance.choice([None, 1]),
    }


def fill(table: persist.Collection, row: Any, *, seed: int, seals: int = 6, rows: int = 60) -> None:
    """Write random inserts, and retractions of existing rows."""
    chance = random.Random(seed)
    there: list[dict[str, Any]] = []
    start = table.upper
    for upper in range(start + 2, start + 2 + 2 * seals, 2):
        updates = []
        for _ in range(rows):
            time = upper - 1 - chance.randrange(2)
            if there and chance.random() < 0.3:
                updates.append((there.pop(chance.randrange(len(there))), upper - 1, -1))
            else:
                made = row(chance)
                updates.append((made, time, 1))
                there.append(made)
        table.write(updates).result()
        table.seal(upper).result()


@contextmanager
def opened(url: str, **changed: Any) -> Iterator[persist.Client]:
    chosen = {"merge_bytes": 1, "part_bytes": 4_000, "inline_bytes": 2_000, **changed}
    with persist.open(url, writer="w", settings=by_hand(**chosen)) as client:
        yield client


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file:{tmp_path / 'data'}"


def bits(value: Any) -> str:
    match value:
        case float():
            return struct.pack(">d", value).hex()
        case dict():
            return f"{{{','.join(f'{name}:{bits(inner)}' for name, inner in value.items())}}}"
        case list() | tuple():
            return f"[{','.join(map(bits, value))}]"
        case _:
            return repr(value)


def contents(table: persist.Collection) -> dict[int, Counter[str]]:
    """Return the exact contents as of every retained time."""
    return {
        time: Counter(
            {bits(data): diff for data, _, diff in table.snapshot(time)},
        )
        for time in range(table.state.since, table.upper)
    }


@pytest.mark.parametrize(
    ("schema", "row", "part_bytes"),
    [
        (PLAIN, plain_row, 1 << 30),
        (NESTED, nested_row, 20_000),
        pytest.param(PLAIN, plain_row, 1_000, marks=pytest.mark.long),
        pytest.param(NESTED, nested_row, 1_000, marks=pytest.mark.long),
    ],
)
def test_difference_by_spark_equals_difference_in_process(spark, url, schema, row, part_bytes):
    key = ["k"]
    with opened(url) as client:
        table = client.create_or_load("rows", schema=schema, key_columns=key)
        other = client.create_or_load("other", schema=schema, key_columns=key)
        fill(table, row, seed=1)
        fill(other, row, seed=2)
        wanted = other.snapshot(other.upper - 1).arrow().drop_columns([TIME])
        time = table.upper
        with client.staging() as staging:
            goal = client.stage(table, [wanted], staging, time=0)
            here = client.difference(table, goal, staging, time=time)
            client.delegate_big_merges(SparkMerges(spark, url, part_bytes=part_bytes))
            there = client.difference(table, goal, staging, time=time)
            assert isinstance(here, pa.Table)
            assert isinstance(there, persist.Staged)
            assert there.batch is not None
            assert there.batch.rows == here.num_rows
            table.compare_and_append(there, time, time + 1)
            nothing = client.difference(table, goal, staging, time=time + 1)
            assert nothing == persist.Staged(None)
            everything = client.difference(table, None, staging, time=time + 1)
            table.compare_and_append(everything, time + 1, time + 2)
        held = [
            Counter({bits(data): diff for data, _, diff in each.snapshot(each.upper - at)})
            for each, at in ((table, 2), (other, 1), (table, 1))
        ]
        assert held[0] == held[1]
        assert held[2] == Counter()


class Watched:
    """Merger that delegates to Spark and records the results."""

    def __init__(self, by: BigMerges) -> None:
        self.by = by
        self.made: list[Batch | None] = []
        self.stagings: list[str] = []

    def merge(
        self, collection: CollectionState, inputs: Any, staging: str, *, since: int
    ) -> Batch | None:
        self.stagings.append(staging)
        self.made.append(self.by.merge(collection, inputs, staging, since=since))
        return self.made[-1]


def delegated(client: persist.Client, spark: Any) -> Watched:
    watched = Watched(ps.compactor(spark, client))
    client.delegate_big_merges(watched)
    return watched


@pytest.mark.parametrize(
    ("schema", "row", "key"),
    [
        (PLAIN, plain_row, ()),
        (PLAIN, plain_row, ("k",)),
        (PLAIN, plain_row, ("x", "n")),
        (NESTED, nested_row, ()),
        (NESTED, nested_row, ("k",)),
    ],
)
def test_merge_by_spark_keeps_contents_at_every_time(spark, url, schema, row, key):
    with opened(url) as client:
        table = client.create_or_load("rows", schema=schema, key_columns=key)
        fill(table, row, seed=len(key))
        table.allow_compaction(6).result()
        before = contents(table)
        watched = delegated(client, spark)
        client.compact()
        assert contents(table) == before
        assert [batch is not None for batch in watched.made] == [True, True]
        assert all(len(batch.parts) > 1 for batch in watched.made if batch)
        # Merge again: the inputs are now batches of Spark, sorted and split into ranges.
        fill(table, row, seed=7, seals=2)
        table.allow_compaction(12).result()
        before = contents(table)
        client.compact()
        assert contents(table) == before
        assert len(watched.made) > 2
    with persist.open(url, hold=False) as client:
        assert contents(client.collection("rows")) == before


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("key", [(), ("k",)])
def test_merge_by_spark_and_in_process_produce_equal_batches(spark, tmp_path, key, twice):
    """Both mergers agree on whether a base is distinct."""
    schema = pa.schema([("k", pa.float64()), ("n", pa.int64())])
    made: dict[str, list[Batch]] = {}
    rows: dict[str, list[pa.Table]] = {}
    for way, merge_bytes in (("here", 1 << 30), ("spark", 1)):
        with opened(f"file:{tmp_path / way}", merge_bytes=merge_bytes) as client:
            table = client.create_or_load("rows", schema=schema, key_columns=key)
            many = [({"k": float(i % 300), "n": i % 300}, i % 3, 1) for i in range(300)]
            table.compare_and_append([*many, ({"k": -0.0, "n": 0}, 1, 1)], 0, 3)
            table.compare_and_append([({"k": 0.0, "n": 0}, 3, -1)], 3, 4)
            table.compare_and_append([({"k": 7.0, "n": 7}, 4, 1)] if twice else [], 4, 5)
            table.compare_and_append([({"k": 1000.0, "n": 0}, 5, 1)], 5, 6)
            table.allow_compaction(4).result()
            if way == "spark":
                delegated(client, spark)
            client.compact()
            state = table.state
            made[way] = list(state.batches)
            batches = client.reader.batches
            rows[way] = [batches.rows(state, batch, state.schemas[-1]) for batch in state.batches]
    assert [batch.distinct for batch in made["spark"]] == [not twice, False]
    for here, there in zip(made["here"], made["spark"], strict=True):
        same = [replace(each, parts=(), size=0, memory=0) for each in (here, there)]
        assert same[0] == same[1]
    assert [each.to_pylist() for each in rows["here"]] == [
        each.to_pylist() for each in rows["spark"]
    ]


def test_merge_by_spark_upgrades_rows_to_newest_schema(spark, url):
    grown = pa.schema([*PLAIN.set(1, pa.field("n", pa.int64())), ("note", pa.string())])
    with opened(url) as client:
        table = client.create_or_load("rows", schema=PLAIN, key_columns=("k",))
        fill(table, plain_row, seed=1, seals=3)
        table.alter(grown, defaults={"note": "old"})
        fill(table, lambda chance: plain_row(chance) | {"note": "new"}, seed=2, seals=3)
        table.allow_compaction(table.upper - 3).result()
        before = contents(table)
        watched = delegated(client, spark)
        client.compact()
        assert contents(table) == before
        assert {batch.schema for batch in watched.made if batch} == {1}
        notes = table.snapshot(table.upper - 1).arrow().column("note").to_pylist()
        assert {"old", "new"} <= set(notes)


def test_merge_by_spark_does_not_restore_discarded_updates(spark, url):
    with opened(url) as client:
        table = client.create_or_load("rows", schema=PLAIN)
        table.write([(plain_row(random.Random(i)), i % 4, 1) for i in range(200)]).result()
        table.seal(2).result()
        client.discard_unsealed()
        table.compare_and_append([({"k": "a", "n": 1, "x": None}, 2, 1)], 2, 4)
        table.allow_compaction(3).result()
        before = contents(table)
        watched = delegated(client, spark)
        client.compact()
        assert contents(table) == before
        assert len(watched.made) == 1


def test_merge_by_spark_of_cancelling_updates_leaves_no_batch(spark, url):
    with opened(url) as client:
        table = client.create_or_load("rows", schema=PLAIN)
        rows = [plain_row(random.Random(i)) for i in range(200)]
        table.compare_and_append([(row, 0, 1) for row in rows], 0, 1)
        table.compare_and_append([(row, 1, -1) for row in rows], 1, 2)
        table.allow_compaction(1).result()
        watched = delegated(client, spark)
        client.compact()
        assert (watched.made, table.state.batches) == ([None], ())
        given_back(client, watched.stagings[0])


def test_merge_by_spark_of_key_value_collection_keeps_contents(spark, url):
    with opened(url) as client:
        table = client.create_or_load("words", key=persist.TEXT, value=persist.BIGINT)
        for upper in range(1, 5):
            pairs = [(f"word {i}", 2**70 + upper) for i in range(100)]
            table.compare_and_append([(pair, upper - 1, 1) for pair in pairs], upper - 1, upper)
        table.allow_compaction(2).result()
        before = contents(table)
        watched = delegated(client, spark)
        client.compact()
        assert contents(table) == before
        assert watched.made


def damaged(url: str, table: persist.Collection) -> tuple[Path, str]:
    """Return path and key of an object of the oldest batch, an input of the first merge."""
    (key,) = files_of(table.state.batches[0])
    return Path(url.removeprefix("file:")) / key, key


def given_back(client: persist.Client, staging: str) -> None:
    ids = client._maintenance().merger.staging
    assert ids.current == staging
    ids.turn_over()
    assert ids.finished() == [staging]


@pytest.mark.parametrize(
    ("missing", "part_bytes"), [(True, 4_000), (False, 4_000), (True, 1 << 20)]
)
def test_merge_by_spark_of_damaged_object_raises_corruption(spark, url, missing, part_bytes):
    """The sample step finds the damage, or the merge step if there is one range."""
    with opened(url, part_bytes=part_bytes) as client:
        table = client.create_or_load("rows", schema=PLAIN, key_columns=("k",))
        fill(table, plain_row, seed=3)
        table.allow_compaction(6).result()
        path, key = damaged(url, table)
        good = path.read_bytes()
        if missing:
            path.unlink()
        else:
            path.write_bytes(bytes([good[0] ^ 1]) + good[1:])
        watched = delegated(client, spark)
        batches = table.state.batches
        with pytest.raises(Corruption) as raised:
            client.compact()
        assert raised.value.key == key
        assert key in str(raised.value)
        assert raised.value.hint
        assert table.state.batches == batches
        given_back(client, watched.stagings[0])
        path.write_bytes(good)


def test_objects_written_by_failed_spark_merge_are_swept(spark, url):
    with opened(url) as client:
        table = client.create_or_load("rows", schema=PLAIN, key_columns=("k",))
        fill(table, plain_row, seed=3)
        before = contents(table)
        linked = objects_of(table)
        rows = table.snapshot(table.upper - 1).arrow()
        starts = range_boundaries([sample(rows, ("k",), 64)], [1], 4)
        path, _ = damaged(url, table)
        good = path.read_bytes()
        path.unlink()
        delegated(client, spark)
        # With known range boundaries, the merge step is the first to read the object.
        with (
            mock.patch.object(_Job, "range_boundaries", return_value=starts),
            pytest.raises(Corruption),
        ):
            client.compact()
        path.write_bytes(good)
        assert objects_in(url) > linked
    with opened(url) as client:
        client.compact()
        table = client.collection("rows")
        assert contents(table) == before
        assert objects_in(url) == objects_of(table)


def objects_of(table: persist.Collection) -> set[str]:
    return {key for batch in table.state.batches for key in files_of(batch)}


def objects_in(url: str) -> set[str]:
    folder = Path(url.removeprefix("file:"))
    return {str(each.relative_to(folder)) for each in folder.glob("batch/*/*")}


def test_objects_of_overtaken_merge_attempt_are_swept(spark, url):
    folder = Path(url.removeprefix("file:"))
    with opened(url) as client:
        table = client.create_or_load("rows", schema=PLAIN)
        fill(table, plain_row, seed=4)
        state = table.state
        merges = SparkMerges(spark, client.url, part_bytes=4_000)
        staging = client._maintenance().merger.staging.current
        inputs = state.batches
        overtaken = merges.merge(state, inputs, staging, since=merge_since(state))
        counted = merges.merge(state, inputs, staging, since=merge_since(state))
        assert overtaken is not None
        assert counted is not None
        assert not set(files_of(overtaken)) & set(files_of(counted))
        assert all((folder / key).exists() for key in files_of(overtaken))
    with opened(url) as client:
        client.compact()
        assert not any((folder / key).exists() for key in files_of(overtaken))


def test_failed_task_of_spark_merge_is_reported_with_its_cause(spark, url):
    with opened(url) as client:
        table = client.create_or_load("rows", schema=PLAIN)
        fill(table, plain_row, seed=5, seals=2)
        state = table.state
        broken = replace(state.batches[0], parts=(Inline(b"not a message"),))
        merges = SparkMerges(spark, client.url)
        with pytest.raises(PenstockError) as raised:
            merges.merge(state, [broken], "1-0", since=0)
        assert 'could not merge collection "rows"' in str(raised.value)
        assert raised.value.detail.startswith("pyarrow.lib.ArrowInvalid: Expected to read")


def test_merge_by_spark_without_shared_storage_raises_and_writes_nothing(spark, url):
    with opened(url) as client:
        table = client.create_or_load("rows", schema=PLAIN)
        fill(table, plain_row, seed=6, seals=2)
        before = objects_in(url)
        state = table.state
        bundles = [[each for batch in state.batches for each in part_scans_of(state, batch)]]
        job = _Job(spark, url, replace(state, batches=()), bundles, negated=0, since=0)
        with pytest.raises(UsageError, match="is not shared between the driver and host"):
            job.merged(
                job.range_boundaries(1), "1-0", 4_000, marker=marker_key("1-0", "never-left")
            )
        assert objects_in(url) == before


def test_merge_by_spark_restores_job_properties_of_the_thread(spark, url):
    context = spark.sparkContext
    context.setJobDescription("mine")
    try:
        with opened(url) as client:
            table = client.create_or_load("rows", schema=PLAIN)
            fill(table, plain_row, seed=6, seals=2)
            delegated(client, spark)
            client.compact()
        assert context.getLocalProperty("spark.job.description") == "mine"
        assert context.getLocalProperty("spark.scheduler.pool") is None
    finally:
        context.setLocalProperty("spark.job.description", None)


def test_compactor_of_memory_location_raises_usage_error(spark):
    with (
        persist.open("memory:", writer="w", settings=by_hand()) as client,
        pytest.raises(UsageError, match="cannot be reached by Spark"),
    ):
        ps.compactor(spark, client)
