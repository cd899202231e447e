import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.data import check_row_schema
from penstock.errors import InternalError, UsageError
from penstock.progress import MAX_TIME
from penstock.reclock import (
    KAFKA,
    KINESIS,
    POSTGRES,
    PUBNUB,
    S3,
    SHAPES,
    WHOLE,
    Bindings,
    Minted,
    Regressed,
    Shape,
    Unmoved,
    accumulated,
    close,
    mint,
    shape_of,
)
from penstock.reclock.remap import steps
from tests.reclock.sources import (
    FIRST_SEQUENCE_NUMBER,
    PARTITIONS,
    History,
    closed,
    histories,
    written,
)

shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def minted(shape, current, probed, *, at=1000) -> list[tuple]:
    outcome = mint(shape, current, probed, at=at)
    assert isinstance(outcome, Minted)
    return rows_of(outcome.updates)


def rows_of(updates: pa.Table) -> list[tuple]:
    return list(zip(*(column.to_pylist() for column in updates.columns), strict=True))


@shapes
def test_a_remap_can_be_stored(shape: Shape):
    assert check_row_schema(shape.remap, (), collection="r") == shape.remap


def test_the_columns_are_those_of_each_type_of_source():
    assert {name: shape.remap.names for name, shape in SHAPES.items()} == {
        "kafka": ["partition"],
        "kafka-topics": ["partition"],
        "kinesis": ["shard", "sequence_number"],
        "postgres": ["ignored"],
        "pubnub": ["region"],
        "s3": ["object_key"],
    }
    assert {name: shape.progress.names for name, shape in SHAPES.items()} == {
        "kafka": ["mz_timestamp", "partition", "offset"],
        "kafka-topics": ["mz_timestamp", "partition", "offset"],
        "kinesis": ["mz_timestamp", "shard_id", "sequence_number"],
        "postgres": ["mz_timestamp", "lsn"],
        "pubnub": ["mz_timestamp", "region", "timetoken"],
        "s3": ["mz_timestamp", "key", "byte_offset"],
    }


def test_a_type_without_a_gauge_has_no_shape():
    assert shape_of("postgres") is POSTGRES
    with pytest.raises(UsageError, match='"webhook" has no gauge'):
        shape_of("webhook")


def test_the_example_of_two_partitions():
    first, second = 1649686076392, 1649686079487
    assert minted(KAFKA, {}, {1: 42, 2: 40}, at=first) == [(1, first, 42), (2, first, 40)]
    assert minted(KAFKA, {1: 42, 2: 40}, {1: 45, 2: 44}, at=second) == [
        (1, second, 3),
        (2, second, 4),
    ]


def test_postgres_binds_positions_under_a_row_that_says_nothing():
    assert minted(POSTGRES, {}, {WHOLE: 0x16_B374D848}) == [(None, 1000, 0x16_B374D848)]
    assert minted(POSTGRES, {WHOLE: 10}, {WHOLE: 15}) == [(None, 1000, 5)]


def test_kinesis_replaces_the_row_that_holds_the_sequence_number():
    n = FIRST_SEQUENCE_NUMBER
    assert minted(KINESIS, {}, {"s": n}) == [("s", str(n), 1000, 1)]
    assert minted(KINESIS, {"s": n}, {"s": n + 1}) == [
        ("s", str(n), 1000, -1),
        ("s", str(n + 1), 1000, 1),
    ]


def test_a_new_partition_begins_at_zero_and_one_still_there_has_no_row():
    outcome = mint(KAFKA, {0: 4}, {0: 4, 1: 2, 2: 0}, at=1000)
    assert isinstance(outcome, Minted)
    assert rows_of(outcome.updates) == [(1, 1000, 2)]
    assert outcome.frontier == {0: 4, 1: 2}


@pytest.mark.parametrize("current", [{}, {0: 4}])
def test_without_movement_there_are_no_rows(current):
    assert mint(KAFKA, current, {0: 0} | current, at=1000) == Unmoved()


def test_nothing_is_minted_when_a_partition_goes_back_though_others_go_on():
    outcome = mint(KAFKA, {0: 4, 1: 9, 2: 5}, {0: 7, 1: 8, 2: 4}, at=1000)
    assert outcome == Regressed(1, was=9, now=8, others=1)


def test_a_partition_that_is_gone_has_gone_back_in_a_topic():
    assert mint(KAFKA, {0: 4, 1: 9}, {0: 7}, at=1000) == Regressed(1, was=9, now=None)
    assert mint(POSTGRES, {WHOLE: 9}, {}, at=1000) == Regressed(WHOLE, was=9, now=None)


@pytest.mark.parametrize("shape", [KINESIS, PUBNUB, S3], ids=lambda shape: shape.name)
def test_a_partition_that_is_gone_keeps_its_row_where_partitions_end(shape):
    one, other, _ = PARTITIONS[shape.name]
    outcome = mint(shape, {one: 4, other: 9}, {other: 10}, at=1000)
    assert isinstance(outcome, Minted)
    assert outcome.frontier == {one: 4, other: 10}
    assert mint(shape, {one: 4, other: 9}, {}, at=1000) == Unmoved()
    assert mint(shape, {one: 4}, {one: 3}, at=1000) == Regressed(one, was=4, now=3)


@pytest.mark.parametrize(
    ("shape", "probed"),
    [
        (KAFKA, {"0": 1}),
        (KAFKA, {True: 1}),
        (KAFKA, {2**31: 1}),
        (KAFKA, {-1: 1}),
        (KAFKA, {0: -1}),
        (KAFKA, {0: 1.0}),
        (KAFKA, {0: 2**63}),
        (POSTGRES, {0: 1}),
        (S3, {7: 1}),
    ],
)
def test_what_is_no_partition_or_offset_is_refused(shape, probed):
    with pytest.raises(UsageError, match=f"of a {shape.name} source"):
        mint(shape, {}, probed, at=1000)


@pytest.mark.parametrize("at", [-1, MAX_TIME, 1.5])
def test_nothing_is_bound_to_what_is_no_time(at):
    with pytest.raises(UsageError):
        mint(KAFKA, {}, {0: 1}, at=at)
    with pytest.raises(UsageError):
        close(KAFKA, {0: 1}, at=at)


@given(histories())
def test_what_was_bound_is_what_is_read_back(history: History):
    bindings = history.bindings()
    for time, frontier in history.frontiers.items():
        bound = {partition: offset for partition, offset in frontier.items() if offset}
        assert bindings.frontier_as_of(time) == bound
    read = accumulated(history.shape, history.updates)
    assert read == bindings.frontier_as_of(history.upper - 1)


@given(histories(), st.integers(0, 12))
def test_reading_on_from_the_middle_gives_the_same(history: History, cut: int):
    early = [i for i, row in enumerate(history.updates.to_pylist()) if row["mz_timestamp"] < cut]
    late = [i for i in range(len(history.updates)) if i not in early]
    take = history.updates.take
    before = accumulated(history.shape, take(pa.array(early, pa.int64())))
    after = accumulated(history.shape, take(pa.array(late, pa.int64())), before=before)
    assert after == accumulated(history.shape, history.updates)


@given(histories(), st.randoms(use_true_random=False))
def test_the_order_of_updates_leaves_no_trace(history: History, chance):
    order = list(range(len(history.updates)))
    chance.shuffle(order)
    shuffled = history.updates.take(pa.array(order, pa.int64()))
    assert steps(history.shape, shuffled) == steps(history.shape, history.updates)


@given(histories(), st.integers(1, 5))
def test_closing_takes_every_row_back(history: History, later: int):
    at = history.upper + later
    ended = closed(history, at)
    bindings = ended.bindings()
    sums: dict = {}
    for *data, _, diff in rows_of(ended.updates):
        sums[tuple(data)] = sums.get(tuple(data), 0) + diff
    assert set(sums.values()) <= {0}
    assert bindings.frontier_as_of(at) is None
    if history.updates.num_rows:
        assert bindings.closed_at == at
        assert bindings.frontier_as_of(at - 1) == history.bindings().frontier_as_of(
            history.upper - 1
        )


@pytest.mark.parametrize(
    ("shape", "updates"),
    [
        (KAFKA, [(0, 1, 5), (0, 2, -3)]),
        (KAFKA, [(0, 1, -5)]),
        (KAFKA, [(0, 1, 5), (0, 2, -5), (0, 3, 7)]),
        (KINESIS, [("s", "5", 1, 1), ("s", "5", 2, -1), ("s", "4", 2, 1)]),
        (KINESIS, [("s", "5", 1, 1), ("s", "9", 2, 1)]),
        (KINESIS, [("s", "5", 1, 1), ("s", "6", 2, -1), ("s", "9", 2, 1)]),
        (KINESIS, [("s", "5", 1, 2)]),
        (KINESIS, [("s", "5", 1, 1), ("s", "5", 2, -1), ("s", "9", 3, 1)]),
    ],
)
def test_a_remap_that_goes_back_is_not_believed(shape, updates):
    schema = written(shape, {}).updates.schema
    arrays = [pa.array(c, t) for c, t in zip(zip(*updates, strict=True), schema.types, strict=True)]
    with pytest.raises(InternalError, match=f"remap of a {shape.name} source goes back"):
        steps(shape, pa.table(arrays, schema=schema))


def test_a_remap_closed_in_part_is_not_believed():
    updates = pa.concat_tables(
        [written(KAFKA, {1: {0: 5, 1: 3}}).updates, close(KAFKA, {0: 5}, at=2).updates]
    )
    with pytest.raises(InternalError, match="closed for some partitions only"):
        Bindings.read(KAFKA, updates, since=0, upper=MAX_TIME, source="s")


def test_the_remap_of_another_type_is_refused():
    with pytest.raises(UsageError, match="not the remap of a s3 source"):
        steps(S3, written(KAFKA, {1: {0: 5}}).updates)
