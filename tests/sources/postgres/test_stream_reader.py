"""Chunks of the replication stream, decoded by table and acknowledged."""

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from penstock.errors import DefiniteError
from penstock.sources.postgres.catalog import PgColumn, PgTable, PgType
from penstock.sources.postgres.config import TableSpec
from penstock.sources.postgres.lsn import Lsn
from penstock.sources.postgres.names import TableName
from penstock.sources.postgres.pgoutput import Chunk, Decoder
from penstock.sources.postgres.stream_reader import Run, StreamReader, decode
from penstock.sources.postgres.table_schema import Table, build_table
from penstock.sources.postgres.table_set import TableSet
from penstock.sources.postgres.table_state import TableState
from penstock.sources.postgres.tick_reader import TickReader
from penstock.sources.postgres.tracked_table import TrackedTable
from tests.sources.postgres.pgoutput_bytes import (
    Value,
    begin,
    commit,
    delete,
    insert,
    keepalive,
    relation,
    update,
)

INT4, TEXT = PgType(23, "integer", "b", "N"), PgType(25, "text", "b", "S")
OID = 16400
UNCHANGED: Value = ("u", b"")
NULL: Value = ("n", b"")


def table(*, identity: str = "d", exclude: tuple[str, ...] = ()) -> Table:
    columns = (PgColumn("id", 1, INT4), PgColumn("title", 2, TEXT), PgColumn("body", 3, TEXT))
    described = PgTable(
        oid=OID, schema="public", name="posts", kind="r", persistence="p",
        replica_identity=identity, columns=columns, primary_key=("id",),
        identity=("id",) if identity == "d" else (), published=True, published_columns=None,
        streamed=("id", "title", "body"), row_filter=None, filter_columns=(), leaves=(),
        ancestors=(), pages=1, estimated_rows=1, bytes=1,
    )  # fmt: skip
    return build_table("shop", described, TableSpec(TableName("public", "posts"), exclude=exclude))


def chunk_of(*messages: bytes) -> Chunk:
    """Return one transaction of these messages."""
    return decoded(
        begin(100, 1, 7),
        relation(OID, "public", "posts", [("id", 23), ("title", 25), ("body", 25)]),
        *messages,
        commit(100, 110, 1),
    )


def decoded(*frames: bytes) -> Chunk:
    decoder = Decoder(1 << 16)
    data = b"".join(frames)
    decoder.space()[: len(data)] = data
    decoder.filled(len(data))
    assert decoder.scan() is None
    chunk = decoder.take()
    assert chunk is not None
    return chunk


def all_rows(chunk: Chunk) -> Run:
    return Run(OID, chunk.relation.nonzero()[0])


class Format:
    """Values of the columns of `posts`, as text or as binary."""

    def __init__(self, *, binary: bool) -> None:
        self._binary = binary

    def row(self, key: int, title: str | Value | None, body: str | Value | None) -> list[Value]:
        kind = "b" if self._binary else "t"
        number = key.to_bytes(4) if self._binary else str(key).encode()
        return [(kind, number), self._text(kind, title), self._text(kind, body)]

    def _text(self, kind: str, value: str | Value | None) -> Value:
        if isinstance(value, tuple):
            return value
        return NULL if value is None else (kind, value.encode())


@pytest.fixture(params=[False, True], ids=["text", "binary"])
def wire(request: pytest.FixtureRequest) -> Format:
    return Format(binary=request.param)


@pytest.mark.parametrize("identity", ["d", "f"])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_unchanged_toast_in_insert_is_rejected_with_table_and_column(
    wire: Format, identity: str, position: int
) -> None:
    rows = [wire.row(key, "title", "body") for key in range(3)]
    rows[position][2] = UNCHANGED
    chunk = chunk_of(*(insert(OID, row) for row in rows))
    with pytest.raises(DefiniteError, match=r'column "body" of table public\.posts') as caught:
        decode(chunk, all_rows(chunk), table(identity=identity), 3)
    assert "insert" in caught.value.detail
    assert "resync" in caught.value.hint


@pytest.mark.parametrize("deletes", [False, True], ids=["update", "delete"])
@pytest.mark.parametrize("old_kind", ["O", "K"])
def test_unchanged_toast_in_old_tuple_is_rejected_with_table_and_column(
    wire: Format, old_kind: str, *, deletes: bool
) -> None:
    old = wire.row(1, UNCHANGED, None)
    message = (
        delete(OID, old_kind, old)
        if deletes
        else update(OID, wire.row(2, "title", UNCHANGED), old_kind, old)
    )
    chunk = chunk_of(insert(OID, wire.row(0, "title", "body")), message)
    with pytest.raises(DefiniteError, match=r'column "title" of table public\.posts') as caught:
        decode(chunk, all_rows(chunk), table(identity="f" if old_kind == "O" else "d"), 3)
    assert "old" in caught.value.detail


def test_unchanged_toast_in_key_without_old_tuple_is_rejected(wire: Format) -> None:
    keyed = replace(table(), key=("title",))
    chunk = chunk_of(
        update(OID, wire.row(1, UNCHANGED, "body")), insert(OID, wire.row(2, "other", "body"))
    )
    with pytest.raises(DefiniteError, match=r'column "title" of table public\.posts'):
        decode(chunk, all_rows(chunk), keyed, 3)


def test_unchanged_toast_in_excluded_column_is_ignored(wire: Format) -> None:
    chunk = chunk_of(insert(OID, wire.row(1, "title", UNCHANGED)))
    changes = decode(chunk, all_rows(chunk), table(exclude=("body",)), 3)
    assert changes.new.to_pylist() == [{"id": 1, "title": "title"}]


class RecordedTick:
    """The changes of one tick, by collection."""

    def __init__(self) -> None:
        self.changed: list[str] = []
        self.pending: list[str] = []
        self.errors: dict[str, DefiniteError] = {}

    def change(self, collection: str, *, deletes: pa.Table, inserts: pa.Table) -> None:
        self.changed.append(collection)

    def append_side_rows(self, name: str, rows: pa.Table) -> None:
        self.pending.append(name)

    def fail(self, collection: str, error: DefiniteError) -> None:
        self.errors[collection] = error


class OneChunk:
    """A stream of one chunk, which records the confirmed positions."""

    def __init__(self, chunk: Chunk) -> None:
        self._chunks = [chunk]
        self.confirmed: list[Lsn] = []

    def read(self, timeout_s: float) -> Chunk | None:
        return self._chunks.pop() if self._chunks else None

    def confirm(self, flush: Lsn, *, reply: bool = False) -> None:
        self.confirmed.append(flush)


def table_set(*tables: TrackedTable) -> TableSet:
    """Return a table set without a server."""
    created = TableSet.__new__(TableSet)
    created.tables = {tracked.table.oid: tracked for tracked in tables}
    return created


def read_tick(chunk: Chunk, *tables: TrackedTable) -> RecordedTick:
    """Read all transactions of `chunk` in one tick."""
    tick: Any = RecordedTick()
    reader = TickReader(tick, table_set(*tables), relations={}, order=0)
    StreamReader(OneChunk(chunk), durable=0, last=None).read_up_to(chunk.wal_end, reader)
    reader.finish()
    recorded: RecordedTick = tick
    return recorded


@pytest.mark.parametrize("state", [TableState.LIVE, TableState.LOADING])
def test_unchanged_toast_in_insert_fails_its_table_only(wire: Format, state: TableState) -> None:
    other_oid = OID + 1
    other = replace(table(), oid=other_oid, name="public.other", collection="shop.public.other")
    chunk = chunk_of(
        relation(other_oid, "public", "other", [("id", 23), ("title", 25), ("body", 25)]),
        insert(other_oid, wire.row(1, "title", "body")),
        insert(OID, wire.row(1, "title", UNCHANGED)),
        insert(OID, wire.row(2, "title", "body")),
    )
    failed, sound = TrackedTable(table(), state), TrackedTable(other, state)
    tick = read_tick(chunk, failed, sound)
    assert 'column "body" of table public.posts' in str(failed.error)
    assert sound.state is state
    if state is TableState.LIVE:
        assert failed.state is TableState.ERRORED
        assert [*tick.errors] == ["shop.public.posts"]
        assert tick.changed == ["shop.public.other"]
    else:
        # The error counts when the snapshot is complete, unless a TRUNCATE precedes that.
        assert failed.state is TableState.LOADING_REJECTED
        assert tick.pending == [sound.pending]


@pytest.mark.parametrize("read_ahead", [False, True], ids=["idle", "with rows"])
def test_keepalive_that_requests_a_reply_confirms_nothing(read_ahead: bool, wire: Format) -> None:
    """Only a durable position may be confirmed (invariant 12), and reader makes none durable."""
    rows = [
        begin(100, 1, 7),
        relation(OID, "public", "posts", [("id", 23), ("title", 25), ("body", 25)]),
        insert(OID, wire.row(1, "title", "body")),
        commit(100, 110, 1),
    ]
    stream = OneChunk(decoded(*(rows if read_ahead else []), keepalive(200, reply=True)))
    tick: Any = RecordedTick()
    reader = TickReader(tick, table_set(), relations={}, order=0)
    StreamReader(stream, durable=50, last=None).read_up_to(200, reader)
    assert len(stream.confirmed) == 2, "a request for the position, and the reply"
    assert {*stream.confirmed} == {Lsn(0)}
