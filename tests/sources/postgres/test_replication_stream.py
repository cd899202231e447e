import threading
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import psycopg
import pytest

from penstock.errors import DefiniteError, SourceError, TransientError, UsageError
from penstock.pgclient import connect
from penstock.servers.postgres import Database, PostgresServer
from penstock.sources.postgres.lsn import Lsn
from penstock.sources.postgres.pgoutput import (
    Chunk,
    LogicalMessage,
    Relation,
    Truncate,
    TypeName,
    gather,
)
from penstock.sources.postgres.replication_stream import CopyStream, ReplicationStream
from tests.fix_postgres import TlsServer

Where = str | Mapping[str, str]
NOTHING = Lsn(0)
M = TypeVar("M", Relation, Truncate, TypeName)


class Tap:
    """A database with a publication of all tables and a slot, and its stream."""

    def __init__(self, database: Database, where: Where, **options: Any) -> None:
        self.database, self.where, self.options = database, where, options
        database.sql("CREATE PUBLICATION p FOR ALL TABLES")
        self.slot = f"slot_{database.name}"
        database.sql("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [self.slot])

    def open(self, start: Lsn = NOTHING, **options: Any) -> ReplicationStream:
        """A stream. The slot is free only when the server has noticed that the last one ended."""
        while True:
            connection = connect(self.where, replication=True)
            try:
                return ReplicationStream(
                    connection,
                    slot=self.slot,
                    start=start,
                    **{"publications": ["p"], **self.options, **options},
                )
            except TransientError as error:
                connection.close()
                if error.sqlstate != "55006":
                    raise

    def now(self) -> int:
        """Where the log ends."""
        ((lsn,),) = self.database.sql("SELECT pg_current_wal_lsn()::text")
        return Lsn.parse(lsn).position

    def confirmed(self) -> Lsn:
        ((lsn,),) = self.database.sql(
            "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s",
            [self.slot],
        )
        return Lsn.parse(lsn)


@pytest.fixture(params=["socket", "tcp", "tls"])
def tap(request: pytest.FixtureRequest) -> Iterator[Tap]:
    if request.param == "tls":
        tls: TlsServer = request.getfixturevalue("tls_server")
        database = tls.server.create_database("streamed")
        yield Tap(database, tls.parameters(dbname="streamed"))
        database.drop()
    else:
        database = request.getfixturevalue("database")
        yield Tap(database, database.url(host=request.param))


@pytest.fixture
def quick_tap(database: Database) -> Tap:
    return Tap(database, database.url())


def until(stream: ReplicationStream, position: int) -> list[Chunk]:
    """Chunks, until the stream has passed `position`."""
    chunks: list[Chunk] = []
    while not chunks or chunks[-1].wal_end < position:
        if (chunk := stream.read(timeout_s=0.5)) is not None:
            chunks.append(chunk)
        if chunks and chunks[-1].wal_end < position:
            stream.confirm(NOTHING, reply=True)
    return chunks


def read_until_error(
    stream: ReplicationStream, *, answer: bool = False
) -> tuple[list[Chunk], SourceError]:
    """Return the chunks before the error of the stream, and the error."""
    chunks: list[Chunk] = []
    failed: SourceError | None = None
    while failed is None:
        try:
            chunk = stream.read(timeout_s=0.5)
            if chunk is not None:
                chunks.append(chunk)
                if answer and chunk.reply_requested:
                    stream.confirm(Lsn(chunk.wal_end))
        except SourceError as error:
            failed = error
    with pytest.raises(type(failed)):
        stream.read(timeout_s=0)
    return chunks, failed


def changes(chunks: list[Chunk]) -> list[tuple[str, str, str, list[object], list[object]]]:
    """Rows as (table, kind, kind of old tuple, old, new); `...` stands for unchanged."""
    tables: dict[int, Relation] = {}
    rows = []
    for chunk in chunks:
        marks = iter([*chunk.marks, (chunk.row_count + 1, None)])
        place, mark = next(marks)
        for row in range(chunk.row_count):
            while place <= row:
                if isinstance(mark, Relation):
                    tables[mark.oid] = mark
                place, mark = next(marks)
            table = tables[int(chunk.relation[row])]
            old, new = (
                [
                    ... if column.unchanged[0] else column.values[0].as_py()
                    for column in gather(chunk, at[row : row + 1], len(table.columns))
                ]
                if at[row] >= 0
                else []
                for at in (chunk.old_at, chunk.new_at)
            )
            old_kind = chr(chunk.old_kind[row]) if chunk.old_kind[row] else ""
            rows.append((table.name, chr(chunk.kind[row]), old_kind, old, new))
        for _, mark in chunk.marks:
            if isinstance(mark, Relation):
                tables[mark.oid] = mark
    return rows


def marks(chunks: list[Chunk], kind: type[M]) -> list[M]:
    return [mark for chunk in chunks for _, mark in chunk.marks if isinstance(mark, kind)]


def test_stream_returns_every_kind_of_change_for_key_and_full_identity(tap: Tap) -> None:
    sql = tap.database.sql
    sql("CREATE TYPE mood AS ENUM ('sad', 'ok')")
    sql("CREATE TABLE keyed (id int PRIMARY KEY, v text, m mood)")
    sql("CREATE TABLE whole (id int, v text)")
    sql("ALTER TABLE whole REPLICA IDENTITY FULL")
    with tap.open() as stream:
        sql(
            "INSERT INTO keyed VALUES (1, 'a', 'ok'), (2, NULL, NULL); INSERT INTO whole VALUES (7)"
        )
        sql("UPDATE keyed SET v = '' WHERE id = 1; UPDATE keyed SET id = 3 WHERE id = 2")
        sql("UPDATE whole SET v = 'é'; DELETE FROM whole; DELETE FROM keyed WHERE id = 3")
        sql("TRUNCATE keyed, whole RESTART IDENTITY")
        chunks = until(stream, tap.now())
    assert changes(chunks) == [
        ("keyed", "I", "", [], [b"1", b"a", b"ok"]),
        ("keyed", "I", "", [], [b"2", None, None]),
        ("whole", "I", "", [], [b"7", None]),
        ("keyed", "U", "", [], [b"1", b"", b"ok"]),
        ("keyed", "U", "K", [b"2", None, None], [b"3", None, None]),
        ("whole", "U", "O", [b"7", None], [b"7", "é".encode()]),
        ("whole", "D", "O", [b"7", "é".encode()], []),
        ("keyed", "D", "K", [b"3", None, None], []),
    ]
    truncates = marks(chunks, Truncate)
    oids = {mark.name: mark.oid for mark in marks(chunks, Relation)}
    assert truncates == [Truncate((oids["keyed"], oids["whole"]), False, True)]
    assert next(mark.name for mark in marks(chunks, TypeName)) == "mood"
    keyed = next(mark for mark in marks(chunks, Relation) if mark.name == "keyed")
    assert (keyed.namespace, keyed.replica_identity) == ("public", "d")
    assert [column.key for column in keyed.columns] == [True, False, False]
    commit_lsns = {
        int(chunk.commit_lsn[transaction])
        for chunk in chunks
        for transaction in (*chunk.transaction, *chunk.mark_transaction)
        if transaction >= 0
    }
    assert len(commit_lsns) == 4


@pytest.mark.parametrize("binary", [False, pytest.param(True, marks=pytest.mark.postgres(14))])
def test_stream_omits_unchanged_toast_value(quick_tap: Tap, binary: bool) -> None:
    sql = quick_tap.database.sql
    for name in ("keyed", "whole"):
        sql(f"CREATE TABLE {name} (id int PRIMARY KEY, n int, big text)")
        sql(f"ALTER TABLE {name} ALTER big SET STORAGE EXTERNAL")
    sql("ALTER TABLE whole REPLICA IDENTITY FULL")
    with quick_tap.open(binary=binary) as stream:
        for name in ("keyed", "whole"):
            sql(f"INSERT INTO {name} VALUES (1, 2, repeat('x', 5000))")
            sql(f"UPDATE {name} SET n = 3")
        chunks = until(stream, quick_tap.now())
    one, two, three = (
        number.to_bytes(4) if binary else str(number).encode() for number in (1, 2, 3)
    )
    big = b"x" * 5000
    assert changes(chunks) == [
        ("keyed", "I", "", [], [one, two, big]),
        ("keyed", "U", "", [], [one, three, ...]),
        ("whole", "I", "", [], [one, two, big]),
        ("whole", "U", "O", [one, two, big], [one, three, ...]),
    ]
    (chunk,) = [chunk for chunk in chunks if chunk.row_count][:1]
    assert all(column.binary is binary for column in gather(chunk, chunk.new_at[:1], 3))


def test_stream_of_many_small_transactions_is_complete(tap: Tap) -> None:
    tap.database.sql("CREATE TABLE t (id int PRIMARY KEY)")
    with tap.open() as stream:
        tap.database.sql(
            "DO $$ BEGIN FOR i IN 0..4999 LOOP INSERT INTO t VALUES (i); COMMIT; END LOOP; END $$"
        )
        chunks = until(stream, tap.now())
    values = [
        value.as_py() for chunk in chunks for value in gather(chunk, chunk.new_at, 1)[0].values
    ]
    assert values == [str(number).encode() for number in range(5_000)]
    commits = np.concatenate([chunk.commit_lsn[chunk.transaction] for chunk in chunks])
    assert len(commits) == 5_000
    assert (np.diff(commits) > 0).all()


def test_stream_of_transaction_larger_than_a_chunk_is_complete(tap: Tap) -> None:
    tap.database.sql("CREATE TABLE t (id int PRIMARY KEY, v text)")
    with tap.open(capacity=1 << 16) as stream:
        tap.database.sql(
            "INSERT INTO t SELECT g, repeat('v', g % 300) FROM generate_series(1, 20000) g"
        )
        chunks = [chunk for chunk in until(stream, tap.now()) if chunk.row_count]
    assert len(chunks) > 20
    assert {chunk.commit_lsn.tolist()[0] for chunk in chunks} == {chunks[0].commit_lsn[0]}
    assert sum(chunk.row_count for chunk in chunks) == 20_000
    ids = [value for chunk in chunks for value in gather(chunk, chunk.new_at, 2)[0].values]
    assert [int(value.as_py()) for value in ids] == list(range(1, 20_001))


def test_stream_returns_row_larger_than_the_buffer(tap: Tap) -> None:
    tap.database.sql("CREATE TABLE t (v text)")
    with tap.open(capacity=1 << 16) as stream:
        tap.database.sql("INSERT INTO t SELECT repeat('v', 3000000); INSERT INTO t VALUES ('w')")
        assert [row[4] for row in changes(until(stream, tap.now()))] == [
            [b"v" * 3_000_000],
            [b"w"],
        ]


@pytest.mark.postgres(14)
def test_stream_with_messages_returns_logical_messages(quick_tap: Tap) -> None:
    with quick_tap.open(messages=True) as stream:
        quick_tap.database.sql("SELECT pg_logical_emit_message(false, 'ours', 'out')")
        quick_tap.database.sql("SELECT pg_logical_emit_message(true, 'ours', 'in')")
        chunks = until(stream, quick_tap.now())
    messages = {
        (mark.prefix, mark.content, mark.transactional, bool(transaction >= 0))
        for chunk in chunks
        for (_, mark), transaction in zip(chunk.marks, chunk.mark_transaction, strict=True)
        if isinstance(mark, LogicalMessage)
    }
    assert messages == {("ours", b"in", True, True), ("ours", b"out", False, False)}


def test_stream_starts_with_transaction_that_commits_at_start_lsn(quick_tap: Tap) -> None:
    quick_tap.database.sql("CREATE TABLE t (id int)")
    for number in range(3):
        quick_tap.database.sql("INSERT INTO t VALUES (%s)", [number])
    with quick_tap.open() as stream:
        chunks = until(stream, quick_tap.now())
    # Before version 15 there are empty ones between those with rows.
    commits = np.concatenate([chunk.commit_lsn[chunk.transaction] for chunk in chunks])
    ends = np.concatenate([chunk.end_lsn[chunk.transaction] for chunk in chunks])
    for start, seen in ((int(commits[1]), [b"1", b"2"]), (int(ends[1]), [b"2"])):
        with quick_tap.open(Lsn(start)) as stream:
            assert [row[4][0] for row in changes(until(stream, quick_tap.now()))] == seen


def test_changes_confirmed_from_another_thread_are_not_sent_again(tap: Tap) -> None:
    tap.database.sql("CREATE TABLE t (id int)")
    with tap.open() as stream:
        ended = threading.Event()

        def confirm_often() -> None:
            while not ended.is_set():
                stream.confirm(NOTHING)

        timer = threading.Thread(target=confirm_often)
        timer.start()
        try:
            tap.database.sql("INSERT INTO t SELECT generate_series(1, 20000)")
            end = tap.now()
            assert sum(chunk.row_count for chunk in until(stream, end)) == 20_000
        finally:
            ended.set()
            timer.join()
        assert tap.confirmed() < Lsn(end)
        stream.confirm(Lsn(end))
        stream.confirm(Lsn(5), reply=True)
        assert stream.confirmed == Lsn(end)
        until(stream, end)
        assert tap.confirmed() == Lsn(end)
    with tap.open() as stream:
        stream.confirm(NOTHING, reply=True)
        assert changes(until(stream, end)) == []


def test_stream_read_confirms_nothing(quick_tap: Tap) -> None:
    quick_tap.database.sql("CREATE TABLE t (id int)")
    before = quick_tap.confirmed()
    with quick_tap.open() as stream:
        quick_tap.database.sql("INSERT INTO t VALUES (1)")
        until(stream, quick_tap.now())
        stream.confirm(NOTHING, reply=True)
        assert stream.read(timeout_s=5) is not None
    assert quick_tap.confirmed() == before


def test_stream_without_feedback_is_closed_after_reply_request(
    database: Database,
) -> None:
    tap = Tap(database, database.url(options="-c wal_sender_timeout=1s"))
    with tap.open() as stream:
        asked = 0
        while asked < 3:
            chunk = stream.read(timeout_s=5)
            assert chunk is not None
            if chunk.reply_requested:
                asked += 1
                stream.confirm(NOTHING)
        chunks, error = read_until_error(stream)
    assert chunks[-1].reply_requested
    assert isinstance(error, TransientError)
    assert "wal_sender_timeout" in error.hint


def test_stream_of_terminated_backend_returns_received_data_before_error(tap: Tap) -> None:
    tap.database.sql("CREATE TABLE t (id int)")
    with tap.open() as stream:
        tap.database.sql("INSERT INTO t VALUES (1)")
        chunks = until(stream, tap.now())
        tap.database.sql("INSERT INTO t VALUES (2)")
        tap.database.sql(
            "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots "
            "WHERE slot_name = %s",
            [tap.slot],
        )
        more, error = read_until_error(stream)
        with pytest.raises(SourceError):
            stream.read(timeout_s=1)
    assert isinstance(error, TransientError)
    assert error.sqlstate == "57P01"
    assert [row[4] for row in changes(chunks + more)][:1] == [[b"1"]]
    with tap.open() as stream:
        rows = changes(until(stream, tap.now()))
    assert [row[4] for row in rows] == [[b"1"], [b"2"]]


@pytest.mark.parametrize("end", ["kill", "fast"])
def test_stream_of_stopped_server_raises_transient_error_and_resumes(
    end: str,
) -> None:
    with PostgresServer(settings={"fsync": "off"}) as server:
        tap = Tap(server.create_database("shop"), server.url(database="shop"))
        tap.database.sql("CREATE TABLE t (id int)")
        with tap.open() as stream:
            tap.database.sql("INSERT INTO t VALUES (1)")
            chunks = until(stream, tap.now())
            if end == "kill":
                server.kill()
                _, error = read_until_error(stream)
            else:
                stopping = threading.Thread(target=server.stop)
                stopping.start()
                # A server that stops waits until all is confirmed.
                _, error = read_until_error(stream, answer=True)
                stopping.join()
            assert isinstance(error, TransientError)
            with pytest.raises(TransientError):
                stream.confirm(NOTHING)
        with pytest.raises(TransientError, match="could not connect"):
            tap.open()
        server.start()
        tap.database.sql("INSERT INTO t VALUES (2)")
        with tap.open(Lsn(chunks[-1].wal_end)) as stream:
            assert [row[4] for row in changes(until(stream, tap.now()))] == [[b"2"]]


def test_stream_of_missing_slot_raises_error_with_sqlstate(tap: Tap) -> None:
    connection = connect(tap.where, replication=True)
    with pytest.raises(DefiniteError, match='"no such"') as raised:
        ReplicationStream(connection, slot="no such", start=NOTHING, publications=["p"])
    assert raised.value.sqlstate == "42704"
    assert connection.query("SELECT 1") == [("1",)]
    connection.close()


def test_stream_of_slot_in_use_raises_transient_error(tap: Tap) -> None:
    with tap.open(), connect(tap.where, replication=True) as second:
        with pytest.raises(TransientError, match="active") as raised:
            ReplicationStream(second, slot=tap.slot, start=NOTHING, publications=["p"])
        assert raised.value.sqlstate == "55006"


def test_stream_of_missing_publication_fails_at_first_change(tap: Tap) -> None:
    tap.database.sql("CREATE TABLE t (id int)")
    with tap.open(publications=["no such"]) as stream:
        tap.database.sql("INSERT INTO t VALUES (1)")
        _, error = read_until_error(stream)
    assert isinstance(error, DefiniteError)
    assert error.sqlstate == "42704"
    assert '"no such"' in str(error)


def test_stream_quotes_slot_and_publication_names(quick_tap: Tap) -> None:
    names = ["Mine, too", 'with "quotes"', "it's"]
    for name in names:
        quoted = name.replace('"', '""')
        quick_tap.database.sql(f'CREATE TABLE "{quoted}" (id int)')
        quick_tap.database.sql(f'CREATE PUBLICATION "{quoted}" FOR TABLE "{quoted}"')
    with quick_tap.open(publications=names) as stream:
        for name in names:
            quoted = name.replace('"', '""')
            quick_tap.database.sql(f'INSERT INTO "{quoted}" VALUES (1)')
        assert [row[0] for row in changes(until(stream, quick_tap.now()))] == names


def test_stream_read_returns_after_timeout(quick_tap: Tap) -> None:
    with quick_tap.open() as stream:
        until(stream, quick_tap.now())
        while stream.read(timeout_s=0.01) is not None:
            pass


def test_connection_in_use_by_stream_rejects_query(tap: Tap) -> None:
    with connect(tap.where, replication=True) as connection:
        stream = ReplicationStream(connection, slot=tap.slot, start=NOTHING, publications=["p"])
        with pytest.raises(UsageError, match="is in use"):
            connection.query("SELECT 1")
        stream.close()
        stream.close()
        assert connection.closed
    with (
        connect(tap.where) as ordinary,
        pytest.raises(UsageError, match="not a replication connection"),
    ):
        ReplicationStream(ordinary, slot=tap.slot, start=NOTHING, publications=["p"])


def test_stream_of_version_18_returns_changes(database18: Database) -> None:
    tap = Tap(database18, database18.url())
    database18.sql("CREATE TABLE t (id int)")
    with tap.open(binary=True) as stream:
        database18.sql("INSERT INTO t VALUES (258)")
        assert [row[4] for row in changes(until(stream, tap.now()))] == [[b"\0\0\1\2"]]


def test_copy_stream_returns_output_of_server(tap: Tap) -> None:
    sql = tap.database.sql
    sql("CREATE TABLE t (id int, v text)")
    sql("INSERT INTO t SELECT g, repeat('v', g % 1000) FROM generate_series(1, 3000) g")
    sql("INSERT INTO t VALUES (0, repeat('w', 300000))")
    command = "COPY public.t TO STDOUT (FORMAT binary)"
    with psycopg.connect(tap.database.url()) as other:
        cursor = other.cursor()
        with cursor.copy(command.encode()) as copy:
            expected = b"".join(map(bytes, copy))
    with connect(tap.where) as connection:
        for capacity in (1 << 16, 1 << 22):
            with CopyStream(connection, command, capacity=capacity) as stream:
                data_parts = list(stream)
                assert stream.read() is None
            assert b"".join(data_part.tobytes() for data_part in data_parts) == expected
            assert (len(data_parts) > 10) == (capacity == 1 << 16)
            assert connection.query("SELECT 1") == [("1",)]
        connection.execute("BEGIN")
        assert [*CopyStream(connection, "COPY (SELECT 1 WHERE false) TO STDOUT")] == []
        connection.execute("COMMIT")


def test_copy_stream_error_has_reason_and_keeps_connection_usable(tap: Tap) -> None:
    with connect(tap.where) as connection:
        with pytest.raises(DefiniteError, match="nix") as raised:
            CopyStream(connection, "COPY nix TO STDOUT")
        assert raised.value.sqlstate == "42P01"
        with pytest.raises(UsageError, match="does not start a COPY"):
            CopyStream(connection, "SELECT 1")
        stream = CopyStream(
            connection, "COPY (SELECT 1 / (5000 - g) FROM generate_series(1, 9000) g) TO STDOUT"
        )
        with pytest.raises(DefiniteError) as raised:
            list(stream)
        assert raised.value.sqlstate == "22012"
        stream.close()
        assert connection.query("SELECT 1") == [("1",)]


def test_copy_stream_closed_early_closes_connection(tap: Tap) -> None:
    connection = connect(tap.where)
    command = "COPY (SELECT generate_series(1, 10000000)) TO STDOUT"
    with CopyStream(connection, command, capacity=1 << 16) as stream:
        assert stream.read() is not None
    assert connection.closed


def test_copy_stream_of_stopped_server_raises_transient_error(tap: Tap) -> None:
    with connect(tap.where) as connection:
        command = (
            "COPY (SELECT repeat('x', 50000), pg_sleep(g / 5 * 60) FROM generate_series(1, 9) g) "
            "TO STDOUT"
        )
        stream = CopyStream(connection, command)
        tap.database.sql("SELECT pg_terminate_backend(%s)", [connection.backend_pid])
        with pytest.raises(TransientError) as raised:
            list(stream)
        assert raised.value.sqlstate == "57P01"
        assert connection.closed


def test_stream_error_does_not_contain_password(tls_server: TlsServer) -> None:
    where = tls_server.parameters()
    with connect(where, replication=True) as connection, pytest.raises(SourceError) as raised:
        ReplicationStream(connection, slot=where["password"], start=NOTHING, publications=["p"])
    assert where["password"] not in f"{raised.value!r}{raised.value.__notes__}"
