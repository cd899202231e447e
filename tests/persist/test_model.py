"""The whole API of persist against the model of `model.py`, with a store that fails.

Each step of the machine is one call to a store. Hypothesis draws the outcome of
the next few writes: they happen or not, and are answered or not. A patient
client hides all failures. An impatient client raises them. The model then
follows the error: nothing happened, or one of two outcomes, and reopening must
show which.

After every step the writer, and readers with and without a hold, read all
collections, and the log is folded from its beginning.
"""

import logging
import os
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, note, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from msgspec import structs
from tests.persist.model import Model, ModelCollection, Request, Version

import penstock.persist.state
import penstock.persist.write
from penstock.data import DIFF, TIME, stored_schema
from penstock.durable.memory import MemoryBlob, Shelf
from penstock.durable.probe import PASSED
from penstock.durable.retrying_blob import RetryingBlob
from penstock.errors import DeterminateError, Fenced, IndeterminateError, UsageError
from penstock.persist import (
    END,
    INT64,
    TEXT,
    AlreadyFailed,
    AppendTo,
    Begin,
    Changes,
    Client,
    Closed,
    Collection,
    CollectionErrored,
    DurableHold,
    Fail,
    Grow,
    Listener,
    LockHeld,
    NotYetComplete,
    Recover,
    Settings,
    SinceError,
    StoredError,
    WriteTo,
    runtime,
)
from penstock.persist.gc import Collector
from penstock.persist.holds import LocalClaims, list_holds
from penstock.persist.machine import Machine
from penstock.persist.read import Reader
from penstock.persist.state import OpenStaging, Seal, TakeEpoch, Writer
from penstock.testing.clocks import ManualClock
from penstock.testing.stores import Fate, UnreliableBlob

PAIRS = "pairs"
ROWS = "rows"
NAMES = [PAIRS, "more-pairs", ROWS]
LATEST = 24
LEASE_MS = 60_000

_K, _A = pa.field("k", pa.string()), pa.field("a", pa.string())
_B = pa.field("b", pa.int64(), nullable=False)
GROWTH = [
    pa.schema([_K, ("n", pa.int32())]),
    pa.schema([_K, ("n", pa.int32()), _A]),
    pa.schema([_K, ("n", pa.int32()), _A, _B]),
    pa.schema([_K, ("n", pa.int64()), _A, _B]),
]
DEFAULTS: list[dict[str, Any]] = [{}, {}, {"b": 7}, {}]

names = st.sampled_from(NAMES)
fates = st.lists(st.sampled_from([*Fate]), max_size=3)
small = st.integers(0, 3)


@dataclass
class Watch:
    """Listener and its progress."""

    name: str
    id: int
    by: str
    listener: Listener
    frontier: int


class Persist(RuleBasedStateMachine):
    """One location, its writer, two readers and some listeners."""

    @initialize(seed=st.integers(0, 2**32), patient=st.booleans())
    def begin(self, seed: int, patient: bool) -> None:
        self.chance = random.Random(seed)
        self.clock = ManualClock()
        self.shelf = Shelf()
        self.fates: deque[Fate] = deque()
        self.store().create(PASSED, b"")
        self.model = Model()
        self.clients: list[Client] = []
        self.watches: list[Watch] = []
        self.steps = 0
        self.held: DurableHold | None = None
        self.writer = "w"
        self.client = self.opened(patient=patient)
        self.readers = {
            "reader": Client(self.retrying(self.store()), self.settings(), writer=None, hold=True),
            "bare": Client(self.retrying(self.store()), self.settings(), writer=None, hold=False),
        }
        for name in NAMES:
            self.create_collection(name)

    def teardown(self) -> None:
        if not hasattr(self, "readers"):
            return
        try:
            self.fates.clear()
            self.check()
            self.check_readers()
            self.client.close()
            self.watches = [watch for watch in self.watches if watch.by != "writer"]
            with self.opened(patient=True) as self.client:
                self.check()
        finally:
            for client in (*self.readers.values(), *self.clients):
                with suppress(Exception):
                    client.close()

    # Opening.

    def store(self) -> MemoryBlob:
        return MemoryBlob(self.shelf, name="memory:model", clock=self.clock)

    def retrying(self, blob: Any, patience_ms: int | None = None) -> RetryingBlob:
        return RetryingBlob(blob, self.clock, self.chance, patience_ms=patience_ms)

    def settings(self) -> Settings:
        return Settings(
            background=False,
            notify="",
            young_ms=0,
            proof_ms=0,
            upkeep_ms=0,
            settle_ms=0,
            rollup_every=5,
            inline_bytes=64,
            part_bytes=256,
            fan_in=2,
            lease_ms=LEASE_MS,
            clock=self.clock,
            chance=self.chance,
        )

    def opened(self, *, patient: bool) -> Client:
        blob = UnreliableBlob(self.store(), script=self.next_fates())
        client_blob = self.retrying(blob, None if patient else 0)
        client = Client(client_blob, self.settings(), writer=self.writer, hold=True)
        self.clients.append(client)
        return client

    def next_fates(self) -> Iterator[Fate]:
        while True:
            yield self.fates.popleft() if self.fates else Fate.ANSWERED

    def reopened(self, candidates: list[Model], *, patient: bool = True) -> None:
        """Take over, and continue with the candidate that equals the location."""
        self.fates.clear()
        self.watches = [watch for watch in self.watches if watch.by != "writer"]
        old, self.client = self.client, self.opened(patient=patient)
        with suppress(Fenced, IndeterminateError):
            old.close()
        found = self.observed()
        for candidate in candidates:
            self.follow_since(candidate)
            if observed_model(candidate) == found:
                self.model = candidate
                return
        raise AssertionError(f"{found} is none of {[observed_model(c) for c in candidates]}")

    # Doing things.

    def tried(self, act: Callable[[], Any], after: Model, expected: Any) -> None:
        """Make the call; the model continues with its outcome."""
        before = self.model
        try:
            got = act()
        except IndeterminateError as error:
            note(f"in doubt: {error}")
            self.reopened([before, after])
        except DeterminateError as error:
            note(f"did not happen: {error}")
            self.settle_leftovers()
        except (UsageError, AlreadyFailed) as error:
            if type(error) is not expected:
                raise
        else:
            assert got == expected, f"{got} is not {expected}"
            self.model = after
        self.fates.clear()

    def settle_leftovers(self) -> None:
        """An upkeep that was cut off is done again, as the background would."""
        self.fates.clear()
        self.client.run_maintenance()
        self.model.settle(self.holds())

    def collection(self, name: str, by: str = "writer") -> Collection:
        client = self.client if by == "writer" else self.readers[by]
        if name == ROWS:
            return client.collection(name)
        return client.create_or_load(name, key=TEXT, value=INT64)

    @rule(name=names, fate=fates)
    def create(self, name: str, fate: list[Fate]) -> None:
        self.fates.extend(fate)
        self.create_collection(name)

    def create_collection(self, name: str) -> None:
        after = self.model.copy()
        after.create(name, tuple(GROWTH[0].names) if name == ROWS else ("key", "value"))
        existing = self.model.collections.get(name)
        schema = GROWTH[len(existing.versions) - 1 if existing else 0]

        def act() -> int:
            if name == ROWS:
                return self.client.create_or_load(name, schema=schema, key_columns=["k"]).upper
            return self.client.create_or_load(name, key=TEXT, value=INT64).upper

        self.tried(act, after, after.collections[name].upper)

    @rule(name=names, seldom=small, fate=fates)
    def destroy(self, name: str, seldom: int, fate: list[Fate]) -> None:
        if seldom != 3:
            return
        self.fates.extend(fate)
        after = self.model.copy()
        there = after.destroy(name)
        self.tried(lambda: self.client.destroy(name), after, there)

    def requests(
        self, data: st.DataObject, kinds: tuple[str, ...], model: Model | None = None
    ) -> Request | None:
        model = model or self.model
        known = sorted(model.collections)
        if not known:
            return None
        name = data.draw(st.sampled_from(known))
        collection = model.collections[name]
        upper = min(collection.upper, LATEST)
        request = Request(name)
        kind = data.draw(st.sampled_from(kinds))
        if kind == "append":
            request.expected = collection.upper
            if data.draw(st.integers(0, 5)) == 0:
                request.expected = max(0, collection.upper + data.draw(st.sampled_from([-1, 1])))
            request.upper = request.expected + data.draw(small)
            if collection.upper == END:
                request.upper = END
        elif kind == "seal":
            request.upper = max(0, upper + data.draw(st.sampled_from([-1, 0, 1, 1, 2, 4])))
            if data.draw(st.integers(0, 40)) == 0:
                request.upper = END
        if kind != "seal":
            times = st.integers(max(0, upper - (data.draw(small) == 3)), upper + 3)
            if kind == "append" and data.draw(st.integers(0, 9)):
                if (
                    request.expected == request.upper
                    or request.expected is None
                    or request.expected >= LATEST
                ):
                    return request
                times = st.integers(request.expected, (request.upper or 0) - 1)
            for _ in range(data.draw(st.integers(1, 3))):
                time = data.draw(times)
                row = data.draw(st.sampled_from(["x", "y", "z"])), data.draw(small)
                request.updates.append(
                    (self.row(collection, *row), time, data.draw(st.sampled_from([1, 1, -1, 2])))
                )
        return request

    def row(self, collection: ModelCollection, key: str, number: int) -> dict[str, Any]:
        columns = collection.versions[-1].columns
        if columns == ("key", "value"):
            return {"key": key, "value": number}
        # Mostly in the form of older rows: an old insert then meets a new delete.
        whole = {"k": key, "n": number, "a": None, "b": 7}
        if number == 3:
            whole |= {"a": key, "b": 8}
        return {name: value for name, value in whole.items() if name in columns}

    def given(self, request: Request, model: Model | None = None) -> Any:
        if request.name != ROWS:
            return [((row["key"], row["value"]), time, diff) for row, time, diff in request.updates]
        columns = GROWTH[len((model or self.model).collections[ROWS].versions) - 1]
        return pa.Table.from_pylist(
            [row | {TIME: time, DIFF: diff} for row, time, diff in request.updates],
            schema=stored_schema(columns),
        )

    @rule(data=st.data(), fate=fates)
    def append(self, data: st.DataObject, fate: list[Fate]) -> None:
        request = self.requests(data, ("append",))
        if request is None:
            return
        self.fates.extend(fate)
        after = self.model.copy()
        expected = after.append([request])
        given = self.given(request)
        handle = self.collection(request.name)
        self.tried(
            lambda: handle.compare_and_append(given, request.expected or 0, request.upper or 0),
            after,
            expected,
        )

    @rule(data=st.data(), fate=fates)
    def write_or_seal(self, data: st.DataObject, fate: list[Fate]) -> None:
        request = self.requests(data, ("write", "seal"))
        if request is None:
            return
        self.fates.extend(fate)
        after = self.model.copy()
        expected = after.append([request])
        self.tried(lambda: self.submitted(request).result(), after, expected)

    def submitted(self, request: Request) -> Any:
        handle = self.collection(request.name)
        if request.upper is not None:
            return handle.seal(request.upper)
        return handle.write(self.given(request))

    @rule(data=st.data())
    def queue_several(self, data: st.DataObject) -> None:
        """Calls that are committed in one entry, as far as they succeed."""
        drawn = [
            self.requests(data, ("write", "seal")) for _ in range(data.draw(st.integers(2, 5)))
        ]
        queue = [request for request in drawn if request is not None]
        expected = self.model.append_in_turn([[request] for request in queue])
        with self.client.committer._ready:  # Nothing is taken before all are queued.
            futures = [self.submitted(request) for request in queue]
        for future, outcome in zip(futures, expected, strict=True):
            error = future.exception()
            assert (type(error) if error else future.result()) == outcome

    @rule(data=st.data(), fate=fates)
    def append_all(self, data: st.DataObject, fate: list[Fate]) -> None:
        requests: dict[str, Request] = {}
        for _ in range(3):
            request = self.requests(data, ("append",))
            if request is not None:
                requests.setdefault(request.name, request)
        if not requests:
            return
        self.fates.extend(fate)
        after = self.model.copy()
        expected = after.append(list(requests.values()))
        appends = [
            AppendTo(self.collection(a.name), self.given(a), a.expected or 0, a.upper or 0)
            for a in requests.values()
        ]
        self.tried(lambda: self.client.append_all(appends), after, expected)

    @rule(data=st.data(), fate=fates)
    def say_more(self, data: st.DataObject, fate: list[Fate]) -> None:
        """Beginnings, errors, growth and writes left open, with an append or without."""
        if not self.model.collections:
            return
        after = self.model.copy()
        told: list[tuple[str, str, Any]] = []
        changes: list[Any] = []
        grown = after.copy()
        for _ in range(data.draw(st.integers(1, 3))):
            name = data.draw(st.sampled_from(sorted(after.collections)))
            collection, handle = after.collections[name], self.collection(name)
            number = self.version_of_rows()
            kinds = ["begin", "begin"] if collection.upper == 0 else ["begin"]
            lasts = bool(collection.errors) and collection.errors[-1][1] == END
            kinds += ["recover", "recover", "fail"] if lasts else ["recover", "fail"]
            kind = data.draw(st.sampled_from([*kinds, "write", "grow"]))
            near = min(collection.upper, LATEST) + data.draw(st.sampled_from([-1, 0, 0, 1, 2, 4]))
            time = max(0, near)
            if kind == "begin":
                told.append((kind, name, time))
                changes.append(Begin(handle, time))
            elif kind == "fail":
                told.append((kind, name, time))
                changes.append(Fail(handle, time, StoredError("Lost", f"lost at {time}")))
            elif kind == "recover":
                told.append((kind, name, time))
                changes.append(Recover(handle, time))
            elif kind == "grow" and number < len(GROWTH) and not any(t[0] == kind for t in told):
                rows = after.collections[ROWS]
                version = Version(rows.upper, tuple(GROWTH[number].names), DEFAULTS[number])
                told.append((kind, ROWS, version))
                changes.append(Grow(self.collection(ROWS), GROWTH[number], DEFAULTS[number]))
                grown.collections[ROWS].versions.append(version)
        write = self.requests(data, ("write",), grown) if data.draw(st.booleans()) else None
        if write is not None and write.updates:
            told.append(("write", write.name, write))
            changes.append(WriteTo(self.collection(write.name), self.given(write, grown)))
        request = self.requests(data, ("append",), grown) if data.draw(st.booleans()) else None
        requests = [] if request is None else [request]
        if not requests and not changes:
            return
        self.fates.extend(fate)
        expected = after.append_with_changes(requests, told)
        appends = [
            AppendTo(self.collection(a.name), self.given(a, grown), a.expected or 0, a.upper or 0)
            for a in requests
        ]
        self.tried(lambda: self.client.append_all(appends, changes), after, expected)

    @rule(by=small, fate=fates)
    def seal_all(self, by: int, fate: list[Fate]) -> None:
        if not self.model.collections:
            return
        new_uppers = {
            name: min(c.upper + by, max(c.upper, LATEST))
            for name, c in self.model.collections.items()
        }
        self.fates.extend(fate)
        after = self.model.copy()
        expected = after.append([Request(name, upper=to) for name, to in new_uppers.items()])
        uppers = {self.collection(name): upper for name, upper in new_uppers.items()}
        self.tried(lambda: self.client.seal_all(uppers).result(), after, expected)

    @precondition(lambda self: self.version_of_rows() < len(GROWTH))
    @rule(fate=fates)
    def alter(self, fate: list[Fate]) -> None:
        number = self.version_of_rows()
        after = self.model.copy()
        grown = after.collections[ROWS]
        version = Version(grown.upper, tuple(GROWTH[number].names), DEFAULTS[number])
        grown.versions.append(version)
        self.fates.extend(fate)
        handle = self.collection(ROWS)
        self.tried(lambda: handle.alter(GROWTH[number], defaults=DEFAULTS[number]), after, None)

    def version_of_rows(self) -> int:
        """Return the number of the next version; one past the last if none is left."""
        collection = self.model.collections.get(ROWS)
        return len(collection.versions) if collection else len(GROWTH)

    @precondition(lambda self: any(c.unsealed() for c in self.model.collections.values()))
    @rule(some=st.booleans(), fate=fates)
    def discard(self, some: bool, fate: list[Fate]) -> None:
        waiting = [name for name, c in self.model.collections.items() if c.unsealed()]
        chosen = waiting[:1] if some else sorted(self.model.collections)
        self.fates.extend(fate)
        after = self.model.copy()
        after.discard(chosen)
        self.tried(lambda: self.client.discard_unsealed(chosen), after, None)

    # Forgetting.

    @rule(name=names, ahead=st.integers(-2, 3), fate=fates)
    def allow_compaction(self, name: str, ahead: int, fate: list[Fate]) -> None:
        if name not in self.model.collections:
            return
        collection = self.model.collections[name]
        since = max(0, min(collection.upper, LATEST) + ahead - 1)
        handle = self.collection(name)
        self.fates.extend(fate)
        before, after = self.model, self.model.copy()
        after.allow(name, since)
        try:
            told = handle.allow_compaction(since).result()
        except IndeterminateError:
            self.reopened([before, after])
        except DeterminateError:
            self.settle_leftovers()
        else:
            self.model = after
            if any(each is not Fate.ANSWERED for each in fate):
                # The permission is durable; settling may have been put off.
                self.settle_leftovers()
            self.model.settle(self.holds())
            assert told.since <= self.model.collections[name].since
        self.fates.clear()

    @rule(repetitions=small, fate=fates)
    def maintenance(self, repetitions: int, fate: list[Fate]) -> None:
        """One round, or all there is to do several times, which truncates the log to its end."""
        self.fates.extend(fate)
        try:
            if repetitions == 0:
                self.client.run_maintenance()
            for _ in range(repetitions):
                self.client.compact()
        except (IndeterminateError, DeterminateError) as error:
            note(f"upkeep was cut off: {error}")
            self.reopened([self.model])
        self.settle_leftovers()

    @rule(data=st.data(), name=names, ahead=st.integers(-1, 3))
    def a_day_in_its_life(self, data: st.DataObject, name: str, ahead: int) -> None:
        """Steps that often follow one another, and seldom would by chance."""
        self.append(data=data, fate=[])
        self.write_or_seal(data=data, fate=[])
        self.allow_compaction(name=name, ahead=ahead, fate=[])
        self.maintenance(repetitions=1, fate=[])

    @rule(ms=st.sampled_from([1, 6_000, LEASE_MS]))
    def time_passes(self, ms: int) -> None:
        self.clock.move_ms(ms)

    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        if self.held is None or data.draw(small) == 0:
            older, self.held = self.held, self.readers["bare"].hold("materialization")
            if older is not None:
                with pytest.raises(Fenced):
                    older.move({})
        wanted = {
            name: data.draw(
                st.integers(max(0, c.since - 1), max(c.since, min(c.upper, LATEST)) + 2)
            )
            for name, c in self.model.collections.items()
            if data.draw(st.booleans())
        }
        known = self.model.collections
        if any(not known[name].distinguishes_from(since + 1) for name, since in wanted.items()):
            before = self.held.sinces()
            with pytest.raises(SinceError):
                self.held.move(wanted)
            assert self.held.sinces() == before
        else:
            self.held.move(wanted)
            assert self.held.sinces() == wanted

    @precondition(lambda self: self.held is not None)
    @rule()
    def drop_hold(self) -> None:
        assert self.held is not None
        self.held.drop()
        self.held = None

    def holds(self) -> dict[str, int]:
        """Return held times: by hold objects, and by listeners of the writer."""
        ids = {c.id: name for name, c in self.named().items()}
        held = [hold.sinces for _, hold in list_holds(self.store()).values()]
        claims = self.client._runtime.claims
        assert isinstance(claims, LocalClaims)
        held.append(claims.needs()[0])
        found: dict[str, int] = {}
        for sinces in held:
            for id, since in sinces.items():
                if id in ids:
                    found[ids[id]] = min(since, found.get(ids[id], END))
        return found

    # Ownership.

    @rule(writer=st.sampled_from(["w", "v"]), patient=st.booleans())
    def close_and_reopen(self, writer: str, patient: bool) -> None:
        self.client.close()
        self.client.close()
        with pytest.raises(Closed):
            self.client.create_or_load("late", key=TEXT, value=TEXT)
        self.writer = writer
        self.watches = [watch for watch in self.watches if watch.by != "writer"]
        self.client = self.opened(patient=patient)

    @rule(patient=st.booleans())
    def take_over(self, patient: bool) -> None:
        old = self.client
        self.watches = [watch for watch in self.watches if watch.by != "writer"]
        self.client = self.opened(patient=patient)
        with pytest.raises(Fenced):
            old.create_or_load("late", key=TEXT, value=TEXT)
        with pytest.raises(Fenced):
            old.close()

    @rule()
    def refuse_another(self) -> None:
        before = self.client.state.seqno
        writer, self.writer = self.writer, "somebody else"
        with pytest.raises(LockHeld, match=f'is being written by "{writer}"'):
            self.opened(patient=True)
        self.writer = writer
        assert self.client._machine.refresh().seqno == before

    # Reading.

    @rule(data=st.data(), by=st.sampled_from(["writer", "reader", "bare"]))
    def listen(self, data: st.DataObject, by: str) -> None:
        if not self.model.collections or len(self.watches) >= 4:
            return
        name = data.draw(st.sampled_from(sorted(self.model.collections)))
        collection = self.model.collections[name]
        as_of = data.draw(st.integers(-1, min(collection.upper, LATEST) + 1))
        handle = self.collection(name, by)
        gone = as_of < collection.since if as_of >= 0 else not collection.distinguishes_from(0)
        if gone and collection.since:
            with pytest.raises(SinceError) as told:
                handle.listen(as_of)
            assert told.value.begins == collection.begins
            return
        self.watches.append(Watch(name, handle.id, by, handle.listen(as_of), as_of + 1))

    @precondition(lambda self: self.watches)
    @rule()
    def poll(self) -> None:
        self.watches = [watch for watch in self.watches if self.receive(watch)]

    def receive(self, watch: Watch) -> bool:
        """Check the changes of a listener; return whether it continues."""
        collection = self.model.collections.get(watch.name)
        if collection is None or self.named()[watch.name].id != watch.id:
            with pytest.raises(UsageError, match="was destroyed"):
                watch.listener.next_changes(timeout_ms=0)
            watch.listener.close()
            return False
        overtaken = collection.since > 0 and not collection.distinguishes_from(watch.frontier)
        if overtaken and collection.upper > watch.frontier:
            # Only a reader whose hold ran out, or that has none, can be overtaken.
            assert watch.by != "writer"
            # It may be in error as well, and raises one of the two.
            with pytest.raises((SinceError, CollectionErrored)):
                watch.listener.next_changes(timeout_ms=0)
            watch.listener.close()
            return False
        while collection.upper > watch.frontier:
            # The contents that changes begin with count too.
            if any(low <= watch.frontier <= high for low, high in collection.errors):
                with pytest.raises(CollectionErrored, match="lost at"):
                    watch.listener.next_changes(timeout_ms=0)
                watch.listener.close()
                return False
            self.take(watch, collection)
        assert watch.listener.next_changes(timeout_ms=0) is None
        return True

    def take(self, watch: Watch, collection: ModelCollection) -> None:
        """The next changes: all there are, or all up to the next change of the schema."""
        changes = watch.listener.next_changes(timeout_ms=0)
        assert isinstance(changes, Changes), "a listener does not progress"
        grown = [v.since for v in collection.versions if v.since > watch.frontier]
        errors = [low for low, _ in collection.errors if low > watch.frontier]
        upper = min([collection.upper, *grown, *errors])
        assert (changes.lower, changes.upper) == (watch.frontier, upper)
        columns = collection.columns_as_of(upper - 1)
        given: Counter[Any] = Counter()
        for update in changes:
            assert (row_of(update.data, columns), update.time) not in given
            given[row_of(update.data, columns), update.time] = update.diff
        assert given == collection.changes(watch.frontier, upper, columns)
        watch.frontier = upper

    @rule()
    def check_readers(self) -> None:
        for by in self.readers:
            assert self.readers[by].collections() == sorted(self.model.collections)
            for name, collection in self.model.collections.items():
                handle = self.collection(name, by)
                assert (handle.since, handle.upper) == (collection.since, collection.upper)
                self.check_snapshots(handle, collection)

    @invariant()
    def check(self) -> None:
        if not hasattr(self, "readers"):
            return
        self.steps += 1
        if self.steps % 4 == 0:
            self.poll()
        if self.steps % 8 == 0:
            self.check_readers()
        assert self.observed() == observed_model(self.model)
        fresh = Machine(self.store(), self.settings())
        assert fresh.load() == self.client.state
        for name, collection in self.model.collections.items():
            handle = self.collection(name)
            assert handle.since == collection.since, f"since of {name}"
            self.check_snapshots(handle, collection)
        told = {each.collection: each.updates for each in self.client.unsealed()}
        assert told == {n: c.unsealed() for n, c in self.model.collections.items() if c.unsealed()}

    def check_snapshots(self, handle: Collection, collection: ModelCollection) -> None:
        since, upper = collection.since, collection.upper
        if since:
            with pytest.raises(SinceError):
                handle.snapshot(since - 1)
        # Readers see exactly the state of the writer.
        assert handle.state.begins == collection.begins
        if since <= upper < END:
            with pytest.raises(NotYetComplete):
                handle.snapshot(upper)
        last = min(upper, LATEST + 8) - 1
        for as_of in {since, (since + last) // 2, last - 1, last}:
            if since <= as_of < upper and collection.in_error(as_of):
                with pytest.raises(CollectionErrored, match=f"as of {as_of}: lost at"):
                    handle.snapshot(as_of)
            elif since <= as_of < upper:
                columns = collection.columns_as_of(as_of)
                found = Counter[Any]()
                for update in handle.snapshot(as_of):
                    assert update.time == as_of
                    found[row_of(update.data, columns)] = update.diff
                assert found == collection.contents(as_of), f"{handle} as of {as_of}"

    def named(self) -> dict[str, Any]:
        return {c.name: c for c in self.client.state.collections.values()}

    def follow_since(self, model: Model) -> None:
        """After an outcome in doubt since may have moved, but only as far as was allowed."""
        for name, real in self.named().items():
            if name in model.collections:
                collection = model.collections[name]
                if collection.since <= real.since <= max(collection.since, collection.allowed):
                    collection.since = real.since

    def observed(self) -> Any:
        """Return all contents, read without the API at any time."""
        found = {}
        for name, real in self.named().items():
            schema = real.schemas[-1]
            rows = self.client.reader.rows(real, schema, lower=0, upper=END)
            columns = tuple(c for c in rows.column_names if c not in (TIME, DIFF))
            counts: Counter[Any] = Counter()
            for row in rows.to_pylist():
                # Since may pass upper, but sealed rows stay below upper.
                time = row[TIME] if row[TIME] >= real.upper else min(real.upper, LATEST) - 1
                counts[tuple(row[c] for c in columns), time] += row[DIFF]
            bounds = (real.upper, real.allowed, real.since, len(real.schemas), real.begins)
            errors = [(e.lower, e.upper) for e in real.errors if e.upper > real.since]
            found[name] = (*bounds, errors, columns, dropped_zeros(counts))
        return found


def observed_model(model: Model) -> Any:
    """The same of the model."""
    found = {}
    for name, collection in model.collections.items():
        columns = collection.versions[-1].columns
        counts: Counter[Any] = Counter()
        for row, time, diff in collection.updates:
            time = time if time >= collection.upper else min(collection.upper, LATEST) - 1
            counts[collection.filled(row, columns), time] += diff
        bounds = (collection.upper, collection.allowed, collection.since, len(collection.versions))
        told = (collection.begins, collection.lasting())
        found[name] = (*bounds, *told, columns, dropped_zeros(counts))
    return found


def dropped_zeros(counts: "Counter[Any]") -> "Counter[Any]":
    return Counter({key: count for key, count in counts.items() if count})


def row_of(data: Any, columns: tuple[str, ...]) -> tuple[Any, ...]:
    """A row as a tuple, with exactly these columns."""
    if isinstance(data, tuple):
        return data
    assert tuple(data) == columns
    return tuple(data.values())


SHORT = settings(
    max_examples=int(os.environ.get("PENSTOCK_MODEL_EXAMPLES", "20")),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[*HealthCheck],
)


@pytest.fixture(autouse=True)
def quiet():
    """Suppress logs of planned failures."""
    logger = logging.getLogger("penstock")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


def test_persist_is_its_model():
    run_state_machine_as_test(Persist, settings=SHORT)


# The machine must be able to fail: each of these bugs is found by a short run.


def forgets_seals(patch):
    real = penstock.persist.state.apply

    def apply(state, entry):
        kept = tuple(each for each in entry.operations if not isinstance(each, Seal))
        return real(state, structs.replace(entry, operations=kept))

    patch.setattr("penstock.persist.machine.apply", apply)


def forgets_discards(patch):
    patch.setattr("penstock.persist.state._discarded", lambda state, _number, _old: state)


def merges_past_since(patch):
    def merge_since(collection):
        return max(collection.upper - 1, 0)

    patch.setattr("penstock.persist.maintenance.merge_since", merge_since)


def merges_past_upper(patch):
    patch.setattr("penstock.persist.maintenance.merge_since", lambda collection: collection.since)


def merges_what_is_not_sealed(patch):
    patch.setattr(
        "penstock.persist.maintenance.mergeable", lambda collection, _: [*collection.batches]
    )
    patch.setattr(
        "penstock.persist.maintenance.merge_since",
        lambda collection: max([collection.since, *(b.since for b in collection.batches)]),
    )


def truncates_without_a_rollup(patch):
    def truncate(self):
        head = self._machine.state.seqno
        self._machine.log.truncate(head, head=head)

    patch.setattr(Collector, "truncate", truncate)


def settles_without_holds(patch):
    patch.setattr(Collector, "_needs", lambda _self: ({}, END))


def gives_again_what_was_given(patch):
    real = Reader.rows

    def rows(self, collection, schema, *, lower, upper):
        return real(self, collection, schema, lower=max(lower - 1, 0), upper=upper)

    patch.setattr(Reader, "rows", rows)


def says_not_written_of_what_was(patch):
    def outcome(_self, error):
        return DeterminateError(str(error))

    patch.setattr("penstock.durable.retrying_blob._Attempts.outcome", outcome)


def lets_the_old_writer_write(patch):
    patch.setattr(Machine, "must_own", lambda _self: None)


def ignores_who_holds_the_lock(patch):
    def plan_refuses_nobody(machine, _settings, writer, **_more):
        machine.take_epoch(
            lambda state: [
                TakeEpoch(Writer(writer), state.location or "l"),
                OpenStaging(f"{state.epoch + 1}-0"),
            ]
        )

    patch.setattr(runtime, "take_lock", plan_refuses_nobody)


def waits_for_truncated_entries(patch):
    def refresh(self, *, thorough=False):
        with self._advancing:
            self._looked_ms = (
                self._settings.clock.boot_ms() + 1
            )  # So it need not look at the floor.
            self._follow()
            return self._state

    patch.setattr(Machine, "refresh", refresh)


def reads_old_rows_without_defaults(patch):
    patch.setattr("penstock.persist.batch.defaults_of", lambda _schemas: {})


def seals_over_a_failed_write(patch):
    real = penstock.persist.write._Gathered

    class Forgetful(set[Any]):
        def update(self, *_failed):
            pass

    patch.setattr(
        penstock.persist.write, "_Gathered", lambda operations: real(operations, [], Forgetful())
    )


def deletes_files_that_are_linked(patch):
    def sweep(self, staging=None):
        for listed in self.blob.list("batch/"):
            self.blob.delete(listed.key)
        return 0

    patch.setattr(Collector, "sweep", sweep)


def forgets_errors(patch):
    patch.setattr("penstock.persist.readability.error_as_of", lambda _collection, _as_of: None)


def listens_across_errors(patch):
    patch.setattr("penstock.persist.readability._ahead", lambda _collection, _lower: iter(()))


def says_more_in_another_entry(patch):
    real = penstock.persist.state.foreseen
    patch.setattr("penstock.persist.write.foreseen", lambda state, _operations: real(state, []))


BUGS = [
    forgets_errors,
    listens_across_errors,
    says_more_in_another_entry,
    forgets_seals,
    forgets_discards,
    merges_past_since,
    merges_past_upper,
    merges_what_is_not_sealed,
    truncates_without_a_rollup,
    settles_without_holds,
    gives_again_what_was_given,
    says_not_written_of_what_was,
    lets_the_old_writer_write,
    ignores_who_holds_the_lock,
    waits_for_truncated_entries,
    reads_old_rows_without_defaults,
    seals_over_a_failed_write,
    deletes_files_that_are_linked,
]


# Seeds of searches that end within seconds: an unlucky one takes minutes. Other bugs have seed 0.
SEEDS = {merges_past_upper: 2, seals_over_a_failed_write: 2}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_short_run_finds(bug, monkeypatch):
    bug(monkeypatch)
    short = settings(SHORT, max_examples=200, phases=[Phase.generate], database=None)

    # A subclass, because `seed` changes the class.
    @seed(SEEDS.get(bug, 0))
    class Seeded(Persist):
        pass

    # Any error will do, but there must be one.
    with pytest.raises((Exception, pytest.fail.Exception)) as found:
        run_state_machine_as_test(Seeded, settings=short)
    assert not isinstance(found.value, TypeError | AttributeError | NameError)
