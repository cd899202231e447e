"""Loads, stores and commits in a Postgres database.

    load     keys ─ COPY ─► temporary table ─ one join ─► documents
    store    said to be new ─ COPY ─► table
             others, and those that were not new ─ COPY ─► temporary table
    commit   of each binding one upsert and one delete from there, the fence, COMMIT

What is copied waits here until there is much of it, as CSV that Arrow wrote: COPY
parses values as a statement would, so that a column takes whatever text its type has.
No transaction is open while documents are loaded, but for as long as the join takes;
that of the stores begins with the first COPY.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import errors

from penstock.connectors.postgres.copy_csv import csv_of, refuse_inexact
from penstock.connectors.postgres.dialect import PostgresDialect
from penstock.connectors.postgres.document_columns import document_expression
from penstock.connectors.postgres.identity import EndpointIdentity
from penstock.connectors.postgres.older_sessions import SessionNames, overlapping
from penstock.connectors.postgres.session import PostgresSession
from penstock.errors import Fenced, PenstockError, TransientError
from penstock.protocol.errors import RemoteProtocolError
from penstock.protocol.messages import StateUpdate
from penstock.sdk.batches import Documents, Keys, LoadedDocuments
from penstock.sdk.bindings import Binding
from penstock.sdk.errors import Refused
from penstock.sdk.sql.connector import DELETED, SqlResource
from penstock.sdk.sql.fence import Fence, commit_fence
from penstock.sdk.sql.recreation import Recreation
from penstock.sdk.transactor import Transactor

__all__ = ["PostgresTransactor"]

WAITING_BYTES: Final = 32 << 20
"""So much CSV may wait. A COPY is a subtransaction, of which there should be few: many slow
down every other session of the server."""

KEY_BYTES: Final = 16 << 20
"""So much of keys may wait, before their documents are looked for."""

FETCHED_ROWS: Final = 5000


class PostgresTransactor(Transactor):
    """One stream's writer of a Postgres database."""

    accepts_empty = True

    def __init__(
        self,
        session: PostgresSession,
        dialect: PostgresDialect,
        bindings: Sequence[Binding[Any]],
        fence: Fence,
        identity: EndpointIdentity,
        checkpoints: tuple[str, ...],
        names: SessionNames,
        recreations: Mapping[int, Recreation],
    ) -> None:
        self.checkpoint = fence.checkpoint
        self._session = session
        self._dialect = dialect
        self._fence = fence
        self._identity = identity
        self._checkpoints = checkpoints
        self._names = names
        self._tables = [
            _Writer(session, dialect, each, recreations.get(each.index)) for each in bindings
        ]
        self._in_transaction = False
        self._waiting = 0
        """Bytes of CSV that are yet to be copied."""

    def load(self, keys: Iterator[Keys]) -> Iterator[LoadedDocuments]:
        """By way of temporary tables of keys."""
        waiting: dict[int, list[pa.Buffer]] = {}
        size = 0
        for batch in keys:
            csv = csv_of(batch.columns())
            waiting.setdefault(batch.binding.index, []).append(csv)
            size += csv.size
            if size > KEY_BYTES:
                yield from self._found(waiting)
                waiting, size = {}, 0
        yield from self._found(waiting)

    def _found(self, waiting: dict[int, list[pa.Buffer]]) -> Iterator[LoadedDocuments]:
        for index, csv in waiting.items():
            table = self._tables[index]
            what = f'table "{table.binding}" could not be loaded from'
            with self._telling(what):
                table.stage_keys(csv)
            while True:
                with self._telling(what):
                    docs = table.next_documents()
                if docs:
                    yield LoadedDocuments(
                        table.binding, pa.array(docs, pa.string()).cast(pa.binary())
                    )
                if len(docs) < FETCHED_ROWS:
                    break

    def store(self, documents: Iterator[Documents]) -> None:
        """Copy, once there is enough of it."""
        for batch in documents:
            table = self._tables[batch.binding.index]
            if batch.empties:
                self._begin()
                with self._telling(f'table "{batch.binding}" could not be emptied'):
                    table.empty()
                continue
            self._waiting += table.add(batch)
            if self._waiting > WAITING_BYTES:
                self._copy()

    def _copy(self) -> None:
        self._begin()
        for table in self._tables:
            with self._telling(table.refuses):
                table.copy()
        self._waiting = 0

    def start_commit(self, checkpoint: bytes) -> StateUpdate | None:
        """Commit the transaction with its checkpoint, if we are still the one who may."""
        try:
            self._copy()
            for table in self._tables:
                if table.is_recreated:
                    with self._telling(f'table "{table.binding}" could not be replaced'):
                        table.recreate()
                        paths = [self._dialect.quoted_path(it.binding.path) for it in self._tables]
                        self._session.see_operators(paths)
                with self._telling(table.refuses):
                    table.finish()
            condition, parameters = self._identity.condition()
            with self._telling("the checkpoint could not be written"):
                commit_fence(
                    self._session,
                    self._dialect,
                    self._fence,
                    checkpoint,
                    self._checkpoints,
                    condition=condition,
                    parameters=parameters,
                )
        except BaseException as error:
            self._session.roll_back()
            if isinstance(error, (Fenced, Refused)):
                # SUBTLE: a check without an answer must not turn a fence into a retry, which
                # would fence off the newer stream in turn.
                with suppress(TransientError):
                    self._identity.check(self._session)
            raise
        with self._telling("the transaction could not be committed"):
            self._session.commit()
        self._in_transaction = False
        return None

    def _begin(self) -> None:
        if not self._in_transaction:
            with self._telling("no transaction could be begun"):
                self._session.run("BEGIN")
            self._in_transaction = True

    @contextmanager
    def _telling(self, what: str) -> Iterator[None]:
        """Say what went wrong in our own words."""
        try:
            yield
        except (psycopg.Error, PenstockError) as error:
            self._must_be_ours(error)
            if isinstance(error, PenstockError):
                raise
            raise self._session.explained(error, what) from error

    def _must_be_ours(self, error: Exception) -> None:
        """Who was ended by a newer stream is told so, and does not try again.

        Raises:
            Fenced: so it is.
        """
        cause = error if isinstance(error, psycopg.Error) else error.__cause__
        lost = isinstance(cause, psycopg.Error) and self._session.connection.closed
        if not lost or self._session.gave_up:
            return
        fence = self._fence
        try:
            ours = self._still_ours()
        except PenstockError:
            return
        if not ours:
            raise Fenced(
                f'materialization "{fence.materialization}" {fence.key_range} was fenced off',
                detail="A newer stream has been opened, and has ended the session of this one.",
                hint="Stop; the other one goes on.",
            ) from error

    def _still_ours(self) -> bool:
        fence = self._fence
        other = PostgresSession(self._session.where, touch=False)
        try:
            self._identity.check(other)
            # Who ends a session is connected before, and raises the fence only after.
            newer = overlapping(other, self._names, fence.key_range)
            found = other.query(
                f"SELECT fence FROM {self._dialect.quoted_path(self._checkpoints)} "
                "WHERE materialization = ? AND key_begin = ? AND key_end = ?",
                [fence.materialization, fence.key_range.begin, fence.key_range.end],
            )
            return not newer and found == [(fence.fence,)]
        finally:
            other.close()

    def cancel(self) -> None:
        """Break off what the server is doing."""
        self._session.interrupt()

    def close(self) -> None:
        """Roll back what is not committed."""
        self._session.close()


class _Writer:
    """What is done for one binding."""

    def __init__(
        self,
        session: PostgresSession,
        dialect: PostgresDialect,
        binding: Binding[SqlResource],
        recreation: Recreation | None,
    ) -> None:
        self.binding = binding
        self.refuses = f'table "{binding}" does not take a document'
        self._session = session
        self._soft = binding.resource.delete == "soft" and not binding.delta_updates
        self._dialect = dialect
        self._statements = _Statements(dialect, binding, soft=self._soft)
        self._made: set[str] = set()
        """The temporary tables that there are."""

        self._new: list[pa.Buffer] = []
        self._others: list[pa.Buffer] = []
        self._removed: list[pa.Buffer] = []
        self._staged: set[str] = set()
        """The temporary tables in which there is something."""

        self._believes = True
        """Whether documents that were said to be new have been, in this transaction."""

        self._recreation = recreation
        """How the table is dropped and created again when it is emptied; None if it is not."""

        self.is_recreated = False
        """Whether this transaction drops and creates the table. DROP TABLE blocks all readers, so
        it runs as late as possible, and all documents are staged until then."""

    # Loads.

    def stage_keys(self, csv: list[pa.Buffer]) -> None:
        """Look for documents; what is found is kept by the server until it was fetched."""
        self._session.run("BEGIN")
        self._stage(self._statements.keys, csv)
        self._session.run(self._statements.find)
        self._session.commit()

    def next_documents(self) -> list[str]:
        """Some of those that were found; if they are fewer than that, the last."""
        found = [document for (document,) in self._session.query(self._statements.fetch)]
        if len(found) < FETCHED_ROWS:
            self._session.run("CLOSE flow_found")
        return found

    # Stores.

    def empty(self) -> None:
        """Remove what the table holds; called before anything else of a transaction."""
        if self._recreation is not None:
            self.is_recreated = True
            return
        self._session.run(self._statements.empty)

    def recreate(self) -> None:
        """Drop the table, create it again and store what is staged."""
        assert self._recreation is not None
        self._recreation.run(self._session)
        if self._statements.stores.name in self._staged:
            self._session.connection.execute(self._statements.insert.encode())
            self._staged.remove(self._statements.stores.name)
        self._recreation, self.is_recreated = None, False

    def add(self, batch: Documents) -> int:
        """Let documents wait to be copied; how many bytes of CSV they are."""
        size = 0
        if self._recreation is not None and not self.is_recreated:
            self._recreation.check_truncated(batch)
        if batch.deletes is not None and pc.any(batch.deletes).as_py():
            if self.binding.delta_updates:
                raise RemoteProtocolError(
                    f"a delete of {self.binding}, which is a binding of delta updates"
                )
            gone = Keys(self.binding, batch.packed_keys.filter(batch.deletes))
            size += _put(self._removed, gone.columns())
            batch = batch.without_deletes()
        if not len(batch):
            return size
        columns = batch.columns()
        refuse_inexact(self._dialect, self.binding, columns)
        if self._soft:
            columns.append(pa.repeat(pa.scalar(False), len(batch)))
        if self.is_recreated:
            return size + _put(self._others, columns)
        if self.binding.delta_updates:
            return size + _put(self._new, columns)
        there = batch.exists if self._believes else pa.repeat(pa.scalar(True), len(batch))
        for pile, mask in ((self._others, there), (self._new, pc.invert(there))):
            if mask.true_count == len(mask):
                size += _put(pile, columns)
            elif mask.true_count:
                size += _put(pile, [each.filter(mask) for each in columns])
        return size

    def copy(self) -> None:
        """Copy what waits, to where it belongs or to where it is staged."""
        if self._new:
            if self.binding.delta_updates:
                self._session.copy(self._statements.copy_new, self._new)
            elif not self._copied_new():
                self._others += self._new
        if self._others:
            self._stage(self._statements.stores, self._others)
        if self._removed:
            self._stage(self._statements.deletes, self._removed)
        self._new, self._others, self._removed = [], [], []

    def _copied_new(self) -> bool:
        if not self._believes:
            return False
        self._session.run("SAVEPOINT flow_new")
        try:
            self._session.copy(self._statements.copy_new, self._new)
        except errors.UniqueViolation:
            self._session.run("ROLLBACK TO SAVEPOINT flow_new")
            # What was said of these was wrong, so it may be of those to come.
            self._believes = False
        self._session.run("RELEASE SAVEPOINT flow_new")
        return self._believes

    def finish(self) -> None:
        """Bring what is staged to where it belongs."""
        if self._statements.stores.name in self._staged:
            try:
                self._session.connection.execute(self._statements.upsert.encode())
            except errors.CardinalityViolation as error:
                raise RemoteProtocolError(
                    f"a key of {self.binding} was stored twice in one transaction",
                    hint="A runtime combines the documents of a key before it stores them.",
                ) from error
        if self._statements.deletes.name in self._staged:
            self._session.connection.execute(self._statements.delete.encode())
        self._staged.clear()
        self._believes = True

    def _stage(self, stage: "_Stage", csv: list[pa.Buffer]) -> None:
        if stage.name not in self._made:
            recreation = self._recreation
            self._session.run(stage.create if recreation is None else stage.of(recreation))
            self._made.add(stage.name)
        self._session.copy(stage.copy, csv)
        self._staged.add(stage.name)


def _put(pile: list[pa.Buffer], columns: Sequence[pa.Array]) -> int:
    pile.append(csv_of(columns))
    return int(pile[-1].size)


class _Stage:
    """A temporary table with columns like those of another, which is emptied by each commit."""

    def __init__(self, name: str, table: str, columns: Sequence[str]) -> None:
        self.name = f"pg_temp.{name}"
        names = ", ".join(columns)
        self._plain, self._columns = name, columns
        self.create = (
            f"CREATE TEMPORARY TABLE {name} ON COMMIT DELETE ROWS AS "
            f"SELECT {names} FROM {table} WITH NO DATA"
        )
        self.copy = _copy(self.name, columns)

    def of(self, recreation: Recreation) -> str:
        """Return the statement that creates it with the types of a table that is yet to be."""
        quoted = recreation.dialect.quoted
        types = {quoted(each.name): each.type for each in recreation.table.columns}
        columns = ", ".join(f"{each} {types[each]}" for each in self._columns)
        return f"CREATE TEMPORARY TABLE {self._plain} ({columns}) ON COMMIT DELETE ROWS"


class _Statements:
    """What is run for one binding."""

    def __init__(
        self, dialect: PostgresDialect, binding: Binding[SqlResource], *, soft: bool
    ) -> None:
        quoted = dialect.quoted
        table = dialect.quoted_path(binding.path)
        keys = [quoted(dialect.column_name(each.name)) for each in binding.keys]
        columns = [quoted(dialect.column_name(each.name)) for each in binding.fields]
        columns += [quoted(DELETED)] if soft else []
        self.keys = _Stage(f"flow_load_{binding.index}", table, keys)
        self.stores = _Stage(f"flow_store_{binding.index}", table, columns)
        self.deletes = _Stage(f"flow_delete_{binding.index}", table, keys)
        self.copy_new = _copy(table, columns)

        same = " AND ".join(f"t.{each} = l.{each}" for each in keys)
        visible = f" AND t.{quoted(DELETED)} IS NOT TRUE" if soft else ""
        document = document_expression(dialect, binding)
        self.find = (
            "DECLARE flow_found NO SCROLL CURSOR WITH HOLD FOR "
            f"SELECT {document} FROM {self.keys.name} l JOIN {table} t ON {same}{visible}"
        )
        self.fetch = f"FETCH {FETCHED_ROWS} FROM flow_found"

        names = ", ".join(columns)
        updates = ", ".join(f"{each} = excluded.{each}" for each in columns if each not in keys)
        deed = f"UPDATE SET {updates}" if updates else "NOTHING"
        self.insert = f"INSERT INTO {table} ({names}) SELECT {names} FROM {self.stores.name}"
        self.upsert = f"{self.insert} ON CONFLICT ({', '.join(keys)}) DO {deed}"
        self.delete = (
            f"UPDATE {table} t SET {quoted(DELETED)} = true FROM {self.deletes.name} l WHERE {same}"
            if soft
            else f"DELETE FROM {table} t USING {self.deletes.name} l WHERE {same}"
        )
        self.empty = (
            f"UPDATE {table} SET {quoted(DELETED)} = true" if soft else f"DELETE FROM {table}"
        )


def _copy(table: str, columns: Sequence[str]) -> str:
    return f"COPY {table} ({', '.join(columns)}) FROM STDIN (FORMAT csv)"
