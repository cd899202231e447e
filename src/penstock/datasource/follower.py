"""Position of a stream in a collection, in one process for the duration of a query.

The follower answers Spark's calls in turn: the end of the available changes (`latest`), the
tasks that read them (`plan`), and the changes that are no longer needed (`commit`). It claims
the changes that the query has yet to read, from the first call on. A durable hold retains
them also while the query is stopped. Every call checks the claim. A lost claim, for example
after the process was suspended for longer than its lease, is created again if no change is
missing yet.

A query has one schema from start to end, so a batch never spans a schema change. The query
fails there, and continues after a restart.
"""

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from penstock.data import TIME
from penstock.datasource.bindings import (
    changes_columns,
    read_relation_changes,
    relation_in,
)
from penstock.datasource.options import StreamOptions
from penstock.datasource.read_task import Rows, Task, changes_tasks, contents_tasks
from penstock.datasource.stream_offsets import Offset, admit, first_batch_start, schema_end
from penstock.errors import UsageError
from penstock.ingest import find_progress_view
from penstock.persist import Client, Settings, open
from penstock.persist.batch import part_scans_of
from penstock.persist.errors import HoldLost, SinceError
from penstock.persist.holds import Claim, DurableHold
from penstock.persist.lake import find_collection, time_of
from penstock.persist.readability import check_since, reachable
from penstock.persist.scan.plan import scan_changes, scan_snapshot
from penstock.persist.state import (
    END,
    Batch,
    CollectionState,
    SchemaVersion,
    State,
    stored_columns_of,
)
from penstock.telemetry import fields, logger

__all__ = ["Follower", "StreamedCollection", "find_streamed", "find_streamed_relation"]

log = logger("datasource")

SETTINGS: Final = Settings(patience_ms=60_000)

IDLE_MS: Final = 200
"""Wait this long for new changes before reporting none."""


@dataclass(frozen=True, slots=True)
class StreamedCollection:
    """A collection with the schema that the query reads."""

    url: str
    collection: int
    name: str
    schema: SchemaVersion
    columns: pa.Schema
    """Columns of the changes."""

    relation: str | None = None
    """Name of a progress relation or remap; the collection is then the remap."""


def find_streamed(options: StreamOptions) -> StreamedCollection:
    """Return the collection to stream, in its newest schema."""
    client, located = find_collection(
        options.location, options.collection, hold=False, settings=SETTINGS
    )
    with client:
        schema = located.state.schemas[-1]
        return StreamedCollection(
            client.url, located.id, located.name, schema, stored_columns_of(schema)
        )


def find_streamed_relation(options: StreamOptions) -> StreamedCollection | None:
    """Return the progress relation or remap to stream, or None if the options name none."""
    located = find_progress_view(
        options.location, options.collection, hold=False, settings=SETTINGS
    )
    if located is None:
        return None
    client, relation = located
    with client:
        remap = relation.remap
        columns = changes_columns(relation)
        schema = remap.state.schemas[-1]
        return StreamedCollection(client.url, remap.id, remap.name, schema, columns, relation.name)


class Follower:
    """Position of one query in a collection."""

    def __init__(
        self, streamed: StreamedCollection, options: StreamOptions, *, settings: Settings = SETTINGS
    ) -> None:
        self._streamed = streamed
        self._options = options
        self._settings = settings
        self._client = open(streamed.url, hold=options.hold, settings=settings)
        self._clock = settings.clock
        self._claiming = ExitStack()
        self._claim: Claim | None = None
        self._durable: DurableHold | None = None
        self._clients_without_lease: list[Client] = []
        """Clients that lost their lease; one of them owns the durable hold."""

        self._wakeups = self._client.reader.wakeups.subscribe()
        self._initial: Offset | None = None
        self._last: Offset | None = None
        self._target = END
        self._counts_by_batch: dict[int, Counter[int]] = {}

    def initial(self) -> Offset:
        """Return the offset where a new query starts.

        Raises:
            SinceError: `startAt` is below since.
        """
        while self._initial is None:
            _, collection = self._read_state()
            offset = self._initial_offset(collection)
            if offset.begins or offset.snapshot or not collection.whole:
                check_since(collection, offset.needs)
            try:
                self._claim_from(offset.needs)
            except SinceError:
                # Since advanced concurrently, so "earliest" now means a later time.
                if offset == self._initial_offset(self._read_state()[1]):
                    raise
            else:
                self._initial = offset
        return self._initial

    def stop_at_current_upper(self) -> None:
        """End the stream at the current upper."""
        self._target = self._read_state()[1].upper

    def reached(self) -> Offset:
        """Return the end of the changes that are available now."""
        _, collection = self._read_state()
        upper = min(collection.upper, self._schema_end(collection))
        return Offset(collection=self._name, upper=upper)

    def latest(self, start: Offset, limit: int | None) -> Offset:
        """Return the end of the next batch, or `start` if there are no new changes."""
        self._check(start)
        # Clear before reading the state: a notification between the read and the wait is kept.
        self._wakeups.clear()
        state, collection = self._ensure_claim(start)
        if not self._upper(start, collection) and self._target == END:
            if state.writer is not None:
                self._client.reader.notifications.connect(state.writer.address, state.location)
            self._clock.wait(self._wakeups, IDLE_MS)
            _, collection = self._read_state()
        upper = self._upper(start, collection)
        if upper is None:
            return start
        if limit is not None:
            upper = self._admit(collection, start, upper, limit)
        return start.up_to(upper)

    def latest_without_start(self) -> Offset:
        """Return the end of the next batch, for Spark 4.1, which does not pass its start."""
        start = self._last
        if start is None:
            try:
                start = self.initial()
            except SinceError:
                # Either the query resumes at a later offset, or `initial` raises this error again.
                start = Offset(collection=self._name, upper=0)
        _, collection = self._read_state()
        upper = self._upper(start, collection)
        self._last = start if upper is None else start.up_to(upper)
        return self._last

    def plan(self, start: Offset, end: Offset) -> list[Task | Rows]:
        """Return the tasks that read the changes between two offsets."""
        if start == self._initial:
            start = first_batch_start(start, end)
        self._check(start)
        self._check(end)
        if end.upper <= start.upper:
            return []
        _, collection = self._ensure_claim(start)
        url, schema = self._streamed.url, self._streamed.schema
        tasks: list[Task | Rows] = []
        lower = start.upper
        if self._streamed.relation is not None:
            relation = relation_in(self._client, self._streamed.relation)
            snapshot = start.fresh and start.snapshot
            return [Rows(read_relation_changes(relation, lower, end.upper, snapshot=snapshot))]
        if start.fresh and start.snapshot:
            tasks += contents_tasks(
                url,
                scan_snapshot(collection, lower),
                schema,
                max_task_bytes=self._options.max_task_bytes,
            )
            lower += 1
        elif collection.whole and lower <= collection.begins > 0:
            # The initial contents became visible at `begins`, regardless of their times.
            if end.upper <= collection.begins:
                return []
            lower = collection.begins + 1
            tasks += contents_tasks(
                url,
                scan_snapshot(collection, collection.begins),
                schema,
                max_task_bytes=self._options.max_task_bytes,
            )
        tasks += changes_tasks(url, scan_changes(collection, lower, end.upper), schema)
        return tasks

    def commit(self, end: Offset) -> None:
        """Release the changes before `end`."""
        self._check(end)
        state, _ = self._read_state()
        if self._claim is not None and end.needs >= self._claim.since:
            self._client.reader.claims.advance(self._claim, end.needs, state)
        if self._durable is not None and self._durable.sinces() != {self._streamed.name: end.needs}:
            self._durable.move({self._streamed.name: end.needs})

    def stop(self) -> None:
        """Release the claims and close; a durable hold remains."""
        self._claiming.close()
        for client in (*self._clients_without_lease, self._client):
            client.close()

    def _read_state(self) -> tuple[State, CollectionState]:
        state = self._client.reader.refresh()
        collection = state.collections.get(self._streamed.collection)
        if collection is None:
            raise UsageError(
                f'collection "{self._streamed.name}" was destroyed',
                hint="Stream another collection, with a new checkpoint location.",
            )
        return state, collection

    @property
    def _name(self) -> str:
        return f"{self._client.reader.machine.state.location}/{self._streamed.collection}"

    def _check(self, offset: Offset) -> None:
        if offset.collection != self._name:
            raise UsageError(
                f'checkpoint belongs to another collection than "{self._streamed.name}"',
                detail=f"The checkpoint is of {offset.collection}; the collection is {self._name}. "
                "A collection that was dropped and created again is another collection.",
                hint="Use a new checkpoint location for the query.",
            )

    def _schema_end(self, collection: CollectionState) -> int:
        return schema_end(collection, self._streamed.schema)

    def _upper(self, start: Offset, collection: CollectionState) -> int | None:
        """Return the end of the changes after `start`, or None if there are none.

        Raises:
            CollectionErrored: The collection is errored from `start` on.
        """
        if start.upper >= self._target:
            return None
        end_of_schema = self._schema_end(collection)
        reached = reachable(collection, start.upper, snapshot=start.fresh and start.snapshot)
        upper = min(reached, self._target, end_of_schema)
        if upper > start.upper:
            return upper
        if end_of_schema <= start.upper:
            raise UsageError(
                f'collection "{collection.name}" has a new schema from {end_of_schema} on',
                detail="The query has delivered all changes before that time.",
                hint="Start the query again, from load(…) on: it continues with the new schema.",
            )
        return None

    def _initial_offset(self, collection: CollectionState) -> Offset:
        """Return the offset where a new query would start now."""
        start_at, snapshot = self._options.start_at, self._options.snapshot
        if start_at == "latest" and collection.upper == 0:
            # No time is complete yet: start before the first time.
            begins, snapshot = 0, False
        else:
            begins = time_of(start_at, collection) + (not snapshot)
        return Offset(collection=self._name, upper=begins, begins=begins, snapshot=snapshot)

    def _ensure_claim(self, offset: Offset) -> tuple[State, CollectionState]:
        """Read the state, and ensure a claim of the changes from `offset` on."""
        states = self._read_state()
        lost: HoldLost | None = None
        try:
            self._client.reader.claims.check(states[0])
        except HoldLost as error:
            log.warning("stream hold lost", extra=fields(collection=self._streamed.name))
            lost = error
            self._reopen()
        if self._claim is not None and self._claim.since <= offset.needs:
            return states
        try:
            self._claim_from(offset.needs)
        except SinceError as error:
            detail = (
                f"The since of the collection is {error.since}: earlier changes have been "
                "compacted."
            )
            raise UsageError(
                f'stream of collection "{self._streamed.name}" cannot resume at {offset.upper}',
                detail=detail if lost is None else f"{detail} {lost.detail}",
                hint="Start a new query with a new checkpoint location. To retain history while a "
                "query is stopped, set the option hold to a name: a durable hold.",
            ) from error
        return self._read_state()

    def _reopen(self) -> None:
        """Open a new client without claims; a client that lost its lease cannot claim again."""
        self._claim = None
        self._claiming.close()
        if self._durable is None:
            self._client.close()
        else:
            # Reopening the durable hold could take it from a newer query.
            self._client.reader.claims.close()
            self._clients_without_lease.append(self._client)
        self._client = open(self._streamed.url, hold=self._options.hold, settings=self._settings)
        self._wakeups = self._client.reader.wakeups.subscribe()

    def _claim_from(self, since: int) -> None:
        """Claim the history from `since` on, replacing the previous claim.

        Raises:
            SinceError: The history is no longer retained.
        """
        name = self._streamed.name
        if self._options.owner is not None:
            self._durable = self._durable or self._client.hold(self._options.owner)
            held = self._durable.sinces()
            if set(held) != {name} or held[name] > since:
                self._durable.move({name: since})
        with ExitStack() as stack:
            claims = self._client.reader.claims
            claim = stack.enter_context(claims.claim(self._streamed.collection, name, since))
            self._claiming.close()
            self._claiming = stack.pop_all()
            self._claim = claim

    def _admit(self, collection: CollectionState, start: Offset, upper: int, limit: int) -> int:
        """Return the end of the part of `[start, upper)` with at most `limit` updates."""
        if start.fresh and start.snapshot:
            return start.upper + 1
        if start.upper <= collection.begins < upper and collection.begins:
            return collection.begins + 1
        needed = [b for b in collection.batches if b.lower < upper and b.upper > start.upper]
        if sum(batch.rows for batch in needed) <= limit:
            return upper
        self._counts_by_batch = {batch.id: self._count(collection, batch) for batch in needed}
        total: Counter[int] = sum(self._counts_by_batch.values(), Counter())
        within = sorted(entry for entry in total.items() if start.upper <= entry[0] < upper)
        return admit(within, upper, limit)

    def _count(self, collection: CollectionState, batch: Batch) -> Counter[int]:
        """Return the number of updates per time of a batch."""
        if batch.id in self._counts_by_batch:
            return self._counts_by_batch[batch.id]
        if batch.upper == batch.lower + 1 and batch.until == END:
            return Counter({batch.lower: batch.rows})
        counts: Counter[int] = Counter()
        for part in part_scans_of(collection, batch):
            rows = self._client.reader.batches.part_rows(collection, part, part.written)
            for entry in pc.value_counts(rows.column(TIME)).to_pylist():
                counts[entry["values"]] += entry["counts"]
        return counts
