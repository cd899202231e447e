"""Write queue: order, group commit, independent calls, and the effects of failures."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pytest
from tests.persist.shop import SCHEMA, opened, rows

from penstock.durable.memory import Shelf
from penstock.errors import IndeterminateError, StoreRefused, UsageError
from penstock.persist import (
    INT64,
    TEXT,
    UNIT,
    Allowed,
    AlreadyFailed,
    Appended,
    AppendTo,
    Client,
    UpperMismatch,
)
from penstock.persist.collection import collection_append
from penstock.persist.write import AppendCall, Committer, Control


class Refusing:
    """Store that rejects writes to, and lists of, keys with the prefixes `refused`."""

    def __init__(self, inner):
        self._inner = inner
        self.refused: tuple[str, ...] = ()
        self.error = StoreRefused("disk is full")
        self.name = inner.name
        self.get, self.settle, self.close = inner.get, inner.settle, inner.close

    def _check(self, key):
        if self.refused and key.startswith(self.refused):
            raise self.error

    def put(self, key, data):
        self._check(key)
        self._inner.put(key, data)

    def create(self, key, data):
        self._check(key)
        return self._inner.create(key, data)

    def delete(self, key):
        self._check(key)
        self._inner.delete(key)

    def list(self, prefix, *, after=""):
        self._check(prefix)
        return self._inner.list(prefix, after=after)


@pytest.fixture
def shelf():
    return Shelf()


@pytest.fixture
def client(shelf):
    with opened(shelf) as client:
        yield client


def gate(client: Client):
    """Return the lock that blocks all commits."""
    return client._machine._advancing


def pair(key, time=0, diff=1):
    return ((key, None), time, diff)


def test_write_by_many_threads_keeps_order_of_each_thread(client):
    collection = client.create_or_load("c", key=TEXT, value=INT64)
    callers, calls = 64, 10
    ready = threading.Barrier(callers)

    def call(caller):
        ready.wait()
        for number in range(calls):
            collection.write([((f"t{caller}", number), 0, 1)]).result()
            # An acknowledged update is durable. The next update follows it.
            stored = client.reader.rows(
                collection.state, collection.state.schemas[-1], lower=0, upper=1
            )
            mine = [r["value"] for r in stored.to_pylist() if r["key"] == f"t{caller}"]
            assert mine == list(range(number + 1))

    with ThreadPoolExecutor(callers) as pool:
        list(pool.map(call, range(callers)))
    collection.seal(1).result()
    assert sum(update.diff for update in collection.snapshot(0)) == callers * calls


def test_writes_during_a_commit_share_the_next_entry(client):
    collection = client.create_or_load("c", key=TEXT, value=INT64)
    before = client.state.seqno
    with gate(client), ThreadPoolExecutor(64) as pool:
        futures = list(pool.map(lambda n: collection.write([((str(n), n), 0, 1)]), range(64)))
    assert {future.result() for future in futures} == {Appended(0)}
    assert client.state.seqno - before <= 2


def test_seal_futures_resolve_in_call_order(client):
    collection = client.create_or_load("c", key=TEXT, value=UNIT)
    told, futures = [], []
    with gate(client):
        for number in range(50):
            future = collection.seal(number)
            future.add_done_callback(lambda _, number=number: told.append(number))
            futures.append(future)
    assert [future.result() for future in futures] == [Appended(n) for n in range(50)]
    assert told == list(range(50))


def test_racing_compare_and_append_has_one_winner_and_upper_mismatches(client):
    collection = client.create_or_load("c", key=TEXT, value=UNIT)
    ready = threading.Barrier(8)

    def race(caller):
        ready.wait()
        return collection.compare_and_append([pair(str(caller))], 0, 1)

    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(race, range(8)))
    assert outcomes.count(Appended(1)) == 1
    assert outcomes.count(UpperMismatch("c", 1)) == 7
    assert len(collection.snapshot(0)) == 1


def test_cancel_of_queued_write_returns_false(client):
    collection = client.create_or_load("c", key=TEXT, value=UNIT)
    with gate(client):
        future = collection.write([pair("a")])
        assert not future.cancel()
    assert future.result() == Appended(0)
    assert collection.seal(1).result() == Appended(1)


def test_failed_upload_fails_its_write_and_later_calls_of_the_collection(shelf):
    held = []

    def wrap(blob):
        held.append(Refusing(blob))
        return held[0]

    with opened(shelf, wrap=wrap, inline_bytes=8) as client:
        table = client.create_or_load("rows", schema=SCHEMA)
        other = client.create_or_load("other", key=TEXT, value=UNIT)
        held[0].refused = ("batch/",)
        with gate(client):
            before = table.seal(1)
            failed = table.write(rows(("a", 1, 1, 1)))
            behind = table.seal(5)
            beside = other.write([pair("x")])
        assert before.result() == Appended(1)
        with pytest.raises(StoreRefused, match="disk is full"):
            failed.result()
        with pytest.raises(AlreadyFailed):
            behind.result()
        assert beside.result() == Appended(0)
        held[0].refused = ()
        assert table.write(rows(("a", 1, 1, 1))).result() == Appended(1)
        table.seal(2).result()
        assert [update.data for update in table.snapshot(1)] == [{"k": "a", "n": 1}]


def test_failing_spreads_along_calls_that_touch_several_collections(client):
    made = {n: client.create_or_load(n, key=TEXT, value=UNIT) for n in "abc"}
    made["a"].seal(5).result()
    with gate(client):
        # The first call is committed alone; the others are queued behind it.
        first = made["c"].write([pair("c", 3)])
        wrong = made["a"].write([pair("x", 1)])
        both = client.seal_all({made["a"]: 6, made["b"]: 6})
        behind = made["b"].seal(7)
        beside = made["c"].seal(8)
    assert first.result() == Appended(0)
    with pytest.raises(UsageError, match="cannot take an update at 1"):
        wrong.result()
    for future in (both, behind):
        with pytest.raises(AlreadyFailed):
            future.result()
    assert beside.result() == Appended(8)


def test_failed_write_in_separate_groups_fails_dependent_calls(client, monkeypatch):
    """Run the previous test with a separate group for each call."""

    def take_one(self):
        work = self._queue.popleft()
        return work if isinstance(work, Control) else [work]

    monkeypatch.setattr(Committer, "_take_group", take_one)
    test_failing_spreads_along_calls_that_touch_several_collections(client)
    assert client.collection("c").upper == 8


def test_write_is_acknowledged_when_since_cannot_advance(shelf):
    held = []

    def wrap(blob):
        held.append(Refusing(blob))
        return held[0]

    with opened(shelf, wrap=wrap) as client:
        collection = client.create_or_load("c", key=TEXT, value=UNIT)
        collection.seal(5).result()
        held[0].refused = ("hold/",)
        with gate(client):
            written = collection.write([pair("a", 5)])
            allowed = collection.allow_compaction(3)
        assert written.result() == Appended(5)
        assert allowed.result() == Allowed(0)
        held[0].refused = ()
        client.run_maintenance()
        assert collection.since == 3


@pytest.mark.parametrize("happened", [True, False])
def test_write_beyond_patience_is_indeterminate_and_reopen_shows_outcome(
    shelf, happened, monkeypatch
):
    held = []

    def wrap(blob):
        held.append(Refusing(blob))
        return held[0]

    client = opened(shelf, wrap=wrap, patience_ms=60_000)
    collection = client.create_or_load("c", key=TEXT, value=UNIT)
    blob = held[0]
    create = blob.create

    def silent(key, data):
        if happened:
            create(key, data)
        raise IndeterminateError("no answer")

    monkeypatch.setattr(blob, "create", silent)
    with gate(client):
        first, second = collection.write([pair("a")]), collection.seal(1)
    for future in (first, second):
        with pytest.raises(IndeterminateError):
            future.result()
    with pytest.raises(IndeterminateError):
        collection.seal(2)
    with pytest.raises(IndeterminateError):
        client.close()
    with opened(shelf) as again:
        found = again.collection("c")
        # Both calls, or the first, or none: never the seal without its write.
        left = sum(each.updates for each in again.unsealed())
        assert (found.upper, left) in ([(0, 1), (1, 0)] if happened else [(0, 0)])
        found.seal(2).result()
        assert len(found.snapshot(1)) == happened


def test_rows_queued_before_alter_keep_their_schema_version(shelf):
    with opened(shelf, inline_bytes=8) as client:
        table = client.create_or_load("rows", schema=SCHEMA)
        append = collection_append(table, rows(("a", 1, 1, 1)))
        table.alter(SCHEMA.append(pa.field("m", pa.int64())))
        client.committer.submit(AppendCall([append])).result()
        table.seal(2).result()
        assert [u.data for u in table.snapshot(1)] == [{"k": "a", "n": 1, "m": None}]


def test_calls_on_destroyed_collection_raise_usage_error(client):
    gone = client.create_or_load("gone", key=TEXT, value=UNIT)
    kept = client.create_or_load("kept", key=TEXT, value=UNIT)
    assert gone.destroy()
    assert not gone.destroy()
    for call in (
        lambda: gone.write([pair("a")]).result(),
        lambda: gone.seal(1).result(),
        lambda: gone.allow_compaction(1).result(),
        lambda: gone.snapshot(0),
        lambda: gone.listen(0),
    ):
        with pytest.raises(UsageError, match="was destroyed"):
            call()
    assert kept.seal(1).result() == Appended(1)


def test_alter_with_default_of_wrong_type_raises_usage_error(client):
    table = client.create_or_load("rows", schema=SCHEMA)
    with pytest.raises(UsageError, match="does not fit"):
        table.alter(SCHEMA.append(pa.field("m", pa.int64())), defaults={"m": "many"})
    assert table.seal(1).result() == Appended(1)


def test_calls_with_collection_of_other_client_raise_usage_error(client):
    with opened(Shelf()) as other:
        foreign = other.create_or_load("c", key=TEXT, value=UNIT)
        client.create_or_load("c", key=TEXT, value=UNIT)
        with pytest.raises(UsageError, match="belongs to another client"):
            client.seal_all({foreign: 5})
        with pytest.raises(UsageError, match="belongs to another client"):
            client.append_all([AppendTo(foreign, [], 0, 5)])


def test_merge_of_few_rows_with_many_columns_terminates(shelf):
    schema = pa.schema([(f"c{n}", pa.int8()) for n in range(50)])
    with opened(shelf, inline_bytes=800) as client:
        table = client.create_or_load("wide", schema=schema)
        for time in range(4):
            table.compare_and_append([({"c0": time}, time, 1)], time, time + 1)
            client.run_maintenance()
        assert len(table.snapshot(3)) == 4
