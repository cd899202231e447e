"""Application of the replication stream to one tick, table by table.

The phase of a table decides the treatment of its messages:

    loading     initial snapshot in progress: store messages as pending changes
    live        turn messages into deletes and inserts
    errored     ignore messages; every read of the collection fails

Messages that contain the complete old row are resolved as they arrive. Messages that
contain only the key of the old row are buffered up to `GATHER_BYTES` and resolved
together, with one lookup of the old rows. The lookup is split if the old rows are large:
a buffered delete is only a key, but its lookup returns a complete row.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

import pyarrow as pa

from penstock.errors import DefiniteError, InternalError
from penstock.sources.postgres.pending import keep, keep_truncate, places, unkept
from penstock.sources.postgres.pgoutput import Chunk, Relation, Truncate
from penstock.sources.postgres.resolve import Changes, in_parts, joined, resolve
from penstock.sources.postgres.tables import Table, reads
from penstock.sources.postgres.tail import Run, Seen, decode
from penstock.sources.source import TickTransaction

__all__ = ["Following", "Phase", "Reading"]

GATHER_BYTES: Final = 64 << 20
"""Bytes of buffered messages of a table above which they are resolved."""

FOUND_BYTES: Final = 64 << 20
"""Upper bound of the bytes of old rows per lookup, estimated from earlier lookups."""

FIRST_LOOKUP: Final = 1_000
"""Maximum number of rows per lookup while the row size is unknown."""


class Phase(StrEnum):
    """Phase of a table. Part of the durable state of the source."""

    LOADING = "loading"
    LOADED = "loaded"
    LIVE = "live"
    ERRORED = "errored"


@dataclass(slots=True)
class Following:
    """A tracked table and its phase."""

    table: Table
    phase: Phase
    snapshot_lsn: int = 0
    """Consistent point of the snapshot, which excludes commits at or after this LSN."""

    attempt: str = ""
    """Unique name of the current snapshot attempt."""

    truncate_order: int = -1
    """Stream order of the last TRUNCATE among the pending changes, or -1."""

    rows: int = 0
    error: str = ""
    seen: bool = False
    """True once the collection has been published."""

    has_collection: bool = True
    """False for a table that no collection can hold: the status alone reports its error."""

    told: Relation | None = None
    """Last Relation message that was accepted for this table."""

    failure: DefiniteError | None = None
    """Error of the table. Before the collection is published, a TRUNCATE may clear it."""

    gathered: list[Changes] = field(default_factory=list)
    size: int = 0
    row_bytes: int = 0
    """Estimated bytes per row, from the last lookups."""

    @property
    def pending(self) -> str:
        """Return the side-state name of the pending changes, unique per snapshot attempt."""
        return f"{self.table.oid}-{self.attempt}"


Learn = Callable[["Reading", TickTransaction, Following, Relation], bool]
"""Callback for a Relation message with different columns.

Returns whether the table could adopt the columns.
"""


class Reading:
    """Reader of the stream for one tick. Implements `Hearer`."""

    def __init__(
        self,
        tick: TickTransaction,
        tables: Mapping[int, Following],
        *,
        relations: dict[int, Relation],
        learn: Learn,
        order: int,
    ) -> None:
        self._tick = tick
        self._tables = tables
        self._relations = relations
        """Last Relation message of the connection by table oid, including untracked tables."""

        self._learn = learn
        self.order = order
        """Stream order of the next message that is stored as a pending change."""

        self.truncated_by: dict[int, set[int]] = {}
        """Ids of the transactions that truncated a table, by table oid."""

        self.odd: dict[int, str] = {}
        """Reasons for a resync, by table oid. Messages of these tables are ignored."""

        self.broken: dict[int, DefiniteError] = {}
        """Errors of messages that could not be applied, by table oid.

        A schema change without a message may explain the error. If the drift check finds no
        such change, the table fails at the end of the tick.
        """

    def relation(self, relation: Relation) -> None:
        """Store the column layout of a table; it is checked at the next row message."""
        self._relations[relation.oid] = relation

    def rows(self, chunk: Chunk, run: Run) -> None:
        """Apply row changes of one table, or store them as pending changes."""
        following = self._tables.get(run.relation)
        if following is None or not self._heeds(following):
            return
        relation = self._relations[run.relation]
        if following.told is not relation and not self._understands(following, relation):
            return
        try:
            changes = decode(chunk, run, following.table, len(relation.columns))
        except DefiniteError as error:
            if following.seen:
                self.broken[run.relation] = error
            else:
                # SUBTLE: a TRUNCATE before the collection is published makes the value irrelevant.
                following.error, following.failure = str(error), error
            return
        if following.phase == Phase.LIVE:
            self._take(following, changes)
        else:
            kept = keep(changes, run.commit_lsns(chunk), order=self.order)
            self._tick.append_side_rows(following.pending, kept)
            self.order += len(changes)

    def truncated(self, truncate: Truncate, transaction: Seen) -> None:
        """Truncate the collections of the tables, or store the TRUNCATE as a pending change."""
        for oid in truncate.relations:
            self.truncated_by.setdefault(oid, set()).add(transaction.xid)
            following = self._tables.get(oid)
            if following is None or following.phase == Phase.ERRORED or oid in self.odd:
                continue
            if following.phase == Phase.LIVE:
                # Earlier changes need not be resolved, and their errors no longer matter.
                self.broken.pop(oid, None)
                following.gathered, following.size = [], 0
                self._tick.truncate(following.table.collection)
            else:
                following.error, following.failure = "", None
                kept = keep_truncate(
                    following.table.schema, transaction.commit_lsn, order=self.order
                )
                self._tick.append_side_rows(following.pending, kept)
                following.truncate_order = self.order
                self.order += 1

    def pass_over(self, following: Following, reason: str) -> None:
        """Ignore messages of the table until its resync, which includes their effects."""
        following.gathered, following.size = [], 0
        self.odd.setdefault(following.table.oid, reason)

    def compared(self, following: Following) -> None:
        """Apply messages of the table again after its resync."""
        self.odd.pop(following.table.oid, None)
        self.broken.pop(following.table.oid, None)

    def finish(self) -> None:
        """Resolve all buffered messages, and mark broken tables errored."""
        for following in self._tables.values():
            self.flush(following)
        for oid, error in self.broken.items():
            self.fail(self._tables[oid], error)
        self.broken = {}

    def flush(self, following: Following) -> None:
        """Resolve the buffered messages of one table."""
        if following.gathered:
            changes = joined(following.gathered)
            following.gathered, following.size = [], 0
            self._resolve(following, changes)

    def reveal(self, following: Following) -> None:
        """Publish a loaded table at this tick, with its pending changes applied."""
        table = following.table
        self._tick.begin(table.collection)
        following.seen = True
        if following.failure is not None:
            following.phase = Phase.ERRORED
        if following.phase == Phase.ERRORED:
            self._tick.fail(table.collection, following.failure or DefiniteError(following.error))
            self._tick.drop_side_rows(following.pending)
            return
        following.phase = Phase.LIVE
        last = -1
        for kept in self._tick.side_rows(following.pending):
            if not kept.num_rows:
                continue
            first, after = places(kept)
            if first <= last:
                raise InternalError(f'messages of table "{table.name}" were kept out of order')
            last = after
            for changes in unkept(
                kept, from_lsn=following.snapshot_lsn, from_order=following.truncate_order
            ):
                if table.oid in self.broken:
                    break
                if changes is None:
                    self._tick.truncate(table.collection)
                else:
                    self._resolve(following, changes)
        self._tick.drop_side_rows(following.pending)

    def fail(self, following: Following, error: DefiniteError) -> None:
        """Mark the table errored. A published collection fails every read from this tick on."""
        following.gathered, following.size = [], 0
        if following.phase == Phase.ERRORED:
            return  # Keep the first error.
        if following.seen:
            self._tick.fail(following.table.collection, error)
        following.phase, following.error, following.failure = Phase.ERRORED, str(error), error

    def _heeds(self, following: Following) -> bool:
        """Return whether messages of a table are applied or stored."""
        oid = following.table.oid
        failed = following.phase == Phase.ERRORED or following.failure is not None
        return not failed and oid not in self.odd and oid not in self.broken

    def _understands(self, following: Following, relation: Relation) -> bool:
        """Adopt the column layout of `relation`. Return whether that is possible."""
        if not reads(following.table, relation) and not self._learn(
            self, self._tick, following, relation
        ):
            self.pass_over(following, "its messages have other columns than before")
            return False
        following.told = relation
        table = following.table
        named = tuple(column.name for column in relation.columns if column.key)
        if relation.replica_identity in "di" and named and set(named) != set(table.key):
            # Earlier messages identify old rows by the previous key.
            self.flush(following)
            following.table = replace(following.table, key=named)
        return True

    def _take(self, following: Following, changes: Changes) -> None:
        whole = not ((changes.kind != ord("I")) & ~changes.whole).any()
        if whole and not following.gathered and following.table.described.replica_identity == "f":
            self._resolve(following, changes)
            return
        following.gathered.append(changes)
        following.size += changes.new.nbytes + changes.old.nbytes
        if following.size > GATHER_BYTES:
            self.flush(following)

    def _resolve(self, following: Following, changes: Changes) -> None:
        """Apply changes to the tick, in parts whose old rows fit into memory."""

        def most() -> int:
            return FOUND_BYTES // following.row_bytes if following.row_bytes else FIRST_LOOKUP

        for part in in_parts(changes, following.table.key, most):
            if not self._resolve_part(following, part):
                return
            following.rows += len(part)

    def _resolve_part(self, following: Following, changes: Changes) -> bool:
        table = following.table

        def lookup(keys: pa.Table) -> pa.Table:
            found = self._tick.lookup(table.collection, keys)
            # A few small rows do not predict small rows: reduce the estimate by half at most.
            row_bytes = 1 + found.nbytes // keys.num_rows
            following.row_bytes = max(row_bytes, following.row_bytes // 2)
            return found

        try:
            resolved = resolve(changes, table.key, lookup, table=table.name)
        except DefiniteError as error:
            self.broken[table.oid] = error
            return False
        self._tick.change(table.collection, deletes=resolved.deletes, inserts=resolved.inserts)
        return True
