from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.data import advance, consolidate
from penstock.durable.memory import Shelf
from penstock.errors import UsageError
from penstock.reclock import (
    KAFKA,
    KINESIS,
    POSTGRES,
    PUBNUB,
    S3,
    SHAPES,
    WHOLE,
    Bindings,
    accumulated,
    progress_as_of,
    progress_changes,
    progress_name,
)
from tests.persist.shop import opened
from tests.reclock.sources import FIRST_SEQUENCE_NUMBER, History, closed, histories, written


def rows_of(table: pa.Table) -> list[tuple[Any, ...]]:
    return list(zip(*(column.to_pylist() for column in table.columns), strict=True))


TOPIC = written(KAFKA, {1000: {1: 42, 2: 40}, 2000: {1: 45, 2: 40}, 3000: {1: 45, 2: 44, 3: 1}})


def test_as_of_a_time_there_is_one_row_for_each_partition_with_its_newest_binding():
    assert rows_of(progress_as_of(KAFKA, TOPIC.updates, 999)) == []
    assert rows_of(progress_as_of(KAFKA, TOPIC.updates, 1000)) == [(1000, 1, 42), (1000, 2, 40)]
    assert rows_of(progress_as_of(KAFKA, TOPIC.updates, 2999)) == [(2000, 1, 45), (1000, 2, 40)]
    assert rows_of(progress_as_of(KAFKA, TOPIC.updates, 9000)) == [
        (2000, 1, 45),
        (3000, 2, 44),
        (3000, 3, 1),
    ]


def test_changes_are_one_row_for_each_partition_that_a_binding_moved():
    assert rows_of(progress_changes(KAFKA, TOPIC.updates)) == [
        (1000, 1, 42, 1),
        (1000, 2, 40, 1),
        (2000, 1, 45, 1),
        (3000, 2, 44, 1),
        (3000, 3, 1, 1),
    ]


@pytest.mark.parametrize(
    ("shape", "frontiers", "shown"),
    [
        (POSTGRES, {5: {WHOLE: 24023040}, 6: {WHOLE: 24023099}}, [(6, 24023099)]),
        (
            KINESIS,
            {5: {"a": FIRST_SEQUENCE_NUMBER}, 6: {"a": FIRST_SEQUENCE_NUMBER + 1}},
            [(6, "a", str(FIRST_SEQUENCE_NUMBER + 1))],
        ),
        (PUBNUB, {5: {4: 16496860763920000}}, [(5, 4, 16496860763920000)]),
        (S3, {5: {"k": 10}, 6: {"k": 15, "j": 2}}, [(6, "j", 2), (6, "k", 15)]),
    ],
    ids=lambda given: getattr(given, "name", ""),
)
def test_each_type_of_source_shows_its_own_columns(shape: Any, frontiers: Any, shown: Any):
    relation = progress_as_of(shape, written(shape, frontiers).updates, 6)
    assert relation.schema == shape.progress
    assert rows_of(relation) == shown


def test_a_binding_from_below_since_is_shown_at_since():
    compacted = consolidate(advance(TOPIC.updates, 2500))
    assert rows_of(progress_as_of(KAFKA, compacted, 2500)) == [(2500, 1, 45), (2500, 2, 40)]


@given(histories(), st.integers(0, 25), st.integers(0, 25))
def test_compaction_shows_the_same_offsets_from_since_on(history: History, since: int, t: int):
    as_of = max(since, t)
    before = rows_of(progress_as_of(history.shape, history.updates, as_of))
    compacted = consolidate(advance(history.updates, since))
    after = rows_of(progress_as_of(history.shape, compacted, as_of))
    assert after == [(max(time, since), *rest) for time, *rest in before]


@given(histories())
def test_the_changes_up_to_a_time_end_in_the_relation_as_of_it(history: History):
    changes = progress_changes(history.shape, history.updates)
    assert changes.schema.names == [*history.shape.progress.names, "mz_diff"]
    for as_of in range(history.upper):
        newest = {}
        for time, *partition, offset, diff in rows_of(changes):
            assert diff == 1
            if time <= as_of:
                newest[tuple(partition)] = (time, *partition, offset)
        shown = rows_of(progress_as_of(history.shape, history.updates, as_of))
        assert shown == [newest[partition] for partition in sorted(newest)]


@given(histories(), st.integers(0, 25))
def test_following_changes_piece_by_piece_gives_the_same(history: History, cut: int):
    times = history.updates.column("mz_timestamp").to_pylist()
    early = pa.array([i for i, time in enumerate(times) if time < cut], pa.int64())
    late = pa.array([i for i, time in enumerate(times) if time >= cut], pa.int64())
    shape, take = history.shape, history.updates.take
    before = accumulated(shape, take(early))
    pieces = [
        *rows_of(progress_changes(shape, take(early))),
        *rows_of(progress_changes(shape, take(late), before=before)),
    ]
    assert pieces == rows_of(progress_changes(shape, history.updates))


@given(histories(), st.integers(1, 4))
def test_a_closed_source_shows_how_far_it_came_until_it_was_closed(history: History, later: int):
    at = history.upper + later
    ended = closed(history, at)
    shape = history.shape
    assert rows_of(progress_as_of(shape, ended.updates, at)) == []
    assert rows_of(progress_as_of(shape, ended.updates, at - 1)) == rows_of(
        progress_as_of(shape, history.updates, at - 1)
    )
    assert rows_of(progress_changes(shape, ended.updates)) == rows_of(
        progress_changes(shape, history.updates)
    )


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_an_empty_remap_shows_an_empty_relation(shape: Any):
    empty = written(shape, {}).updates
    assert progress_as_of(shape, empty, 5).schema == shape.progress
    assert progress_as_of(shape, empty, 5).num_rows == 0
    assert progress_changes(shape, empty).num_rows == 0


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_collection_keeps_bindings_through_compaction(shape: Any):
    base = FIRST_SEQUENCE_NUMBER if shape == KINESIS else 0
    key = {"kafka": 0, "pubnub": 4, "postgres": WHOLE}.get(shape.name, "k")
    frontiers = {10: {key: base + 3}, 20: {key: base + 5}, 30: {key: base + 9}}
    history = written(shape, frontiers, upper=31)
    with opened(Shelf()) as client:
        remap = client.create_or_load("shop_remap", schema=shape.remap)
        for upper, time in zip([0, 11, 21], frontiers, strict=True):
            at_time = [t == time for t in history.updates.column("mz_timestamp").to_pylist()]
            remap.compare_and_append(history.updates.filter(pa.array(at_time)), upper, time + 1)
        remap.allow_compaction(25).result()
        client.compact()
        with remap.listen(remap.since, snapshot=True) as listener:
            read = []
            while listener.frontier < remap.upper:
                changes = listener.next_changes(timeout_ms=0)
                assert changes is not None
                read.append(changes.arrow())
            updates = pa.concat_tables(read)
    bindings = Bindings.read(shape, updates, since=25, upper=31, source="shop")
    assert bindings.resume_from(26) == frontiers[20]
    assert bindings.resume_from(31) == frontiers[30]
    assert bindings.time_of(key, base + 4) == 25
    assert bindings.time_of(key, base + 5) == 30
    assert progress_as_of(shape, updates, 30) == progress_as_of(shape, history.updates, 30)


# What it is called.


def test_the_name_is_the_first_one_free():
    assert progress_name("shop", set()) == "shop_progress"
    assert progress_name("shop", {"shop_progress"}) == "shop_progress1"
    assert progress_name("shop", {"shop_progress", "shop_progress1"}) == "shop_progress2"
    assert progress_name("shop", {"shop_progress1"}) == "shop_progress"


def test_a_name_given_is_taken_as_it_is_or_refused():
    assert progress_name("shop", {"shop_progress"}, given="how_far") == "how_far"
    with pytest.raises(UsageError, match='"shop" cannot be called "how_far": the name is taken'):
        progress_name("shop", {"how_far"}, given="how_far")
