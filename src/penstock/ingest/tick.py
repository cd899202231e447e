"""One tick: all that it changes, and the one entry that makes it durable.

What a source draws is gathered here. Rows that grow large are written to files
as they come, under a staging id, so a transaction larger than memory passes
through; the entry only links them. Data, remap, the source's notes and all
uppers are in that one entry, so a restart finds all of them or none.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa

from penstock import persist
from penstock.data import DIFF, TIME, consolidate
from penstock.data.schema import default_row
from penstock.errors import DefiniteError, InternalError
from penstock.failpoints import Failpoint, hit
from penstock.ingest.loading import Copy, Loader
from penstock.persist import AppendTo, Collection, StoredError
from penstock.persist.append.task import all_of
from penstock.persist.collection_change import Also, Begin, Fail, Grow, Recover, Replace, WriteTo
from penstock.persist.state import Batch
from penstock.persist.state_store import Memory
from penstock.sources.source import Piece, Scan

__all__ = ["Tick"]

SPOOL_BYTES: Final = 16 << 20
"""Rows of one collection beyond this go to files before the tick ends."""

SPOOLS: Final = 2
"""So many of these may be on their way into files at once."""

Rows: TypeAlias = pa.Table | persist.Staged


@dataclass(slots=True)
class _Drawn:
    """What a tick does to one collection."""

    loose: list[pa.Table] = field(default_factory=list)
    """Rows with diffs, in memory."""

    files: "list[Future[persist.Staged]]" = field(default_factory=list)
    """Rows on their way into files."""

    begins: bool = False
    grows: list[Grow] = field(default_factory=list)
    fails: Fail | None = None
    recovers: Recover | None = None
    copy: Copy | None = None

    size: int = 0
    """Bytes of the rows in memory."""


class Tick:
    """A tick that is being drawn."""

    def __init__(
        self,
        client: persist.Client,
        source: str,
        memory: Memory,
        time: int,
        loader: Loader,
        pool: ThreadPoolExecutor,
    ) -> None:
        """Files are written by `pool`, while the source goes on."""
        self.time = time
        self._loader = loader
        self._pool = pool
        self._writing: deque[Future[persist.Staged]] = deque()
        self._client = client
        self._source = source
        self._memory = memory
        self._drawn: dict[str, _Drawn] = {}
        self._replacements: dict[str, Collection] = {}
        """By name, the new collections that names refer to from this tick on."""

        self._notes: dict[str, Any] = {}
        self._aside: dict[str, _Drawn] = {}
        self._thrown: list[str] = []
        self._staging = ExitStack()
        self._staging_id: str | None = None
        self.rows = 0
        self.bytes = 0
        self.mended = 0
        """Rows that had to go or come where tables were compared."""

        self.failures: dict[str, DefiniteError] = {}
        """By collection, why it fails from this tick on."""

    def change(self, collection: str, *, gone: pa.Table, come: pa.Table) -> None:
        """Rows that go and rows that come."""
        for rows, diff in ((gone, -1), (come, +1)):
            if rows.num_rows:
                self._put(collection, _with_diff(rows, diff))

    def begin(self, collection: str) -> None:
        """From this time on the collection is seen, with all that was put into it."""
        self._of(collection).begins = True

    def keep_copy(self, collection: str, copy: Copy) -> None:
        """Keep the files of a finished first copy, not seen before `begin`."""
        self._of(collection).copy = copy
        self.rows += copy.rows()

    def grow(self, collection: str, schema: pa.Schema, defaults: Mapping[str, Any]) -> None:
        """From this time on rows have more columns; older ones hold `defaults` in them."""
        drawn = self._of(collection)
        drawn.grows.append(Grow(self._named(collection), schema, defaults))
        drawn.loose = [self._conformed(collection, rows) for rows in drawn.loose]

    def fail(self, collection: str, error: DefiniteError) -> None:
        """From this time on every reading fails with `error`; what it drew is dropped."""
        self.failures[collection] = error
        drawn = self._of(collection)
        drawn.loose, drawn.files, drawn.size = [], [], 0
        if drawn.recovers is not None:
            # It was in error until now and stays so: the first error stands.
            drawn.recovers = None
            return
        stored = StoredError(type(error).__name__, str(error), error.detail, error.hint)
        drawn.fails = Fail(self._named(collection), self.time, stored)

    def recover(self, collection: str) -> None:
        """From this time on it can be read again."""
        self._of(collection).recovers = Recover(self._named(collection), self.time)

    def lookup(self, collection: str, keys: pa.Table) -> pa.Table:
        """The rows with these keys, as of this moment of the tick."""
        drawn = self._of(collection)
        stored = self._named(collection).written(keys, self._files(drawn), drawn.grows)
        found = [stored, *(_matching(rows, keys) for rows in drawn.loose)]
        return _counted(found).drop_columns([DIFF])

    def empty(self, collection: str) -> None:
        """All rows go."""
        self._mend(collection, None)

    @contextmanager
    def compare(
        self, collection: str, pieces: Sequence[Piece], *, size: int
    ) -> Iterator[Callable[[], int]]:
        """Read all pieces; whoever calls what is handed out makes the contents equal to them."""
        grows = self._of(collection).grows
        copy = self._loader.read_again(collection, pieces, size=size, growing=grows)
        try:
            wanted = copy.files

            def mend() -> int:
                differing = self._mend(collection, wanted)
                self.mended += differing
                return differing

            yield mend
        finally:
            copy.let_go()

    @contextmanager
    def replace(
        self,
        collection: str,
        schema: pa.Schema,
        key: Sequence[str],
        pieces: Sequence[Piece],
        *,
        size: int,
    ) -> Iterator[Callable[[], int]]:
        """Read all pieces into a new collection, which the yielded function puts in place."""
        # A name that the next start destroys unless the entry of this tick has moved it.
        hidden = self._aside_name(f"new/{collection}")
        self._replacements.pop(collection, None)
        self._client.destroy(hidden)
        new = self._client.create_or_load(
            hidden, schema=schema, key_columns=key, owner=self._source
        )
        hit(Failpoint.REPLACEMENT_CREATED)
        copy = self._loader.read_again(hidden, pieces, size=size, growing=())
        self._staging.callback(copy.let_go)
        copy.result()
        hit(Failpoint.REPLACEMENT_READ)

        def move() -> int:
            self._replacements[collection] = new
            self._drawn[collection] = _Drawn(begins=True, copy=copy)
            self.rows += copy.rows()
            self.mended += copy.rows()
            return copy.rows()

        yield move

    def _mend(self, collection: str, wanted: persist.Staged | None) -> int:
        """Let the contents be those of `wanted`; how many rows have to go or come."""
        drawn = self._of(collection)
        self._spool(self._named(collection), drawn)
        found = self._client.difference(
            self._named(collection),
            wanted,
            self._staged_under(),
            time=self.time,
            staged=self._files(drawn),
            growing=drawn.grows,
        )
        if isinstance(found, persist.Staged):
            return 0 if found.batch is None else self._link(collection, found.batch)
        self._put(collection, found.drop_columns([TIME]))
        return int(found.num_rows)

    def scan(self, scan: Scan) -> list[Any]:
        """Read a range by Spark's tasks, each straight into files; what each of them told."""
        kept = {
            output: self._kept(each.name, each.schema).name for output, each in scan.aside.items()
        }
        scanned = self._loader.scan(
            scan, {**scan.into, **kept}, self._staged_under(), time=self.time
        )

        def written(output: str) -> Batch | None:
            return all_of(each.batch(output) for each in scanned)

        for output, collection in scan.into.items():
            if (batch := written(output)) is not None:
                self._link(collection, batch)
        for output, each in scan.aside.items():
            if (batch := written(output)) is not None:
                aside = self._aside.setdefault(each.name, _Drawn())
                aside.files.append(_done(batch))
        return [each.told for each in scanned]

    def put_aside(self, name: str, rows: pa.Table) -> None:
        """Keep rows that are not to be seen, under a name of the source's own."""
        aside = self._aside.setdefault(name, _Drawn())
        aside.loose.append(rows)
        aside.size += rows.nbytes
        if aside.size > SPOOL_BYTES:
            self._spool(self._kept(name, rows.schema), aside)

    def set_aside(self, name: str) -> Iterator[pa.Table]:
        """What was put aside under that name, this tick's too, in the order of that."""
        aside = self._aside.get(name, _Drawn())
        if self._aside_name(name) in self._client.collections(hidden=True):
            kept = self._client.collection(self._aside_name(name))
            for part in kept.parts(self._files(aside)):
                yield part.drop_columns([TIME, DIFF])
        yield from aside.loose

    def take_back(self, name: str) -> None:
        """Put nothing aside under that name in this tick after all; what was there stays."""
        self._aside.pop(name, None)

    def throw_away(self, name: str) -> None:
        """Forget what was put aside under that name, once the tick is durable."""
        self._aside.pop(name, None)
        self._thrown.append(name)

    def keep_aside(self, names: Set[str]) -> None:
        """Forget what was put aside before this tick under other names, once it is durable."""
        for each in self._client.collections(hidden=True):
            name = each.removeprefix(self._aside_name(""))
            if name != each and name not in names:
                self.throw_away(name)

    def remember(self, name: str, value: Any) -> None:
        """Write down a plain JSON value for the next start; None forgets it."""
        # A copy: whoever remembers it may go on with it before this is durable.
        self._notes[name] = copy.deepcopy(value)

    def commit(self, visible: Sequence[str], remap: AppendTo | None) -> None:
        """Make all of it durable, in one entry; without `remap` nothing of it is seen yet."""
        appends = [] if remap is None else [remap]
        also: list[Also] = []
        seen = [] if remap is None else sorted({*visible, *self._begun()})
        for name in seen:
            collection = self._named(name)
            drawn = self._of(name)
            rows = self._rows_of(drawn, self.time)
            appends.append(AppendTo(collection, rows, collection.upper, self.time + 1))
        for name, drawn in self._drawn.items():
            collection = self._named(name)
            if drawn.copy is not None:
                also.append(WriteTo(collection, drawn.copy.files))
            if drawn.begins:
                also.append(Begin(collection, self.time))
            if name in self._replacements:
                also.append(Replace(self._client.collection(name), collection, self.time))
            also += [each for each in (*drawn.grows, drawn.fails, drawn.recovers) if each]
        appends += self._asides()
        memory = self._memory
        with memory.lock:
            noted = max(self.time, memory.upper)
            updates = memory.updates(self._notes, noted)
            appends.append(AppendTo(memory.collection, updates, memory.upper, noted + 1))
            hit(Failpoint.TICK_BEGIN)
            outcome = self._client.append_all(appends, also=also)
            hit(Failpoint.TICK_DONE)
            if not isinstance(outcome, persist.Appended):
                raise InternalError(
                    f'collection "{outcome.collection}" was written by another process',
                    hint="Only the writer of its storage location may write there; stop the other.",
                )
            memory.learn(self._notes, noted + 1)
        for drawn in self._drawn.values():
            if drawn.copy is not None:
                drawn.copy.let_go()
        if self._thrown:
            self._client.destroy(*map(self._aside_name, self._thrown))
        self.let_go()

    def let_go(self) -> None:
        """Nothing more will be written for this tick."""
        for writing in self._writing:
            writing.exception()
        self._staging.close()

    def _link(self, collection: str, batch: Batch) -> int:
        """Rows that are in files; how many there are."""
        self._of(collection).files.append(_done(batch))
        self.rows += batch.rows
        self.bytes += batch.size
        return batch.rows

    def _put(self, collection: str, rows: pa.Table) -> None:
        if not rows.num_rows:
            return
        drawn = self._of(collection)
        rows = self._conformed(collection, rows)
        size = rows.nbytes
        drawn.loose.append(rows)
        drawn.size += size
        self.rows += rows.num_rows
        self.bytes += size
        if drawn.size > SPOOL_BYTES:
            self._spool(self._named(collection), drawn)

    def _spool(self, collection: Collection, drawn: _Drawn) -> None:
        """Write what is in memory to files, to be linked by the entry."""
        if not drawn.loose:
            return
        while len(self._writing) >= SPOOLS:
            # Memory is bounded by what waits to be written.
            self._writing.popleft().result()
        writing = self._pool.submit(
            self._client.stage,
            collection,
            drawn.loose,
            self._staged_under(),
            time=max(self.time, collection.upper),
            growing=tuple(drawn.grows),
        )
        self._writing.append(writing)
        drawn.files.append(writing)
        drawn.loose, drawn.size = [], 0

    def _staged_under(self) -> str:
        """The id under which this tick's files are written."""
        if self._staging_id is None:
            self._staging_id = self._staging.enter_context(self._client.staging())
        return self._staging_id

    def _rows_of(self, drawn: _Drawn, time: int) -> list[Rows]:
        rows: list[Rows] = [writing.result() for writing in drawn.files]
        if drawn.loose:
            loose = pa.concat_tables(drawn.loose)
            times = pa.repeat(pa.scalar(time, pa.int64()), loose.num_rows)
            rows.append(loose.append_column(pa.field(TIME, pa.int64(), False), times))
        return rows

    def _asides(self) -> list[AppendTo]:
        appends = []
        for name, aside in self._aside.items():
            if aside.files:
                # All of it as files, since they are read again in the order of linking.
                self._spool(self._kept(name, None), aside)
            kept = self._kept(name, aside.loose[0].schema if aside.loose else None)
            time = max(self.time, kept.upper)
            appends.append(AppendTo(kept, self._rows_of(aside, time), kept.upper, time + 1))
        return appends

    def _kept(self, name: str, schema: pa.Schema | None) -> Collection:
        """What holds rows that were put aside; with a schema it is made if it is not there."""
        if schema is None:
            return self._client.collection(self._aside_name(name))
        return self._client.create_or_load(
            self._aside_name(name), schema=schema, owner=self._source
        )

    def _aside_name(self, name: str) -> str:
        return f"{self._source}/pending/{name}"

    def _begun(self) -> list[str]:
        return [name for name, drawn in self._drawn.items() if drawn.begins]

    def _of(self, collection: str) -> _Drawn:
        return self._drawn.setdefault(collection, _Drawn())

    def _named(self, collection: str) -> Collection:
        return self._replacements.get(collection) or self._client.collection(collection)

    def _files(self, drawn: _Drawn) -> list[persist.Staged]:
        """The files that the tick is about to link."""
        files = [writing.result() for writing in drawn.files]
        return files if drawn.copy is None else [drawn.copy.files, *files]

    def _conformed(self, collection: str, rows: pa.Table) -> pa.Table:
        """Rows, the last column of which is the diff, with the columns of this tick."""
        grows = self._of(collection).grows
        if not grows:
            return rows
        known = set(rows.column_names)
        schema = grows[-1].schema
        given = {name: value for each in grows for name, value in each.defaults.items()}
        defaults = default_row(schema, given)
        for at, each in enumerate(schema):
            if each.name not in known:
                value = (
                    defaults.column(each.name)[0]
                    if each.name in given
                    else pa.scalar(None, each.type)
                )
                rows = rows.add_column(at, each, pa.repeat(value, rows.num_rows))
            elif rows.schema.field(each.name).type != each.type:
                widened = rows.column(each.name).cast(each.type)
                rows = rows.set_column(at, each, widened)
        return rows


def _done(batch: Batch) -> Future[persist.Staged]:
    """Rows that are in files already."""
    linked: Future[persist.Staged] = Future()
    linked.set_result(persist.Staged(batch))
    return linked


def _with_diff(rows: pa.Table, diff: int) -> pa.Table:
    diffs = pa.repeat(pa.scalar(diff, pa.int64()), rows.num_rows)
    return rows.append_column(pa.field(DIFF, pa.int64(), False), diffs)


def _counted(tables: Sequence[pa.Table]) -> pa.Table:
    """All rows added up, without those that come to nothing; the diff stays the last column."""
    rows = pa.concat_tables(tables)
    zeros = pa.repeat(pa.scalar(0, pa.int64()), rows.num_rows)
    timed = rows.add_column(rows.num_columns - 1, pa.field(TIME, pa.int64(), False), zeros)
    return consolidate(timed).drop_columns([TIME])


def _matching(rows: pa.Table, keys: pa.Table) -> pa.Table:
    """Those of `rows` whose key is among `keys`."""
    if rows.num_rows == 0 or keys.num_rows == 0:
        return rows.slice(0, 0)
    numbered = rows.select(keys.column_names).append_column(
        "row", pa.array(np.arange(rows.num_rows))
    )
    found = numbered.join(keys, keys=keys.column_names, join_type="left semi")
    return rows.take(found.column("row"))
