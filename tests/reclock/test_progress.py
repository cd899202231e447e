from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.data import advance, consolidate
from penstock.data.remap_form import KAFKA, KINESIS, POSTGRES, PUBNUB, S3
from penstock.durable.memory import Shelf
from penstock.errors import UsageError
from penstock.progress import SINGLE_PARTITION, Frontier
from penstock.reclock import accumulate, progress_as_of, progress_changes, progress_name
from tests.persist.shop import opened
from tests.reclock.histories import (
    FIRST_SEQUENCE_NUMBER,
    FORMS,
    History,
    frontier_as_of,
    histories,
    make_history,
)


def rows_of(table: pa.Table) -> list[tuple[Any, ...]]:
    return list(zip(*(column.to_pylist() for column in table.columns), strict=True))


TOPIC = make_history(
    KAFKA, {1000: {1: 42, 2: 40}, 2000: {1: 45, 2: 40}, 3000: {1: 45, 2: 44, 3: 1}}
)


def test_progress_as_of_has_newest_binding_of_each_partition():
    assert rows_of(progress_as_of(KAFKA, TOPIC.updates, 999)) == []
    assert rows_of(progress_as_of(KAFKA, TOPIC.updates, 1000)) == [(1000, 1, 42), (1000, 2, 40)]
    assert rows_of(progress_as_of(KAFKA, TOPIC.updates, 2999)) == [(2000, 1, 45), (1000, 2, 40)]
    assert rows_of(progress_as_of(KAFKA, TOPIC.updates, 9000)) == [
        (2000, 1, 45),
        (3000, 2, 44),
        (3000, 3, 1),
    ]


def test_progress_changes_have_one_row_for_each_advance():
    assert rows_of(progress_changes(KAFKA, TOPIC.updates)) == [
        (1000, 1, 42, 1),
        (1000, 2, 40, 1),
        (2000, 1, 45, 1),
        (3000, 2, 44, 1),
        (3000, 3, 1, 1),
    ]


@pytest.mark.parametrize(
    ("shape", "frontiers", "expected_rows"),
    [
        (
            POSTGRES,
            {5: {SINGLE_PARTITION: 24023040}, 6: {SINGLE_PARTITION: 24023099}},
            [(6, 24023099)],
        ),
        (
            KINESIS,
            {5: {"a": FIRST_SEQUENCE_NUMBER}, 6: {"a": FIRST_SEQUENCE_NUMBER + 1}},
            [(6, "a", str(FIRST_SEQUENCE_NUMBER + 1))],
        ),
        (PUBNUB, {5: {4: 16496860763920000}}, [(5, 4, 16496860763920000)]),
        (S3, {5: {"k": 10}, 6: {"k": 15, "j": 2}}, [(6, "j", 2), (6, "k", 15)]),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_progress_has_columns_of_source_type(shape: Any, frontiers: Any, expected_rows: Any):
    relation = progress_as_of(shape, make_history(shape, frontiers).updates, 6)
    assert relation.schema == shape.progress
    assert rows_of(relation) == expected_rows


def test_progress_of_binding_below_since_has_since_as_time():
    compacted = consolidate(advance(TOPIC.updates, 2500))
    assert rows_of(progress_as_of(KAFKA, compacted, 2500)) == [(2500, 1, 45), (2500, 2, 40)]


@given(histories(), st.integers(0, 25), st.integers(0, 25))
def test_progress_after_compaction_has_same_offsets_from_since(
    history: History, since: int, t: int
):
    as_of = max(since, t)
    before = rows_of(progress_as_of(history.shape, history.updates, as_of))
    compacted = consolidate(advance(history.updates, since))
    after = rows_of(progress_as_of(history.shape, compacted, as_of))
    assert after == [(max(time, since), *columns) for time, *columns in before]


@given(histories())
def test_progress_changes_accumulate_to_progress_as_of(history: History):
    changes = progress_changes(history.shape, history.updates)
    assert changes.schema.names == [*history.shape.progress.names, "mz_diff"]
    for as_of in range(history.upper):
        newest = {}
        for time, *partition, offset, diff in rows_of(changes):
            assert diff == 1
            if time <= as_of:
                newest[tuple(partition)] = (time, *partition, offset)
        relation = rows_of(progress_as_of(history.shape, history.updates, as_of))
        assert relation == [newest[partition] for partition in sorted(newest)]


@given(histories(), st.integers(0, 25))
def test_progress_changes_in_two_parts_equal_one(history: History, cut: int):
    times = history.updates.column("mz_timestamp").to_pylist()
    early = pa.array([i for i, time in enumerate(times) if time < cut], pa.int64())
    late = pa.array([i for i, time in enumerate(times) if time >= cut], pa.int64())
    shape, take = history.shape, history.updates.take
    before = accumulate(shape, take(early))
    parts = [
        *rows_of(progress_changes(shape, take(early))),
        *rows_of(progress_changes(shape, take(late), before=before)),
    ]
    assert parts == rows_of(progress_changes(shape, history.updates))


@pytest.mark.parametrize("shape", FORMS.values(), ids=FORMS)
def test_progress_of_empty_remap_is_empty(shape: Any):
    empty = make_history(shape, {}).updates
    assert progress_as_of(shape, empty, 5).schema == shape.progress
    assert progress_as_of(shape, empty, 5).num_rows == 0
    assert progress_changes(shape, empty).num_rows == 0


@pytest.mark.parametrize("shape", FORMS.values(), ids=FORMS)
def test_progress_of_compacted_collection_keeps_bindings(shape: Any):
    base = FIRST_SEQUENCE_NUMBER if shape == KINESIS else 0
    key = {"kafka": 0, "pubnub": 4, "postgres": SINGLE_PARTITION}.get(shape.name, "k")
    frontiers = {10: {key: base + 3}, 20: {key: base + 5}, 30: {key: base + 9}}
    history = make_history(shape, frontiers, upper=31)
    with opened(Shelf()) as client:
        remap = client.create_or_load("shop_remap", schema=shape.remap)
        for upper, time in zip([0, 11, 21], frontiers, strict=True):
            at_time = [t == time for t in history.updates.column("mz_timestamp").to_pylist()]
            remap.compare_and_append(history.updates.filter(pa.array(at_time)), upper, time + 1)
        remap.allow_compaction(25).result()
        client.compact()
        with remap.listen(remap.since, snapshot=True) as listener:
            tables = []
            while listener.frontier < remap.upper:
                changes = listener.next_changes(timeout_ms=0)
                assert changes is not None
                tables.append(changes.arrow())
            updates = pa.concat_tables(tables)
    assert frontier_as_of(shape, updates, 24) == Frontier()
    assert frontier_as_of(shape, updates, 25) == Frontier(frontiers[20])
    assert frontier_as_of(shape, updates, 29) == Frontier(frontiers[20])
    assert frontier_as_of(shape, updates, 30) == Frontier(frontiers[30])
    assert progress_as_of(shape, updates, 30) == progress_as_of(shape, history.updates, 30)


# progress_name.


def test_progress_name_is_first_free_default():
    assert progress_name("shop", set()) == "shop_progress"
    assert progress_name("shop", {"shop_progress"}) == "shop_progress1"
    assert progress_name("shop", {"shop_progress", "shop_progress1"}) == "shop_progress2"
    assert progress_name("shop", {"shop_progress1"}) == "shop_progress"


def test_progress_name_given_and_taken_raises_usage_error():
    assert progress_name("shop", {"shop_progress"}, given="how_far") == "how_far"
    with pytest.raises(UsageError, match='"how_far" for the progress relation of source "shop"'):
        progress_name("shop", {"how_far"}, given="how_far")
