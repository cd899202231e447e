"""Following a collection for as long as a query runs, in a process of its own.

It answers Spark's questions in turn: how far is there something new (`latest`),
which tasks read it (`plan`), and what may be let go (`committed`). It claims
what the query has yet to read, from the first question on; a durable hold
besides keeps it while the query does not run. Every question asks whether the
claim still counts: one that was lost, as when the process was asleep for longer
than its lease, is made anew if nothing is missing yet.

A batch never reaches past a change of the schema, since a query has one schema
from its start to its end. There it stops with an error, and goes on when it is
started again.
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
from penstock.datasource.stream_offsets import Offset, admitted, begun_at, schema_ends
from penstock.errors import UsageError
from penstock.ingest.progress_views import find_progress_view
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

__all__ = ["Followed", "Follower", "find_followed", "find_followed_relation"]

log = logger("datasource")

SETTINGS: Final = Settings(patience_ms=60_000)

IDLE_MS: Final = 200
"""How long to wait for something new before saying that there is nothing."""


@dataclass(frozen=True, slots=True)
class Followed:
    """A collection, and the schema in which a query sees it."""

    url: str
    collection: int
    name: str
    schema: SchemaVersion
    columns: pa.Schema
    """The columns of its changes."""

    relation: str | None = None
    """The name of a progress relation or remap; then the collection is the remap."""


def find_followed(options: StreamOptions) -> Followed:
    """The collection to follow, in its newest schema."""
    client, found = find_collection(
        options.location, options.collection, hold=False, settings=SETTINGS
    )
    with client:
        schema = found.state.schemas[-1]
        return Followed(client.url, found.id, found.name, schema, stored_columns_of(schema))


def find_followed_relation(options: StreamOptions) -> Followed | None:
    """Return the progress relation or remap to follow; None if the options name none."""
    found = find_progress_view(options.location, options.collection, hold=False, settings=SETTINGS)
    if found is None:
        return None
    client, relation = found
    with client:
        remap = relation.remap
        columns = changes_columns(relation)
        schema = remap.state.schemas[-1]
        return Followed(client.url, remap.id, remap.name, schema, columns, relation.name)


class Follower:
    """One query's way through a collection."""

    def __init__(
        self, followed: Followed, options: StreamOptions, *, settings: Settings = SETTINGS
    ) -> None:
        self._followed = followed
        self._options = options
        self._settings = settings
        self._client = open(followed.url, hold=options.hold, settings=settings)
        self._clock = settings.clock
        self._claiming = ExitStack()
        self._claim: Claim | None = None
        self._durable: DurableHold | None = None
        self._older: list[Client] = []
        """Clients that lost their hold, of which one has the durable hold."""

        self._wakeups = self._client.reader.wakeups.subscribe()
        self._initial: Offset | None = None
        self._last: Offset | None = None
        self._target = END
        self._counted: dict[int, Counter[int]] = {}

    def initial(self) -> Offset:
        """Where a new query begins.

        Raises:
            SinceError: `startAt` lies below since.
        """
        while self._initial is None:
            _, collection = self._look()
            offset = self._meant(collection)
            if offset.begins or offset.snapshot or not collection.whole:
                check_since(collection, offset.needs)
            try:
                self._claim_from(offset.needs)
            except SinceError:
                # Since moved just now, so a word such as "earliest" means a later time.
                if offset == self._meant(self._look()[1]):
                    raise
            else:
                self._initial = offset
        return self._initial

    def until_now(self) -> None:
        """Go no further than what is complete now."""
        self._target = self._look()[1].upper

    def reached(self) -> Offset:
        """How far a query could get now."""
        _, collection = self._look()
        upper = min(collection.upper, self._schema_ends(collection))
        return Offset(collection=self._name, upper=upper)

    def latest(self, start: Offset, limit: int | None) -> Offset:
        """Where the next batch ends, or `start` if there is nothing new."""
        self._check(start)
        # Cleared before looking: a ring between the look and the wait is not missed.
        self._wakeups.clear()
        state, collection = self._keep(start)
        if not self._upper(start, collection) and self._target == END:
            if state.writer is not None:
                self._client.reader.notifications.attend(state.writer.address, state.location)
            self._clock.wait(self._wakeups, IDLE_MS)
            _, collection = self._look()
        upper = self._upper(start, collection)
        if upper is None:
            return start
        if limit is not None:
            upper = self._admitted(collection, start, upper, limit)
        return start.up_to(upper)

    def latest_of_all(self) -> Offset:
        """Where the next batch ends, for a Spark that does not say where it begins."""
        start = self._last
        if start is None:
            try:
                start = self.initial()
            except SinceError:
                # Either the query goes on from later, or it hears of this when it begins.
                start = Offset(collection=self._name, upper=0)
        _, collection = self._look()
        upper = self._upper(start, collection)
        self._last = start if upper is None else start.up_to(upper)
        return self._last

    def plan(self, start: Offset, end: Offset) -> list[Task | Rows]:
        """The tasks that give what lies between two offsets."""
        if start == self._initial:
            start = begun_at(start, end)
        self._check(start)
        self._check(end)
        if end.upper <= start.upper:
            return []
        _, collection = self._keep(start)
        url, schema = self._followed.url, self._followed.schema
        tasks: list[Task | Rows] = []
        lower = start.upper
        if self._followed.relation is not None:
            relation = relation_in(self._client, self._followed.relation)
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
            # Whatever its time, what was there when it began came with the beginning.
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

    def committed(self, end: Offset) -> None:
        """What lies before `end` is not needed any more."""
        self._check(end)
        state, _ = self._look()
        if self._claim is not None and end.needs >= self._claim.since:
            self._client.reader.claims.advance(self._claim, end.needs, state)
        if self._durable is not None and self._durable.sinces() != {self._followed.name: end.needs}:
            self._durable.move({self._followed.name: end.needs})

    def stop(self) -> None:
        """Let go; a durable hold stays."""
        self._claiming.close()
        for client in (*self._older, self._client):
            client.close()

    def _look(self) -> tuple[State, CollectionState]:
        state = self._client.reader.look()
        collection = state.collections.get(self._followed.collection)
        if collection is None:
            raise UsageError(
                f'collection "{self._followed.name}" was destroyed',
                hint="Follow another one, with a new checkpoint location.",
            )
        return state, collection

    @property
    def _name(self) -> str:
        return f"{self._client.reader.machine.state.location}/{self._followed.collection}"

    def _check(self, offset: Offset) -> None:
        if offset.collection != self._name:
            raise UsageError(
                f'checkpoint is of another collection than "{self._followed.name}"',
                detail=f"It followed {offset.collection}; this one is {self._name}. "
                "A collection that was destroyed and made again is another.",
                hint="Give the query a new checkpoint location.",
            )

    def _schema_ends(self, collection: CollectionState) -> int:
        return schema_ends(collection, self._followed.schema)

    def _upper(self, start: Offset, collection: CollectionState) -> int | None:
        """How far there is something new after `start`; None if there is nothing.

        Raises:
            CollectionErrored: the collection is in error from there on.
        """
        if start.upper >= self._target:
            return None
        ends = self._schema_ends(collection)
        reached = reachable(collection, start.upper, snapshot=start.fresh and start.snapshot)
        upper = min(reached, self._target, ends)
        if upper > start.upper:
            return upper
        if ends <= start.upper:
            raise UsageError(
                f'collection "{collection.name}" has another schema from {ends} on',
                detail="All that was written before has been given.",
                hint="Start the query again, from load(…) on: it goes on with the new schema.",
            )
        return None

    def _meant(self, collection: CollectionState) -> Offset:
        """Where a new query would begin now."""
        start_at, snapshot = self._options.start_at, self._options.snapshot
        if start_at == "latest" and collection.upper == 0:
            # Nothing is complete yet: begin before the first time there is.
            begins, snapshot = 0, False
        else:
            begins = time_of(start_at, collection) + (not snapshot)
        return Offset(collection=self._name, upper=begins, begins=begins, snapshot=snapshot)

    def _keep(self, offset: Offset) -> tuple[State, CollectionState]:
        """Look, with what a query at `offset` has yet to read claimed."""
        looked = self._look()
        lost: HoldLost | None = None
        try:
            self._client.reader.claims.check(looked[0])
        except HoldLost as error:
            log.warning("hold of a stream was lost", extra=fields(collection=self._followed.name))
            lost = error
            self._open_again()
        if self._claim is not None and self._claim.since <= offset.needs:
            return looked
        try:
            self._claim_from(offset.needs)
        except SinceError as error:
            gone = (
                f"The collection's since is {error.since}: what changed before has been "
                "compacted away."
            )
            raise UsageError(
                f'stream of collection "{self._followed.name}" cannot go on from {offset.upper}',
                detail=gone if lost is None else f"{gone} {lost.detail}",
                hint="Start a new query with a new checkpoint location. A durable hold, by the "
                "option hold with a name, keeps history while a query does not run.",
            ) from error
        return self._look()

    def _open_again(self) -> None:
        """Without the claims there were; a client that lost its hold makes no new ones."""
        self._claim = None
        self._claiming.close()
        if self._durable is None:
            self._client.close()
        else:
            # Opened again, a durable hold would be taken from a query that has it by now.
            self._client.reader.claims.close()
            self._older.append(self._client)
        self._client = open(self._followed.url, hold=self._options.hold, settings=self._settings)
        self._wakeups = self._client.reader.wakeups.subscribe()

    def _claim_from(self, since: int) -> None:
        """Claim what lies from `since` on, in place of what was claimed before.

        Raises:
            SinceError: it is no longer kept.
        """
        name = self._followed.name
        if self._options.owner is not None:
            self._durable = self._durable or self._client.hold(self._options.owner)
            held = self._durable.sinces()
            if set(held) != {name} or held[name] > since:
                self._durable.move({name: since})
        with ExitStack() as stack:
            claims = self._client.reader.claims
            claim = stack.enter_context(claims.claim(self._followed.collection, name, since))
            self._claiming.close()
            self._claiming = stack.pop_all()
            self._claim = claim

    def _admitted(self, collection: CollectionState, start: Offset, upper: int, limit: int) -> int:
        """The part of `[start, upper)` that has at most `limit` updates."""
        if start.fresh and start.snapshot:
            return start.upper + 1
        if start.upper <= collection.begins < upper and collection.begins:
            return collection.begins + 1
        needed = [b for b in collection.batches if b.lower < upper and b.upper > start.upper]
        if sum(batch.rows for batch in needed) <= limit:
            return upper
        self._counted = {batch.id: self._count(collection, batch) for batch in needed}
        total: Counter[int] = sum(self._counted.values(), Counter())
        within = sorted(each for each in total.items() if start.upper <= each[0] < upper)
        return admitted(within, upper, limit)

    def _count(self, collection: CollectionState, batch: Batch) -> Counter[int]:
        """How many updates of a batch have which time."""
        if batch.id in self._counted:
            return self._counted[batch.id]
        if batch.upper == batch.lower + 1 and batch.until == END:
            return Counter({batch.lower: batch.rows})
        counts: Counter[int] = Counter()
        for each in part_scans_of(collection, batch):
            rows = self._client.reader.batches.part_rows(collection, each, each.written)
            for found in pc.value_counts(rows.column(TIME)).to_pylist():
                counts[found["values"]] += found["counts"]
        return counts
