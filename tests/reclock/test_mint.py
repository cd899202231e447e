import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.data import check_row_schema
from penstock.data.remap_form import KAFKA, KINESIS, POSTGRES, PUBNUB, S3, RemapForm
from penstock.errors import InternalError, UsageError
from penstock.progress import MAX_TIME, SINGLE_PARTITION, Frontier
from penstock.reclock import Minted, Regressed, Unmoved, accumulate, mint
from penstock.reclock.remap import decode_steps
from tests.reclock.histories import (
    FIRST_SEQUENCE_NUMBER,
    FORMS,
    PARTITIONS,
    History,
    histories,
    make_history,
)

shapes = pytest.mark.parametrize("shape", FORMS.values(), ids=FORMS)


def mint_rows(shape, current, probed, *, time=1000) -> list[tuple]:
    outcome = mint(shape, Frontier(current), Frontier(probed), time=time)
    assert isinstance(outcome, Minted)
    return rows_of(outcome.updates)


def rows_of(updates: pa.Table) -> list[tuple]:
    return list(zip(*(column.to_pylist() for column in updates.columns), strict=True))


@shapes
def test_remap_schema_is_a_valid_row_schema(shape: RemapForm):
    assert check_row_schema(shape.remap, (), collection="r") == shape.remap


def test_shapes_have_columns_of_their_source_type():
    assert {name: shape.remap.names for name, shape in FORMS.items()} == {
        "kafka": ["partition"],
        "kafka-topics": ["partition"],
        "kinesis": ["shard", "sequence_number"],
        "postgres": ["ignored"],
        "pubnub": ["region"],
        "s3": ["object_key"],
    }
    assert {name: shape.progress.names for name, shape in FORMS.items()} == {
        "kafka": ["mz_timestamp", "partition", "offset"],
        "kafka-topics": ["mz_timestamp", "partition", "offset"],
        "kinesis": ["mz_timestamp", "shard_id", "sequence_number"],
        "postgres": ["mz_timestamp", "lsn"],
        "pubnub": ["mz_timestamp", "region", "timetoken"],
        "s3": ["mz_timestamp", "key", "byte_offset"],
    }


def test_mint_kafka_stores_increments():
    first, second = 1649686076392, 1649686079487
    assert mint_rows(KAFKA, {}, {1: 42, 2: 40}, time=first) == [(1, first, 42), (2, first, 40)]
    assert mint_rows(KAFKA, {1: 42, 2: 40}, {1: 45, 2: 44}, time=second) == [
        (1, second, 3),
        (2, second, 4),
    ]


def test_mint_postgres_stores_increments_in_one_row():
    assert mint_rows(POSTGRES, {}, {SINGLE_PARTITION: 0x16_B374D848}) == [
        (None, 1000, 0x16_B374D848)
    ]
    assert mint_rows(POSTGRES, {SINGLE_PARTITION: 10}, {SINGLE_PARTITION: 15}) == [(None, 1000, 5)]


def test_mint_kinesis_replaces_row_with_sequence_number():
    n = FIRST_SEQUENCE_NUMBER
    assert mint_rows(KINESIS, {}, {"s": n}) == [("s", str(n), 1000, 1)]
    assert mint_rows(KINESIS, {"s": n}, {"s": n + 1}) == [
        ("s", str(n), 1000, -1),
        ("s", str(n + 1), 1000, 1),
    ]


def test_mint_new_partition_at_zero_has_no_row():
    outcome = mint(KAFKA, Frontier({0: 4}), Frontier({0: 4, 1: 2, 2: 0}), time=1000)
    assert isinstance(outcome, Minted)
    assert rows_of(outcome.updates) == [(1, 1000, 2)]
    assert outcome.frontier == Frontier({0: 4, 1: 2})


@pytest.mark.parametrize("current", [{}, {0: 4}])
def test_mint_without_advance_returns_unmoved(current):
    assert mint(KAFKA, Frontier(current), Frontier({0: 0} | current), time=1000) == Unmoved()


def test_mint_with_one_partition_backwards_returns_regressed():
    outcome = mint(KAFKA, Frontier({0: 4, 1: 9, 2: 5}), Frontier({0: 7, 1: 8, 2: 4}), time=1000)
    assert outcome == Regressed(1, was=9, now=8, others=1)


def test_mint_with_missing_partition_returns_regressed():
    assert mint(KAFKA, Frontier({0: 4, 1: 9}), Frontier({0: 7}), time=1000) == Regressed(
        1, was=9, now=None
    )
    assert mint(POSTGRES, Frontier({SINGLE_PARTITION: 9}), Frontier(), time=1000) == Regressed(
        SINGLE_PARTITION, was=9, now=None
    )


@pytest.mark.parametrize("shape", [KINESIS, PUBNUB, S3], ids=lambda shape: shape.name)
def test_mint_with_ended_partition_keeps_its_row(shape):
    one, other, _ = PARTITIONS[shape.name]
    outcome = mint(shape, Frontier({one: 4, other: 9}), Frontier({other: 10}), time=1000)
    assert isinstance(outcome, Minted)
    assert outcome.frontier == Frontier({one: 4, other: 10})
    assert mint(shape, Frontier({one: 4, other: 9}), Frontier(), time=1000) == Unmoved()
    assert mint(shape, Frontier({one: 4}), Frontier({one: 3}), time=1000) == Regressed(
        one, was=4, now=3
    )


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
def test_mint_with_invalid_partition_or_offset_raises_usage_error(shape, probed):
    with pytest.raises(UsageError, match=f"of a {shape.name} source"):
        mint(shape, Frontier(), Frontier(probed), time=1000)


@pytest.mark.parametrize("time", [-1, MAX_TIME, 1.5])
def test_mint_at_invalid_time_raises_usage_error(time):
    with pytest.raises(UsageError):
        mint(KAFKA, Frontier(), Frontier({0: 1}), time=time)


@given(histories())
def test_accumulate_as_of_binding_returns_bound_frontier(history: History):
    for time, frontier in history.frontiers.items():
        assert history.frontier_as_of(time) == Frontier(frontier)
    current = accumulate(history.shape, history.updates)
    assert current == history.frontier_as_of(history.upper - 1)


@given(histories(), st.integers(0, 12))
def test_accumulate_in_two_parts_equals_one(history: History, cut: int):
    early = [i for i, row in enumerate(history.updates.to_pylist()) if row["mz_timestamp"] < cut]
    late = [i for i in range(len(history.updates)) if i not in early]
    take = history.updates.take
    before = accumulate(history.shape, take(pa.array(early, pa.int64())))
    after = accumulate(history.shape, take(pa.array(late, pa.int64())), before=before)
    assert after == accumulate(history.shape, history.updates)


@given(histories(), st.randoms(use_true_random=False))
def test_decode_steps_of_shuffled_updates_is_equal(history: History, rng):
    order = list(range(len(history.updates)))
    rng.shuffle(order)
    shuffled = history.updates.take(pa.array(order, pa.int64()))
    assert decode_steps(history.shape, shuffled) == decode_steps(history.shape, history.updates)


@pytest.mark.parametrize(
    ("shape", "updates"),
    [
        (KAFKA, [(0, 1, 5), (0, 2, -3)]),
        (KAFKA, [(0, 1, -5)]),
        (KAFKA, [(0, 1, 5), (0, 2, -5)]),
        (KAFKA, [(0, 1, 5), (0, 2, -5), (0, 3, 7)]),
        (KINESIS, [("s", "5", 1, 1), ("s", "5", 2, -1), ("s", "4", 2, 1)]),
        (KINESIS, [("s", "5", 1, 1), ("s", "9", 2, 1)]),
        (KINESIS, [("s", "5", 1, 1), ("s", "6", 2, -1), ("s", "9", 2, 1)]),
        (KINESIS, [("s", "5", 1, 2)]),
        (KINESIS, [("s", "5", 1, 1), ("s", "5", 2, -1)]),
        (KINESIS, [("s", "5", 1, 1), ("s", "5", 2, -1), ("s", "9", 3, 1)]),
    ],
)
def test_decode_steps_with_decrease_raises_internal_error(shape, updates):
    schema = make_history(shape, {}).updates.schema
    arrays = [pa.array(c, t) for c, t in zip(zip(*updates, strict=True), schema.types, strict=True)]
    with pytest.raises(InternalError, match=f"remap of a {shape.name} source moves backwards"):
        decode_steps(shape, pa.table(arrays, schema=schema))


def test_decode_steps_of_another_source_type_raises_usage_error():
    with pytest.raises(UsageError, match="columns of the remap of a s3 source"):
        decode_steps(S3, make_history(KAFKA, {1: {0: 5}}).updates)
