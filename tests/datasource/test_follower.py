"""A follower, driven as Spark drives it: the end of a batch is logged before the batch runs."""

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import persist
from penstock.datasource.follower import Follower, find_streamed
from penstock.datasource.options import StreamOptions
from penstock.datasource.read_task import Task, updates_of
from penstock.datasource.stream_offsets import Offset
from penstock.errors import Fenced, UsageError
from penstock.persist import Client, Collection, NotYetComplete, SinceError
from penstock.persist.holds import list_holds
from penstock.testing.clocks import ManualClock
from tests.datasource.test_read_task import new_url, values
from tests.persist.model import ModelCollection, Version
from tests.persist.shop import SCHEMA, by_hand
from tests.persist.test_scan import GROWN, act, seal, write

seeds = count()


class Query:
    """A streaming query with its checkpoint, which can be killed at any point and started again."""

    def __init__(
        self, url: str, *, limit: int | None = None, without_start: bool = False, **options: Any
    ):
        self.options = StreamOptions(
            location=url, collection="rows", max_rows=limit, **{"start_at": "latest", **options}
        )
        self.limit = limit
        self.without_start = without_start
        self.offsets: list[dict[str, Any]] = []
        self.delivered: list[list[tuple[Any, ...]]] = []
        self.follower: Follower | None = None
        self.killed: list[Follower] = []

    def start(self) -> "Query":
        """Start the query; a previous run counts as killed, and releases nothing."""
        rng = random.Random(next(seeds))
        self.follower = Follower(
            find_streamed(self.options), self.options, settings=by_hand(chance=rng)
        )
        self.killed.append(self.follower)
        self.initial: dict[str, Any] | None = None
        return self

    def step(self, until: str = "") -> bool:
        """Run one batch, or its steps up to `until`; return whether there was a batch."""
        follower = self.follower
        assert follower is not None
        if len(self.offsets) == len(self.delivered):
            if self.without_start:
                end = follower.latest_without_start().to_json()
            else:
                end = follower.latest(Offset.from_json(self.begin()), self.limit).to_json()
            # Without the start, the first batch can be empty.
            if end == (
                self.offsets[-1] if self.offsets else None if self.without_start else self.begin()
            ):
                return False
            self.offsets.append(end)
            if until == "logged":
                return True
            if len(self.offsets) > 1:
                follower.commit(Offset.from_json(self.offsets[-2]))
        start = self.offsets[-2] if len(self.offsets) > 1 else self.begin(first=True)
        tasks = follower.plan(Offset.from_json(start), Offset.from_json(self.offsets[-1]))
        if until == "planned":
            return True
        delivered: list[Any] = []
        for task in tasks:
            assert isinstance(task, Task)
            delivered += [update for some in updates_of(task) for update in values(some)]
        self.delivered.append(delivered)
        return True

    def begin(self, *, first: bool = False) -> dict[str, Any]:
        if self.offsets and not first:
            return self.offsets[-1]
        assert self.follower is not None
        self.initial = self.initial or self.follower.initial().to_json()
        return self.initial

    def finish(self) -> None:
        while self.step():
            pass

    def stop(self) -> None:
        if self.follower is not None:
            self.follower.stop()
            self.follower = None

    def sums(self, as_of: int) -> "Counter[Any]":
        """Return the sum of the delivered updates up to a time."""
        totals: Counter[Any] = Counter()
        for *row, time, diff in (update for batch in self.delivered for update in batch):
            if time <= as_of:
                totals[tuple(row)] += diff
        return Counter({row: n for row, n in totals.items() if n})


@contextmanager
def shop(**changed: Any) -> Iterator[tuple[str, Client, Collection]]:
    url = new_url()
    with persist.open(url, writer="w", settings=by_hand(**changed)) as client:
        yield url, client, client.create_or_load("rows", schema=SCHEMA, key_columns=("k",))


def put(table: Collection, *updates: tuple[Any, ...], upper: int) -> None:
    table.write([({"k": k, "n": n}, time, diff) for k, n, time, diff in updates])
    table.seal(upper).result()


steps = st.sampled_from([None, "", "", "logged", "planned", "kill", "restart"])
grow = st.tuples(write, seal)
forget = st.sampled_from([(), (("allow", 99), ("upkeep",), ("compact",))])
rounds = st.tuples(grow, steps, forget, steps)
lives = st.lists(rounds, min_size=1, max_size=8).map(lambda life: [e for r in life for e in r])


@given(
    lives,
    st.booleans(),
    st.sampled_from([None, 1, 3]),
    st.sampled_from([0, 10_000]),
    st.booleans(),
)
@settings(max_examples=60)
def test_killed_query_delivers_each_change_once(life, snapshot, limit, inline, without_start):
    """The query has a durable hold, and compaction is as fast as allowed."""
    model = ModelCollection([Version(0, ("k", "n"))])
    with shop(inline_bytes=inline, fan_in=2) as (url, client, table):
        query = Query(
            url,
            limit=None if without_start else limit,
            without_start=without_start,
            snapshot=snapshot,
            owner="q",
        )
        query.start()
        for each in life:
            if each in ("kill", "restart"):
                if each == "restart":
                    query.stop()
                query.start()
            elif isinstance(each, str):
                query.step(each)
                if each in ("logged", "planned"):
                    # Killed, and its lease expired: only the durable hold remains.
                    query.stop()
                    query.start()
            else:
                for action in each or ():
                    act(client, table, model, *action)
        query.start().finish()
        begins = query.offsets[0]["begins"] if query.offsets else 0
        before = model.contents(begins - 1) if begins and not snapshot else Counter()
        if query.offsets:
            # If since equals upper, the latest time is in the future.
            assert query.offsets[-1]["upper"] == max(model.upper, begins)
            for as_of in range(begins, model.upper):
                expected = model.contents(as_of)
                expected.subtract(before)
                assert query.sums(as_of) == Counter({r: n for r, n in expected.items() if n})
        query.stop()


def test_latest_with_limit_admits_complete_times():
    with shop() as (url, _, table):
        put(table, *[("a", n, n, 1) for n in range(4)], upper=4)
        put(table, ("b", 1, 6, 1), ("b", 2, 6, 1), ("b", 3, 6, 1), ("b", 4, 9, 1), upper=20)
        query = Query(url, limit=2, start_at="0", snapshot=False).start()
        query.finish()
        assert [len(batch) for batch in query.delivered] == [2, 1, 3, 1]
        assert [each["upper"] for each in query.offsets] == [3, 6, 9, 20]
        query.stop()


def test_stream_starts_with_snapshot_at_start_time():
    with shop() as (url, _, table):
        put(table, ("a", 1, 1, 1), ("a", 1, 2, -1), ("b", 1, 2, 2), upper=4)
        query = Query(url, start_at="3").start()
        query.finish()
        assert query.delivered == [[("b", 1, 3, 2)]]
        query.stop()


def test_stream_of_errored_collection_delivers_contents_then_raises():
    with shop() as (url, client, table):
        put(table, ("a", 1, 1, 1), upper=10)
        lost = persist.StoredError("SlotLost", "slot is gone", "", "Resync it.")
        client.append_all([persist.AppendTo(table, [], 10, 20)], [persist.Fail(table, 10, lost)])
        query = Query(url, start_at="9").start()
        with pytest.raises(persist.CollectionErrored, match="slot is gone"):
            query.finish()
        assert query.delivered == [[("a", 1, 9, 1)]]
        query.stop()


def test_stream_can_start_at_a_future_time():
    with shop() as (url, _, table):
        put(table, ("a", 1, 1, 1), upper=2)
        query = Query(url, start_at="5").start()
        assert not query.step()
        put(table, ("a", 2, 5, 1), ("a", 3, 6, 1), upper=7)
        query.finish()
        assert query.delivered == [[("a", 1, 5, 1), ("a", 2, 5, 1), ("a", 3, 6, 1)]]
        query.stop()


def test_latest_without_complete_time_is_the_beginning():
    with shop() as (url, _, table):
        query = Query(url).start()
        assert not query.step()
        put(table, ("a", 1, 0, 1), upper=1)
        query.finish()
        assert query.delivered == [[("a", 1, 0, 1)]]
        query.stop()


def test_stream_start_below_since_raises():
    with shop() as (url, client, table):
        put(table, ("a", 1, 1, 1), upper=9)
        table.allow_compaction(5).result()
        client.compact()
        query = Query(url, start_at="3").start()
        with pytest.raises(SinceError):
            query.step()
        query.stop()


def test_available_now_ends_at_upper_of_start():
    with shop() as (url, _, table):
        put(table, ("a", 1, 1, 1), ("a", 2, 2, 1), upper=3)
        query = Query(url, limit=1, start_at="0", snapshot=False).start()
        assert query.follower is not None
        query.follower.stop_at_current_upper()
        query.step()
        put(table, ("a", 3, 3, 1), upper=5)
        table.alter(GROWN)
        query.finish()
        assert query.offsets[-1]["upper"] == 3
        query.stop()


def compact(client: Client, table: Collection, since: int) -> None:
    table.allow_compaction(since).result()
    for _ in range(3):
        client.run_maintenance()
    client.compact()


def test_running_query_holds_history_until_commit():
    with shop(inline_bytes=0) as (url, client, table):
        put(table, ("a", 1, 1, 1), upper=3)
        query = Query(url, start_at="2", limit=1).start()
        query.step()
        put(table, ("a", 2, 4, 1), ("a", 3, 5, 1), upper=7)
        query.step("planned")
        compact(client, table, 7)
        assert table.since == 2
        query.finish()
        assert [len(batch) for batch in query.delivered] == [1, 1, 1]
        query.stop()
        compact(client, table, 7)
        assert table.since == 7


def test_query_behind_since_raises_with_remedy():
    with shop() as (url, client, table):
        put(table, ("a", 1, 1, 1), upper=3)
        query = Query(url).start()
        query.step()
        query.stop()
        put(table, ("a", 2, 4, 1), upper=7)
        compact(client, table, 5)
        query.start()
        with pytest.raises(UsageError) as caught:
            query.step()
        assert str(caught.value) == 'stream of collection "rows" cannot resume at 3'
        assert "since of the collection is 5" in caught.value.detail
        assert "set the option hold to a name" in caught.value.hint
        query.stop()


def compact_without_leases(
    client: Client, table: Collection, clock: ManualClock, since: int
) -> None:
    """Compact after all leases expired."""
    compact(client, table, since)
    clock.move_ms(3_600_000)
    compact(client, table, since)
    assert table.since == since


def test_query_with_lost_hold_claims_again_if_history_exists():
    clock = ManualClock()
    with shop(clock=clock, inline_bytes=0, fan_in=2) as (url, client, table):
        put(table, ("a", 1, 1, 1), upper=3)
        query = Query(url, limit=1).start()
        query.step()
        put(table, ("a", 2, 3, 1), upper=4)
        query.step()
        put(table, ("a", 3, 4, 1), ("a", 4, 5, 1), upper=7)
        compact_without_leases(client, table, clock, 3)
        query.step()
        assert query.delivered[-1] == [("a", 3, 4, 1)]
        ((_, hold),) = list_holds(client.reader.machine.blob).values()
        assert hold.sinces == {table.id: 3}
        compact(client, table, 7)
        assert table.since == 3
        query.finish()
        assert query.delivered[-1] == [("a", 4, 5, 1)]
        query.stop()
        assert list_holds(client.reader.machine.blob) == {}


def test_query_with_lost_hold_and_history_raises():
    clock = ManualClock()
    with shop(clock=clock) as (url, client, table):
        put(table, ("a", 1, 1, 1), upper=3)
        query = Query(url).start()
        query.step()
        put(table, ("a", 2, 4, 1), upper=7)
        compact_without_leases(client, table, clock, 5)
        with pytest.raises(UsageError, match="cannot resume at 3") as caught:
            query.step()
        assert "since of the collection is 5" in caught.value.detail
        assert "lease ran out" in caught.value.detail
        query.stop()
        assert list_holds(client.reader.machine.blob) == {}


def test_query_with_lost_lease_keeps_durable_hold_unless_newer_query_has_it():
    clock = ManualClock()
    with shop(clock=clock, inline_bytes=0, fan_in=2) as (url, client, table):
        put(table, ("a", 1, 1, 1), upper=3)
        query = Query(url, owner="q").start()
        query.step()
        put(table, ("a", 2, 3, 1), upper=4)
        query.step()
        compact_without_leases(client, table, clock, 2)
        put(table, ("a", 3, 4, 1), upper=5)
        query.step()
        (token,) = (
            h.token
            for _, h in list_holds(client.reader.machine.blob).values()
            if h.lease_ms is None
        )
        assert token == 1
        newer = Query(url, owner="q").start()
        newer.step()
        compact_without_leases(client, table, clock, 3)
        for n, running in ((6, newer), (7, newer)):
            put(table, ("a", n, n, 1), upper=n + 1)
            running.step()
        with pytest.raises(Fenced):
            query.finish()
        put(table, ("a", 8, 8, 1), upper=9)
        newer.finish()
        query.stop()
        newer.stop()


def test_earliest_follows_since_that_advances_before_the_claim(monkeypatch):
    with shop() as (url, client, table):
        put(table, ("a", 1, 1, 1), ("a", 2, 4, 1), upper=7)

        def moving(query: Query, since: int) -> Query:
            """Advance since just before the query claims its start."""
            follower = query.start().follower
            assert follower is not None
            real = follower._claim_from

            def claim_from(needed: int) -> None:
                monkeypatch.undo()
                compact(client, table, since)
                real(needed)

            monkeypatch.setattr(follower, "_claim_from", claim_from)
            return query

        query = moving(Query(url, start_at="earliest"), 3)
        query.finish()
        assert query.delivered == [[("a", 1, 3, 1), ("a", 2, 4, 1)]]
        query.stop()
        query = moving(Query(url, start_at="3"), 5)
        with pytest.raises(SinceError):
            query.step()
        query.stop()


def test_durable_hold_outlives_stopped_query_and_advances_with_it():
    with shop() as (url, client, table):
        put(table, ("a", 1, 1, 1), upper=3)
        query = Query(url, owner="q").start()
        query.step()
        query.stop()
        put(table, ("a", 2, 4, 1), ("a", 2, 5, -1), upper=7)
        compact(client, table, 7)
        assert table.since == 2
        query.start().finish()
        assert query.delivered[1] == [("a", 2, 4, 1), ("a", 2, 5, -1)]
        put(table, ("a", 3, 8, 1), upper=9)
        query.finish()
        query.stop()
        compact(client, table, 9)
        assert table.since == 6
        ((_, hold),) = list_holds(client.reader.machine.blob).values()
        assert (hold.owner, hold.lease_ms) == ("q", None)


def test_older_of_two_queries_with_one_hold_is_fenced():
    with shop() as (url, _, table):
        put(table, ("a", 1, 1, 1), upper=3)
        older, newer = Query(url, owner="q").start(), Query(url, owner="q").start()
        older.step()
        newer.step()
        put(table, ("a", 2, 4, 1), upper=7)
        older.step()
        newer.step()
        put(table, ("a", 2, 8, 1), upper=9)
        with pytest.raises(Fenced):
            older.step()
        older.stop()
        newer.stop()


def test_batch_ends_at_schema_change_and_restarted_query_continues():
    with shop() as (url, _, table):
        put(table, ("a", 1, 1, 1), upper=3)
        query = Query(url, without_start=False).start()
        query.step()
        put(table, ("a", 2, 3, 1), upper=5)
        table.alter(GROWN, defaults={"note": "old"})
        table.write([({"k": "b", "n": 1, "note": "new"}, 6, 1)])
        table.seal(8).result()
        query.step()
        assert query.offsets[-1]["upper"] == 5
        assert query.delivered[-1] == [("a", 2, 3, 1)]
        with pytest.raises(UsageError, match='"rows" has a new schema from 5 on') as caught:
            query.step()
        assert "Start the query again" in caught.value.hint
        query.stop()
        query.start().finish()
        assert query.delivered[-1] == [("b", 1, "new", 6, 1)]
        query.stop()


def test_repeated_batch_in_new_schema_returns_same_updates():
    with shop() as (url, _, table):
        put(table, ("a", 1, 1, 1), upper=3)
        query = Query(url).start()
        query.step()
        put(table, ("a", 2, 3, 1), upper=5)
        query.step("planned")
        table.alter(GROWN, defaults={"note": "old"})
        query.start().finish()
        assert query.delivered == [[("a", 1, 2, 1)], [("a", 2, "old", 3, 1)]]
        query.stop()


def test_stream_of_destroyed_collection_does_not_follow_its_recreation():
    with shop() as (url, client, table):
        put(table, ("a", 1, 1, 1), upper=3)
        query = Query(url).start()
        query.step()
        client.destroy("rows")
        with pytest.raises(UsageError, match='collection "rows" was destroyed'):
            query.step()
        query.stop()
        again = client.create_or_load("rows", schema=SCHEMA)
        put(again, ("z", 1, 1, 1), upper=9)
        query.start()
        with pytest.raises(UsageError, match="checkpoint belongs to another collection") as caught:
            query.step()
        assert "new checkpoint location" in caught.value.hint
        query.stop()


def test_batch_end_beyond_upper_is_rejected():
    with shop() as (url, _, table):
        put(table, ("a", 1, 1, 1), upper=3)
        query = Query(url).start()
        query.step()
        query.offsets.append({**query.offsets[-1], "upper": 99})
        with pytest.raises(NotYetComplete):
            query.step()
        query.stop()
