"""Bugs to plant, by name, which prove that the checker detects them.

    with planted("no_floor_check"): …

A child process reads the name from the environment variable PENSTOCK_PLANTED,
in `tests/faults/actors.py` only. Each bug is a plausible mistake. The row refers
to the table of invariants.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

import xxhash
from msgspec import structs

from penstock.durable import Blob
from penstock.durable.files import FileBlob
from penstock.durable.log import Log, Marks, entry_key
from penstock.durable.retrying_blob import RetryingBlob
from penstock.errors import Corruption, DeterminateError, IndeterminateError
from penstock.persist import machine as machine_module
from penstock.persist import state as state_module
from penstock.persist.batch import Batches
from penstock.persist.encoding import decode_entry, encode_rollup
from penstock.persist.gc import Collector
from penstock.persist.holds import Claim, LocalClaims, _Registered, list_holds
from penstock.persist.machine import Machine
from penstock.persist.merge.merger import Merger
from penstock.persist.paths import BATCHES, hold_prefix
from penstock.persist.read import Changes, Listener
from penstock.persist.state import (
    CollectionState,
    Entry,
    ExpireHold,
    Inline,
    Link,
    Operation,
    State,
    TakeEpoch,
    schema_as_of,
    staging_of,
)

BUGS: dict[str, Callable[[], Any]] = {}
"""Context managers that plant the bugs, by name."""


def _bug(plant: Callable[[], Any]) -> Callable[[], Any]:
    BUGS[plant.__name__] = plant
    return plant


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Plant the bug of that name, or none."""
    if name is None:
        yield
    else:
        with BUGS[name]():
            yield


@_bug
def no_floor_check() -> Any:
    """Row 1: a create counts, however long the writer was paused before it."""
    return mock.patch.object(Log, "marks", return_value=Marks(0, 0))


@_bug
def sweep_by_age() -> Any:
    """Row 2: every file that no collection links counts as old enough to delete."""

    def sweep(self: Collector, staging: str | None = None) -> int:
        listed = [each.key for each in self.blob.list(BATCHES)]
        state = self._machine.refresh(thorough=True)
        for key in listed:
            # Keep shared-storage checks: tasks would notice a missing one before any damage.
            row_file = key.endswith(".parquet")
            if row_file and key not in state.linked() and key not in state.garbage:
                self.blob.delete(key)
        return len(listed)

    return mock.patch.object(Collector, "sweep", sweep)


@_bug
def sweep_reads_state_first() -> Any:
    """Row 2: the sweep reads the state before it lists the files."""

    def sweep(self: Collector, staging: str | None = None) -> int:
        state = self._machine.refresh(thorough=True)
        listed = [each.key for each in self.blob.list(BATCHES)]
        for key in listed:
            if staging_of(key) not in state.staging and key not in state.linked():
                self.blob.delete(key)
        return len(listed)

    return mock.patch.object(Collector, "sweep", sweep)


@_bug
def missing_means_failed() -> Any:
    """Row 3: after a lost answer, a missing key counts as not written."""

    def create(self: RetryingBlob, key: str, data: bytes) -> bool:
        try:
            return self._inner.create(key, data)
        except IndeterminateError as error:
            if self._inner.get(key) is None:
                raise DeterminateError(f'"{key}" was not written') from error
            return self._inner.get(key) == data

    return mock.patch.object(RetryingBlob, "create", create)


@_bug
@contextmanager
def new_bytes_on_retry() -> Iterator[None]:
    """Row 3: an indeterminate attempt starts again under a new token."""
    commit = Machine.commit

    def impatient(self: RetryingBlob, key: str, data: bytes) -> bool:
        return self._inner.create(key, data)

    def commit_again(self: Machine, plan: Any) -> tuple[State, State]:
        while True:
            with suppress(IndeterminateError):
                return commit(self, plan)

    with (
        mock.patch.object(RetryingBlob, "create", impatient),
        mock.patch.object(Machine, "commit", commit_again),
    ):
        yield


@_bug
@contextmanager
def no_void_rule() -> Iterator[None]:
    """Row 4: every entry counts, of any epoch."""

    def nothing_is_void(state: State, entry: Entry) -> str | None:
        return None

    after = state_module._after

    def keeps_epoch(state: State, number: int, epoch: int, operation: Operation) -> State:
        return after(
            state, number, epoch if isinstance(operation, TakeEpoch) else state.epoch, operation
        )

    with (
        mock.patch.object(state_module, "void_reason", nothing_is_void),
        mock.patch.object(machine_module, "void_reason", nothing_is_void),
        mock.patch.object(state_module, "_after", keeps_epoch),
    ):
        yield


@_bug
@contextmanager
def rollup_points_at_entries() -> Iterator[None]:
    """Row 5: a rollup names the entry that contains an inline batch instead of the batch."""
    read_part = Batches._part

    def encode(state: State) -> bytes:
        collections = state.collections
        for id, collection in collections.items():
            collections = collections.set(id, _pointing(collection))
        return encode_rollup(structs.replace(state, collections=collections))

    def part(self: Batches, part: Any, schema: Any) -> Any:
        if isinstance(part, Inline) and part.rows.startswith(b"@"):
            part = Inline(_read_from_log(self._blob, part.rows[1:]))
        return read_part(self, part, schema)

    with (
        mock.patch.object(machine_module, "encode_rollup", encode),
        mock.patch.object(Batches, "_part", part),
    ):
        yield


def _pointing(collection: CollectionState) -> CollectionState:
    def pointer(part: Any) -> Any:
        if isinstance(part, Inline) and not part.rows.startswith(b"@"):
            return Inline(b"@" + xxhash.xxh64_digest(part.rows))
        return part

    batches = tuple(
        structs.replace(batch, parts=tuple(map(pointer, batch.parts)))
        for batch in collection.batches
    )
    return structs.replace(collection, batches=batches)


def _read_from_log(blob: Blob, digest: bytes) -> bytes:
    for number in Log(blob).entries():
        data = blob.get(entry_key(number))
        assert data is not None
        entry = decode_entry(data, key=entry_key(number), where=blob.name)
        for operation in entry.operations:
            for batch in operation.batches if isinstance(operation, Link) else ():
                for part in batch.parts:
                    if isinstance(part, Inline) and xxhash.xxh64_digest(part.rows) == digest:
                        return part.rows
    raise Corruption(entry_key(0), where=blob.name, detail="The entry of a batch is missing.")


@_bug
@contextmanager
def wait_on_missing() -> Iterator[None]:
    """Row 6: a listener treats a missing entry as not written yet."""
    with (
        mock.patch.object(Log, "marks", return_value=Marks(0, 0)),
        mock.patch.object(Machine, "_check_end"),
    ):
        yield


@_bug
@contextmanager
def listener_holds_at_frontier() -> Iterator[None]:
    """Row 6: a listener lets since reach its frontier, where a merge advances old rows."""

    def changes(self: Listener, collection: CollectionState) -> Changes:
        lower, upper = self._frontier, collection.upper
        reader = self._reader
        schema = schema_as_of(collection, upper - 1)
        rows = reader.rows(collection, schema, lower=lower, upper=upper).sort_by("mz_timestamp")
        return Changes(rows, reader.decoder(collection, schema), lower, upper)

    real = _Registered.advance

    def advance(self: _Registered, claim: Claim, since: int, state: State) -> None:
        real(self, claim, since + (since > claim.since), state)

    with (
        mock.patch.object(Listener, "_changes", changes),
        mock.patch.object(_Registered, "advance", advance),
    ):
        yield


@_bug
@contextmanager
def merge_past_the_listener() -> Iterator[None]:
    """Row 6: a merge advances times to upper, beyond the frontiers of listeners."""
    merge = Merger.merge

    def eager(self: Merger, collection: Any, inputs: Any, *, since: int) -> Any:
        return merge(self, collection, inputs, since=max(since, collection.upper))

    with mock.patch.object(Merger, "merge", eager):
        yield


@_bug
@contextmanager
def holds_read_before_announcing() -> Iterator[None]:
    """Row 7: the writer reads the holds once, before its entries are in the log."""
    settle, needs = Collector.settle, Collector._needs

    def early(self: Collector) -> None:
        needed = needs(self)
        with mock.patch.object(Collector, "_needs", return_value=needed):
            settle(self)

    with mock.patch.object(Collector, "settle", early):
        yield


@_bug
def renumber_without_planning_again() -> Any:
    """Row 7: an entry that lost its number is written unchanged under the next number."""

    def commit(self: Machine, plan: Any) -> tuple[State, State]:
        assert self._epoch is not None
        with self._advancing:
            before = self._state
            operations: Sequence[Operation] = tuple(plan(before))
            if not operations:
                return before, before
            with mock.patch.object(machine_module, "void_reason", return_value=None):
                while not self._create(self._state, self._epoch, tuple(operations)):
                    pass
            return before, self._state

    return mock.patch.object(Machine, "commit", commit)


@_bug
def expire_by_readers_clock() -> Any:
    """Row 7: a lease expires by the time that its owner wrote into it."""

    def expire(self: Collector) -> None:
        now_ms = self._settings.clock.now_ms()
        lapsed = [
            id
            for id, (_, hold) in list_holds(self.blob).items()
            if hold.lease_ms is not None and now_ms - hold.written_ms >= hold.lease_ms
        ]
        if lapsed:
            self._machine.commit(
                lambda state: [ExpireHold(id) for id in lapsed if id not in state.expired]
            )
        for id in lapsed:
            for listed in self.blob.list(hold_prefix(id)):
                self.blob.delete(listed.key)

    return mock.patch.object(Collector, "_expire_leases", expire)


@_bug
def claims_are_ignored() -> Any:
    """Row 7: a move of since ignores readers in the process of the writer."""
    return mock.patch.object(LocalClaims, "needs", return_value=({}, 2**63 - 1))


@_bug
def reader_does_not_settle() -> Any:
    """Row 8: a reader acts on an entry as soon as it sees it."""
    return mock.patch.object(FileBlob, "settle")


@_bug
@contextmanager
def retake_after_fenced() -> Iterator[None]:
    """Row 28: a fenced process takes the lock back. `actors.py` implements it."""
    yield
