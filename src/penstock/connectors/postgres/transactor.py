"""Loads, stores and commits in a Postgres database.

    load     keys ─ COPY ─► temporary table ─ one join ─► documents
    store    documents marked as new ─ COPY ─► table
             others, and those that exist after all ─ COPY ─► temporary table
    commit   for each binding one upsert and one delete from there, the fence, COMMIT

Data for COPY is buffered as CSV, which Arrow writes. COPY parses values as statements do, so a
column accepts every text of its type. A load opens a transaction only for the join. The transaction
of the stores begins with the first COPY.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import errors

from penstock.connectors.postgres.copy_csv import check_exact, csv_of
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
"""Maximum size of buffered CSV. Each COPY is a subtransaction, and many subtransactions slow down
all other sessions of the server."""

KEY_BYTES: Final = 16 << 20
"""Maximum size of buffered keys before their documents are loaded."""

FETCHED_ROWS: Final = 5000


class PostgresTransactor(Transactor):
    """Writer of one stream."""

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
            _Writer(session, dialect, binding, recreations.get(binding.index))
            for binding in bindings
        ]
        self._in_transaction = False
        self._waiting = 0
        """Size of the buffered CSV, in bytes."""

    def load(self, keys: Iterator[Keys]) -> Iterator[LoadedDocuments]:
        """Load documents by temporary tables of keys."""
        waiting: dict[int, list[pa.Buffer]] = {}
        size = 0
        for batch in keys:
            csv = csv_of(batch.columns())
            waiting.setdefault(batch.binding.index, []).append(csv)
            size += csv.size
            if size > KEY_BYTES:
                yield from self._load_keys(waiting)
                waiting, size = {}, 0
        yield from self._load_keys(waiting)

    def _load_keys(self, waiting: dict[int, list[pa.Buffer]]) -> Iterator[LoadedDocuments]:
        for index, csv in waiting.items():
            table = self._tables[index]
            failure = f'could not load from table "{table.binding}"'
            with self._translate_errors(failure):
                table.stage_keys(csv)
            while True:
                with self._translate_errors(failure):
                    docs = table.next_documents()
                if docs:
                    yield LoadedDocuments(
                        table.binding, pa.array(docs, pa.string()).cast(pa.binary())
                    )
                if len(docs) < FETCHED_ROWS:
                    break

    def store(self, documents: Iterator[Documents]) -> None:
        """Buffer documents, and copy them when the buffer is full."""
        for batch in documents:
            table = self._tables[batch.binding.index]
            if batch.empties:
                self._begin()
                with self._translate_errors(f'could not truncate table "{batch.binding}"'):
                    table.truncate()
                continue
            self._waiting += table.add(batch)
            if self._waiting > WAITING_BYTES:
                self._copy()

    def _copy(self) -> None:
        self._begin()
        for table in self._tables:
            with self._translate_errors(table.failure):
                table.copy()
        self._waiting = 0

    def start_commit(self, checkpoint: bytes) -> StateUpdate | None:
        """Commit the transaction with its checkpoint, unless it is fenced."""
        try:
            self._copy()
            for table in self._tables:
                if table.is_recreated:
                    with self._translate_errors(f'could not replace table "{table.binding}"'):
                        table.recreate()
                        paths = [self._dialect.quoted_path(w.binding.path) for w in self._tables]
                        self._session.add_operator_schemas(paths)
                with self._translate_errors(table.failure):
                    table.finish()
            condition, parameters = self._identity.condition()
            with self._translate_errors("could not write the checkpoint"):
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
                # SUBTLE: a failed check must not turn Fenced into a retry, which would fence the
                # newer stream.
                with suppress(TransientError):
                    self._identity.check(self._session)
            raise
        with self._translate_errors("could not commit the transaction"):
            self._session.commit()
        self._in_transaction = False
        return None

    def _begin(self) -> None:
        if not self._in_transaction:
            with self._translate_errors("could not begin a transaction"):
                self._session.run("BEGIN")
            self._in_transaction = True

    @contextmanager
    def _translate_errors(self, message: str) -> Iterator[None]:
        """Raise errors of psycopg as errors of Penstock, and detect a newer stream."""
        try:
            yield
        except (psycopg.Error, PenstockError) as error:
            self._check_not_fenced(error)
            if isinstance(error, PenstockError):
                raise
            raise self._session.to_penstock_error(error, message) from error

    def _check_not_fenced(self, error: Exception) -> None:
        """Check whether a newer stream has terminated this session: then it must not retry.

        Raises:
            Fenced: a newer stream has opened.
        """
        cause = error if isinstance(error, psycopg.Error) else error.__cause__
        lost = isinstance(cause, psycopg.Error) and self._session.connection.closed
        if not lost or self._session.is_cancelled:
            return
        fence = self._fence
        try:
            owned = self._owns_fence()
        except PenstockError:
            return
        if not owned:
            raise Fenced(
                f'stream of materialization "{fence.materialization}" {fence.key_range} is fenced',
                detail="A newer stream was opened and has terminated the session of this one.",
                hint="Stop this process. The newer stream continues.",
            ) from error

    def _owns_fence(self) -> bool:
        fence = self._fence
        other = PostgresSession(self._session.server, touch=False)
        try:
            self._identity.check(other)
            # A newer stream connects before it terminates this session, and increments the fence
            # only after that.
            newer = overlapping(other, self._names, fence.key_range)
            rows = other.query(
                f"SELECT fence FROM {self._dialect.quoted_path(self._checkpoints)} "
                "WHERE materialization = ? AND key_begin = ? AND key_end = ?",
                [fence.materialization, fence.key_range.begin, fence.key_range.end],
            )
            return not newer and rows == [(fence.fence,)]
        finally:
            other.close()

    def cancel(self) -> None:
        """Cancel the running statement."""
        self._session.interrupt()

    def close(self) -> None:
        """Roll back, and close the connection."""
        self._session.close()


class _Writer:
    """Writer of one binding."""

    def __init__(
        self,
        session: PostgresSession,
        dialect: PostgresDialect,
        binding: Binding[SqlResource],
        recreation: Recreation | None,
    ) -> None:
        self.binding = binding
        self.failure = f'could not store a document in table "{binding}"'
        self._session = session
        self._soft = binding.resource.delete == "soft" and not binding.delta_updates
        self._dialect = dialect
        self._statements = _Statements(dialect, binding, soft=self._soft)
        self._made: set[str] = set()
        """Names of the existing temporary tables."""

        self._new: list[pa.Buffer] = []
        self._others: list[pa.Buffer] = []
        self._removed: list[pa.Buffer] = []
        self._staged: set[str] = set()
        """Names of temporary tables with rows."""

        self._trusts_exists = True
        """True while all documents marked as new were new, in this transaction."""

        self._recreation = recreation
        """Pending replacement of the table, or None."""

        self.is_recreated = False
        """True if this transaction drops and creates the table. DROP TABLE blocks all readers, so
        it runs last, and all documents are staged until then."""

    # Loads.

    def stage_keys(self, csv: list[pa.Buffer]) -> None:
        """Stage keys, and open a cursor over their documents."""
        self._session.run("BEGIN")
        self._stage(self._statements.keys, csv)
        self._session.run(self._statements.find)
        self._session.commit()

    def next_documents(self) -> list[str]:
        """Return up to `FETCHED_ROWS` documents of the cursor; fewer at its end."""
        documents = [document for (document,) in self._session.query(self._statements.fetch)]
        if len(documents) < FETCHED_ROWS:
            self._session.run("CLOSE flow_found")
        return documents

    # Stores.

    def truncate(self) -> None:
        """Remove all rows of the table, before all other changes of a transaction."""
        if self._recreation is not None:
            self.is_recreated = True
            return
        self._session.run(self._statements.empty)

    def recreate(self) -> None:
        """Drop the table, create it again, and store the staged documents."""
        assert self._recreation is not None
        self._recreation.run(self._session)
        if self._statements.stores.name in self._staged:
            self._session.connection.execute(self._statements.insert.encode())
            self._staged.remove(self._statements.stores.name)
        self._recreation, self.is_recreated = None, False

    def add(self, batch: Documents) -> int:
        """Buffer documents as CSV, and return its size in bytes."""
        size = 0
        if self._recreation is not None and not self.is_recreated:
            self._recreation.check_truncated(batch)
        if batch.deletes is not None and pc.any(batch.deletes).as_py():
            if self.binding.delta_updates:
                raise RemoteProtocolError(
                    f"Store deletes from {self.binding}, which has delta updates"
                )
            deleted = Keys(self.binding, batch.packed_keys.filter(batch.deletes))
            size += _put(self._removed, deleted.columns())
            batch = batch.without_deletes()
        if not len(batch):
            return size
        columns = batch.columns()
        check_exact(self._dialect, self.binding, columns)
        if self._soft:
            columns.append(pa.repeat(pa.scalar(False), len(batch)))
        if self.is_recreated:
            return size + _put(self._others, columns)
        if self.binding.delta_updates:
            return size + _put(self._new, columns)
        exists = batch.exists if self._trusts_exists else pa.repeat(pa.scalar(True), len(batch))
        for buffers, mask in ((self._others, exists), (self._new, pc.invert(exists))):
            if mask.true_count == len(mask):
                size += _put(buffers, columns)
            elif mask.true_count:
                size += _put(buffers, [column.filter(mask) for column in columns])
        return size

    def copy(self) -> None:
        """Copy buffered CSV to the table or to temporary tables."""
        if self._new:
            if self.binding.delta_updates:
                self._session.copy(self._statements.copy_new, self._new)
            elif not self._copy_new():
                self._others += self._new
        if self._others:
            self._stage(self._statements.stores, self._others)
        if self._removed:
            self._stage(self._statements.deletes, self._removed)
        self._new, self._others, self._removed = [], [], []

    def _copy_new(self) -> bool:
        if not self._trusts_exists:
            return False
        self._session.run("SAVEPOINT flow_new")
        try:
            self._session.copy(self._statements.copy_new, self._new)
        except errors.UniqueViolation:
            self._session.run("ROLLBACK TO SAVEPOINT flow_new")
            # The hint was wrong, so further hints are not trusted in this transaction.
            self._trusts_exists = False
        self._session.run("RELEASE SAVEPOINT flow_new")
        return self._trusts_exists

    def finish(self) -> None:
        """Apply the staged documents and deletes to the table."""
        if self._statements.stores.name in self._staged:
            try:
                self._session.connection.execute(self._statements.upsert.encode())
            except errors.CardinalityViolation as error:
                raise RemoteProtocolError(
                    f"a key of {self.binding} was stored twice in one transaction",
                    hint="Combine the documents of a key before they are stored.",
                ) from error
        if self._statements.deletes.name in self._staged:
            self._session.connection.execute(self._statements.delete.encode())
        self._staged.clear()
        self._trusts_exists = True

    def _stage(self, stage: "_Stage", csv: list[pa.Buffer]) -> None:
        if stage.name not in self._made:
            recreation = self._recreation
            self._session.run(stage.create if recreation is None else stage.of(recreation))
            self._made.add(stage.name)
        self._session.copy(stage.copy, csv)
        self._staged.add(stage.name)


def _put(buffers: list[pa.Buffer], columns: Sequence[pa.Array]) -> int:
    buffers.append(csv_of(columns))
    return int(buffers[-1].size)


class _Stage:
    """Temporary table with columns of another table. Each commit truncates it."""

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
        """Return the statement that creates it with the column types of a new table."""
        quoted = recreation.dialect.quoted
        types = {quoted(column.name): column.type for column in recreation.table.columns}
        columns = ", ".join(f"{name} {types[name]}" for name in self._columns)
        return f"CREATE TEMPORARY TABLE {self._plain} ({columns}) ON COMMIT DELETE ROWS"


class _Statements:
    """SQL statements of one binding."""

    def __init__(
        self, dialect: PostgresDialect, binding: Binding[SqlResource], *, soft: bool
    ) -> None:
        quoted = dialect.quoted
        table = dialect.quoted_path(binding.path)
        keys = [quoted(dialect.column_name(field.name)) for field in binding.keys]
        columns = [quoted(dialect.column_name(field.name)) for field in binding.fields]
        columns += [quoted(DELETED)] if soft else []
        self.keys = _Stage(f"flow_load_{binding.index}", table, keys)
        self.stores = _Stage(f"flow_store_{binding.index}", table, columns)
        self.deletes = _Stage(f"flow_delete_{binding.index}", table, keys)
        self.copy_new = _copy(table, columns)

        same = " AND ".join(f"t.{key} = l.{key}" for key in keys)
        visible = f" AND t.{quoted(DELETED)} IS NOT TRUE" if soft else ""
        document = document_expression(dialect, binding)
        self.find = (
            "DECLARE flow_found NO SCROLL CURSOR WITH HOLD FOR "
            f"SELECT {document} FROM {self.keys.name} l JOIN {table} t ON {same}{visible}"
        )
        self.fetch = f"FETCH {FETCHED_ROWS} FROM flow_found"

        names = ", ".join(columns)
        updates = ", ".join(f"{name} = excluded.{name}" for name in columns if name not in keys)
        action = f"UPDATE SET {updates}" if updates else "NOTHING"
        self.insert = f"INSERT INTO {table} ({names}) SELECT {names} FROM {self.stores.name}"
        self.upsert = f"{self.insert} ON CONFLICT ({', '.join(keys)}) DO {action}"
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
