"""What the stream says, brought into a tick, table by table.

    loading     the first copy is under way: messages are kept aside
    live        messages become rows that go and come
    errored     messages are passed over; the collection fails every reading

Messages that hold the old row whole are resolved as they come. Those that only
name its key are gathered, up to a bound of memory, and resolved together: the
old rows are looked up once for all of them, or in parts if they are large: of a
delete there is only a key to be gathered, but a whole row to be found.
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
"""Messages that wait for their old rows are resolved when there are more bytes of them."""

FOUND_BYTES: Final = 64 << 20
"""No more old rows are looked up at a time than these bytes of them, going by those before."""

FIRST_LOOKUP: Final = 1_000
"""So many are looked up when nothing is known of their size."""


class Phase(StrEnum):
    """Where a table is in its life. Kept with the source's notes."""

    LOADING = "loading"
    LOADED = "loaded"
    LIVE = "live"
    ERRORED = "errored"


@dataclass(slots=True)
class Following:
    """A table that is followed, and where it is in its life."""

    table: Table
    phase: Phase
    snapshot_lsn: int = 0
    """The consistent point of its copy: what committed there or later is not in it."""

    attempt: str = ""
    """Which copy of it this is; each has a name of its own."""

    truncate_order: int = -1
    """The place in the stream of the last TRUNCATE among its pending changes, or -1."""

    rows: int = 0
    error: str = ""
    seen: bool = False
    """Whether its collection has begun."""

    has_collection: bool = True
    """False for a table that no collection can hold: its error is in the status only."""

    told: Relation | None = None
    """What its messages hold now, as far as it was looked at."""

    failure: DefiniteError | None = None
    """The error; of a table that is not seen yet, one that a TRUNCATE may end."""

    gathered: list[Changes] = field(default_factory=list)
    size: int = 0
    row_bytes: int = 0
    """How large a row was, of those that were last looked up."""

    @property
    def pending(self) -> str:
        """Under which name its messages are kept while it is loading, for this one copy."""
        return f"{self.table.oid}-{self.attempt}"


Learn = Callable[["Reading", TickTransaction, Following, Relation], bool]
"""Messages of a table have other columns; whether these could be learned."""


class Reading:
    """One tick's reading of the stream; a `Hearer`."""

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
        """By table, the last that the connection told, of tables not followed too."""

        self._learn = learn
        self.order = order
        """The place in the stream of the next message that is kept."""

        self.truncated_by: dict[int, set[int]] = {}
        """By table, the transactions that truncated it."""

        self.odd: dict[int, str] = {}
        """Tables whose messages are passed over, since they must be compared, and why."""

        self.broken: dict[int, DefiniteError] = {}
        """Tables of which a message could not be taken. It may be that something happened to
        them without a message; if not, they fail when all is read."""

    def relation(self, relation: Relation) -> None:
        """What messages about a table hold from here on; looked at when there is one."""
        self._relations[relation.oid] = relation

    def rows(self, chunk: Chunk, run: Run) -> None:
        """Changes of one table."""
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
                # SUBTLE: a TRUNCATE before the table is seen makes the value irrelevant.
                following.error, following.failure = str(error), error
            return
        if following.phase == Phase.LIVE:
            self._take(following, changes)
        else:
            kept = keep(changes, run.commit_lsns(chunk), order=self.order)
            self._tick.append_side_rows(following.pending, kept)
            self.order += len(changes)

    def truncated(self, truncate: Truncate, transaction: Seen) -> None:
        """Tables were emptied."""
        for oid in truncate.relations:
            self.truncated_by.setdefault(oid, set()).add(transaction.xid)
            following = self._tables.get(oid)
            if following is None or following.phase == Phase.ERRORED or oid in self.odd:
                continue
            if following.phase == Phase.LIVE:
                # Changes before it need not be resolved, nor need they be resolvable.
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
        """The table is to be compared: what the stream says of it until then is in that."""
        following.gathered, following.size = [], 0
        self.odd.setdefault(following.table.oid, reason)

    def compared(self, following: Following) -> None:
        """The table is equal again, and what the stream says after that counts."""
        self.odd.pop(following.table.oid, None)
        self.broken.pop(following.table.oid, None)

    def finish(self) -> None:
        """Resolve all that is gathered, and let fail what is broken."""
        for following in self._tables.values():
            self.flush(following)
        for oid, error in self.broken.items():
            self.fail(self._tables[oid], error)
        self.broken = {}

    def flush(self, following: Following) -> None:
        """Resolve what is gathered of one table."""
        if following.gathered:
            changes = joined(following.gathered)
            following.gathered, following.size = [], 0
            self._resolve(following, changes)

    def reveal(self, following: Following) -> None:
        """A loaded table is seen from this tick on, with what was kept aside."""
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
        """From this tick on the table's collection fails every reading, once it is seen."""
        following.gathered, following.size = [], 0
        if following.phase == Phase.ERRORED:
            return  # The first error stands.
        if following.seen:
            self._tick.fail(following.table.collection, error)
        following.phase, following.error, following.failure = Phase.ERRORED, str(error), error

    def _heeds(self, following: Following) -> bool:
        """Whether messages of a table count for anything."""
        oid = following.table.oid
        failed = following.phase == Phase.ERRORED or following.failure is not None
        return not failed and oid not in self.odd and oid not in self.broken

    def _understands(self, following: Following, relation: Relation) -> bool:
        """Be ready for messages as `relation` has them; whether that is possible."""
        if not reads(following.table, relation) and not self._learn(
            self, self._tick, following, relation
        ):
            self.pass_over(following, "its messages have other columns than before")
            return False
        following.told = relation
        table = following.table
        named = tuple(column.name for column in relation.columns if column.key)
        if relation.replica_identity in "di" and named and set(named) != set(table.key):
            # Messages before this one name old rows by the other key.
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
        """Bring changes into the tick, no more at a time than their old rows fit into memory."""

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
            # A few small rows do not make the next ones small: halved at most.
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
