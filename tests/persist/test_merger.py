"""Selection and execution of merges, and failed merges."""

from collections.abc import Iterator, Sequence
from unittest import mock

import pyarrow as pa
import pytest
from msgspec.structs import replace
from tests.persist.shop import SCHEMA, opened, rows

from penstock.durable.memory import Shelf
from penstock.errors import DeterminateError
from penstock.persist import Client, Collection, staging
from penstock.persist.merge import merger as merger_module
from penstock.persist.merge.merger import FOLD_BYTES, Merger, distinct, summed
from penstock.persist.state import Batch, CollectionState, Stored

MANY = FOLD_BYTES // 20
"""So many rows take more than FOLD_BYTES."""


class Job:
    """Merges as a job elsewhere would, and remembers how much it was asked for."""

    def __init__(self, client: Client) -> None:
        self._batches = client.reader.batches
        self.asked: list[int] = []

    def merge(
        self, collection: CollectionState, inputs: Sequence[Batch], staging: str, *, since: int
    ) -> Batch | None:
        self.asked.append(sum(batch.memory for batch in inputs))
        schema, newest = collection.schemas[-1], len(collection.schemas) - 1
        tables = [self._batches.rows(collection, batch, schema) for batch in inputs]
        updates = summed(pa.concat_tables(tables), schema.key, since=since)
        if updates.num_rows == 0:
            return None
        return replace(
            self._batches.build_stored(updates, newest, staging),
            merged=True,
            since=since,
            distinct=distinct(updates, schema.key, since=since),
        )

    def difference(
        self,
        collection: CollectionState,
        minus: Sequence[Batch],
        plus: Sequence[Batch],
        staging: str,
        *,
        time: int,
    ) -> Batch | None:
        raise AssertionError("a comparison was delegated")


class FailingJob(Job):
    """Job that writes its object and then fails."""

    def merge(
        self, collection: CollectionState, inputs: Sequence[Batch], staging: str, *, since: int
    ) -> Batch | None:
        super().merge(collection, inputs, staging, since=since)
        raise DeterminateError("job failed")


class EmptyJob(Job):
    """Writes its object, and then finds that there is nothing in it."""

    def merge(
        self, collection: CollectionState, inputs: Sequence[Batch], staging: str, *, since: int
    ) -> Batch | None:
        super().merge(collection, inputs, staging, since=since)
        return None


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def client(shelf: Shelf) -> Iterator[Client]:
    with opened(shelf, inline_bytes=0) as client:
        yield client


def merger(client: Client) -> Merger:
    return client._maintenance().merger


def table(client: Client) -> Collection:
    return client.create_or_load("rows", schema=SCHEMA, key_columns=["k"])


def grown(table: Collection, count: int, *, first: int = 0) -> None:
    """Append `count` rows at upper, in one batch."""
    names = pa.array([f"k{n}" for n in range(first, first + count)])
    numbers = pa.array(range(count), pa.int32())
    upper = table.upper
    given = pa.table([names, numbers], names=SCHEMA.names)
    table.compare_and_append(given, upper, upper + 1, time=upper)


def batch(id: int, *, rows: int, memory: int, upper: int = 5, merged: bool = False) -> Batch:
    """A batch of no rows that says it has many."""
    part = Stored(f"batch/1-0/{id}.parquet", 9, 7, footer=8, footer_checksum=5)
    return Batch(
        schema=0,
        lower=upper - 1,
        upper=upper,
        rows=rows,
        size=9,
        parts=(part,),
        memory=memory,
        merged=merged,
        id=id,
    )


def due(client: Client, *batches: Batch, since: int = 9, upper: int = 10) -> list[int]:
    """Return the ids of the next merge of a collection with these batches."""
    state = replace(table(client).state, since=since, upper=upper, batches=batches)
    return [each.id for each in merger(client).due(state)]


# Batches merged into a base.


@pytest.mark.parametrize(("delta_rows", "inputs"), [(249, []), (250, [1, 2]), (900, [1, 2])])
def test_base_is_rewritten_when_deltas_reach_a_quarter_of_its_rows(client, delta_rows, inputs):
    base = batch(1, rows=1_000, memory=FOLD_BYTES, merged=True)
    assert due(client, base, batch(2, rows=delta_rows, memory=1)) == inputs


def test_batches_above_since_do_not_count_as_deltas_of_the_base(client):
    base = batch(1, rows=1_000, memory=FOLD_BYTES, merged=True)
    assert due(client, base, batch(2, rows=900, memory=1, upper=9), since=7) == []
    assert due(client, base, batch(2, rows=900, memory=1, upper=9), since=8) == [1, 2]


def test_what_is_not_sealed_is_not_folded(client):
    big = batch(1, rows=1_000, memory=FOLD_BYTES)
    assert due(client, big, upper=5) == [1]
    assert due(client, big, upper=4) == []


@pytest.mark.parametrize(("memory", "inputs"), [(FOLD_BYTES - 1, []), (FOLD_BYTES, [1])])
def test_a_small_base_is_not_kept_apart(client, memory, inputs):
    assert due(client, batch(1, rows=1_000, memory=memory)) == inputs


def test_nothing_is_folded_while_since_stands_at_0(client):
    big = [batch(id, rows=1_000, memory=FOLD_BYTES, upper=1) for id in (1, 2)]
    assert due(client, *big, since=0, upper=1) == []
    assert due(client, *big, since=1, upper=2) == [1, 2]
    # Since may stand past an upper of 0, and nothing is sealed then.
    assert due(client, *big, since=9, upper=0) == []


def test_a_lone_batch_at_or_below_since_is_folded_once_and_not_again(client):
    collection = table(client)
    grown(collection, MANY)
    (written,) = collection.state.batches
    assert written.memory >= FOLD_BYTES
    client.run_maintenance()
    assert collection.state.batches == (written,)
    collection.seal(9).result()
    collection.allow_compaction(5).result()
    client.run_maintenance()
    (base,) = collection.state.batches
    assert (base.merged, base.distinct, base.since, base.lower, base.upper) == (True, True, 5, 5, 6)
    collection.allow_compaction(8).result()
    client.run_maintenance()
    assert collection.state.batches == (base,)
    grown(collection, MANY // 4 + 1, first=MANY)
    collection.seal(20).result()
    collection.allow_compaction(19).result()
    client.run_maintenance()
    (rewritten,) = collection.state.batches
    assert (rewritten.rows, rewritten.distinct) == (MANY + MANY // 4 + 1, True)


def test_compacting_keeps_the_base_apart_from_what_lies_above_since(client):
    collection = table(client)
    for _ in range(6):
        grown(collection, 3, first=3 * collection.upper)
    collection.allow_compaction(3).result()
    client.compact()
    below, above = collection.state.batches
    assert (below.lower, below.upper, below.rows, below.distinct) == (3, 4, 12, True)
    assert (above.lower, above.upper, above.rows, above.distinct) == (4, 6, 6, False)
    client.compact()
    assert collection.state.batches == (below, above)


# Executors of big merges.


def test_a_big_merge_is_delegated_and_a_small_one_is_not(shelf):
    with opened(shelf, inline_bytes=0, merge_bytes=5_000) as client:
        collection = table(client)
        job = Job(client)
        client.delegate_big_merges(job)
        for _ in range(2):
            grown(collection, 20, first=20 * collection.upper)
        client.compact()
        assert (len(collection.state.batches), job.asked) == (1, [])
        for _ in range(2):
            grown(collection, 200, first=200 * collection.upper)
        client.compact()
        assert len(collection.state.batches) == 1
        assert len(job.asked) == 1
        assert min(job.asked) > 5_000
        assert len(collection.snapshot(3)) == 440


def test_without_a_job_merges_are_bounded_by_merge_bytes(shelf):
    with opened(shelf, inline_bytes=0, merge_bytes=5_000, fan_in=2) as client:
        collection = table(client)
        real, merged = Merger.merge, []

        def merge(self, collection, inputs, *, since):
            merged.append(sum(each.memory for each in inputs))
            return real(self, collection, inputs, since=since)

        with (
            mock.patch.object(Merger, "merge", merge),
            mock.patch.object(merger_module, "FOLD_BYTES", 1),
        ):
            for _ in range(12):
                grown(collection, 40, first=40 * collection.upper)
                collection.allow_compaction(collection.upper - 1).result()
                client.run_maintenance()
            client.compact()
        assert 0 < max(merged) <= 5_000
        assert len(collection.state.batches) > 1
        assert len(collection.snapshot(11)) == 480


def test_a_job_that_was_taken_back_is_not_asked(shelf):
    with opened(shelf, inline_bytes=0, merge_bytes=1) as client:
        collection = table(client)
        job = Job(client)
        client.delegate_big_merges(job)
        client.delegate_big_merges(None)
        for _ in range(3):
            grown(collection, 20, first=20 * collection.upper)
        client.compact()
        assert (len(collection.state.batches), job.asked) == (3, [])


def test_a_job_is_not_asked_to_bring_two_versions_of_a_codec_together(client):
    state = table(client).state
    one, two = (
        replace(state.schemas[0], version=version, codecs=(("mood", version), ("unit", 1)))
        for version in (0, 1)
    )
    client.delegate_big_merges(Job(client))
    client.reader.batches.codecs[state.id] = (None, None)
    state = replace(state, schemas=(one, two), since=9, upper=10)
    old = batch(1, rows=1, memory=1 << 40)
    assert merger(client).possible(state, [replace(old, schema=1)])
    assert not merger(client).possible(state, [old])


# Failed merges.


def files(shelf: Shelf) -> set[str]:
    return {key for key in shelf.objects if key.startswith("batch/")}


def linked(client: Client) -> set[str]:
    return set(client.state.linked())


def turned(client: Client) -> None:
    """Exhaust the staging id in use, and wait until it is closed."""
    with mock.patch.object(staging, "FILES_PER_ID", 1):
        client.run_maintenance()


@pytest.mark.parametrize("kind", [FailingJob, EmptyJob])
def test_a_job_that_brings_nothing_gives_its_staging_id_back(shelf, kind):
    with opened(shelf, inline_bytes=0, merge_bytes=1) as client:
        collection = table(client)
        for _ in range(2):
            grown(collection, 20)
        client.delegate_big_merges(kind(client))
        if kind is FailingJob:
            with pytest.raises(DeterminateError, match="job failed"):
                client.compact()
            assert len(collection.state.batches) == 2
        else:
            client.compact()
            assert collection.state.batches == ()
        client.delegate_big_merges(None)
        assert len(files(shelf) - linked(client) - set(client.state.garbage)) == 1
        assert set(client.state.staging) == {"1-0"}
        turned(client)
        assert set(client.state.staging) == {"1-1"}
        assert files(shelf) == linked(client)


def test_a_merge_that_cannot_write_gives_its_staging_id_back(shelf):
    with opened(shelf, inline_bytes=0) as client:
        collection = table(client)
        for _ in range(2):
            grown(collection, 20)
        with (
            mock.patch.object(
                type(client.reader.batches), "build_stored", side_effect=DeterminateError("full")
            ),
            pytest.raises(DeterminateError, match="full"),
        ):
            client.compact()
        turned(client)
        assert set(client.state.staging) == {"1-1"}
        assert files(shelf) == linked(client)


def test_a_staging_id_that_is_not_given_back_stays_open(shelf):
    """Planted bug: the two tests above detect it."""
    with (
        opened(shelf, inline_bytes=0, merge_bytes=1) as client,
        mock.patch.object(staging.Staging, "give_up"),
    ):
        collection = table(client)
        for _ in range(2):
            grown(collection, 20)
        client.delegate_big_merges(FailingJob(client))
        with pytest.raises(DeterminateError):
            client.compact()
        client.delegate_big_merges(None)
        turned(client)
        assert set(client.state.staging) == {"1-0", "1-1"}
        assert files(shelf) != linked(client)


# The base.


@pytest.mark.parametrize(
    ("updates", "key", "expected"),
    [
        ([("a", 1, 5, 1), ("b", 1, 5, 1)], ("k",), True),
        ([("a", 1, 5, 1), ("a", 2, 5, 1)], ("k",), False),
        ([("a", 1, 5, 1), ("a", 2, 5, 1)], (), True),
        ([("a", 1, 5, 1), ("a", 2, 5, 1)], ("k", "n"), True),
        ([("a", 1, 5, 2)], ("k",), False),
        ([("a", 1, 5, -1)], ("k",), False),
        ([(None, 1, 5, 1), (None, 2, 5, 1)], ("k",), False),
        # What lies above since does not matter, and alone it is no base.
        ([("a", 1, 5, 1), ("a", 1, 6, -1), ("a", 2, 6, 3)], ("k",), True),
        ([("a", 1, 6, 1)], ("k",), False),
    ],
)
def test_rows_at_since_are_distinct_if_each_is_there_once_and_no_key_twice(updates, key, expected):
    assert distinct(rows(*updates), key, since=5) is expected
