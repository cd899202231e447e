"""Loads, stores and commits in a SQLite file.

The file is locked only during a commit, so an idle stream does not block other writers. Until then,
documents are in a spool. Keys to load are passed as JSON text; keys that JSON cannot represent are
staged in a temporary table, outside the file. The last statement of a commit updates the fence.
"""

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.connectors.sqlite.dialect import SqliteDialect
from penstock.connectors.sqlite.session import SqliteSession
from penstock.connectors.sqlite.spool import Spool
from penstock.protocol.errors import RemoteProtocolError
from penstock.protocol.messages import StateUpdate
from penstock.sdk.batches import Documents, Keys, LoadedDocuments
from penstock.sdk.bindings import Binding, Field, FieldKind
from penstock.sdk.errors import Refused
from penstock.sdk.sql.connector import DELETED, SqlResource
from penstock.sdk.sql.dialect import Dialect
from penstock.sdk.sql.document_columns import Assembly
from penstock.sdk.sql.fence import Fence, commit_fence
from penstock.sdk.sql.recreation import Recreation
from penstock.sdk.transactor import Transactor

__all__ = ["SqliteTransactor"]

FETCHED_ROWS: Final = 4096
WAITING_BYTES: Final = 64 << 20
"""Maximum size of documents in memory. More documents go to a file."""


class SqliteTransactor(Transactor):
    """Writer of one stream."""

    accepts_empty = True

    def __init__(
        self,
        session: SqliteSession,
        dialect: SqliteDialect,
        bindings: list[Binding[SqlResource]],
        fence: Fence,
        recreations: Mapping[int, Recreation],
    ) -> None:
        self.checkpoint = fence.checkpoint
        self._session = session
        self._dialect = dialect
        self._fence = fence
        self._spool = Spool(session.path.parent, bindings, WAITING_BYTES)
        self._truncated: list[int] = []
        """Bindings whose tables are truncated before the spooled documents are written."""

        self._recreations = dict(recreations)
        """Tables to drop and create again when they are truncated, by index of the binding."""

        self._statements = [_Statements(dialect, binding) for binding in bindings]
        for statements in self._statements:
            session.run(statements.create_keys)

    def load(self, keys: Iterator[Keys]) -> Iterator[LoadedDocuments]:
        """Look up keys by JSON, or by a temporary table of keys."""
        connection = self._session.connection
        for batch in keys:
            statements = self._statements[batch.binding.index]
            columns = batch.columns()
            if (text := _json_of(columns, batch.binding.keys)) is not None:
                cursor = connection.execute(statements.load_json, [text])
            else:
                connection.execute("BEGIN")
                connection.executemany(statements.insert_key, _rows(columns, batch.binding.keys))
                connection.execute("COMMIT")
                cursor = connection.execute(statements.load_staged)
            while rows := cursor.fetchmany(FETCHED_ROWS):
                yield LoadedDocuments(
                    batch.binding, statements.documents([*zip(*rows, strict=True)])
                )
            if text is None:
                connection.execute(statements.delete_keys)

    def store(self, documents: Iterator[Documents]) -> None:
        """Spool the documents until the commit."""
        for batch in documents:
            index = batch.binding.index
            if index in self._recreations and index not in self._truncated:
                self._recreations[index].check_truncated(batch)
            if batch.empties:
                self._truncated.append(index)
            else:
                self._spool.add(batch)

    def _write_batch(self, batch: Documents) -> None:
        statements = self._statements[batch.binding.index]
        connection = self._session.connection
        stored = batch
        if batch.deletes is not None and pc.any(batch.deletes).as_py():
            if batch.binding.delta_updates:
                raise RemoteProtocolError(
                    f'Store deletes from table "{batch.binding}", which has delta updates',
                    hint="Do not delete from bindings with delta updates.",
                )
            removed = Keys(batch.binding, batch.packed_keys.filter(batch.deletes)).columns()
            connection.executemany(statements.delete, _rows(removed, batch.binding.keys))
            stored = batch.without_deletes()
        if len(stored):
            try:
                connection.executemany(
                    statements.store, _rows(self._columns(stored), batch.binding.fields)
                )
            except sqlite3.IntegrityError as error:
                raise Refused(
                    f'could not store a document in table "{batch.binding}": {error}'
                ) from error

    def _columns(self, batch: Documents) -> list[pa.Array]:
        """Return the columns of a batch, with decimals in their stored form."""
        return [
            column.cast(pa.float64()) if self._dialect.stores_real(field) else column
            for field, column in zip(batch.binding.fields, batch.columns(), strict=True)
        ]

    def start_commit(self, checkpoint: bytes) -> StateUpdate | None:
        """Write the documents, and commit them with the checkpoint unless fenced."""
        self._session.begin()
        try:
            for index in self._truncated:
                if index in self._recreations:
                    self._recreations[index].run(self._session)
                else:
                    self._session.run(self._statements[index].empty)
            for batch in self._spool:
                self._session.check_not_cancelled()
                self._write_batch(batch)
            commit_fence(self._session, self._dialect, self._fence, checkpoint)
            self._session.commit()
        except BaseException:
            self._session.roll_back()
            raise
        self._spool.clear()
        for index in self._truncated:
            self._recreations.pop(index, None)
        self._truncated = []
        return None

    def cancel(self) -> None:
        """Interrupt the running statement."""
        self._session.interrupt()

    def close(self) -> None:
        """Roll back, and close the connection."""
        self._session.close()
        self._spool.clear()


class _Statements:
    """SQL statements of one binding."""

    def __init__(self, dialect: Dialect, binding: Binding[SqlResource]) -> None:
        quoted = dialect.quoted
        table = dialect.quoted_path(binding.path)
        names = [quoted(dialect.column_name(field.name)) for field in binding.fields]
        keys = [quoted(dialect.column_name(field.name)) for field in binding.keys]
        soft = binding.resource.delete == "soft" and not binding.delta_updates
        columns = [*names, *([quoted(DELETED)] if soft else [])]
        places = ["?"] * len(names) + (["0"] if soft else [])
        insert = f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join(places)})"
        others = [column for column in columns if column not in keys]
        if binding.delta_updates:
            self.store = insert
        else:
            updates = ", ".join(f"{column} = excluded.{column}" for column in others)
            action = f"UPDATE SET {updates}" if updates else "NOTHING"
            self.store = f"{insert} ON CONFLICT ({', '.join(keys)}) DO {action}"
        same = " AND ".join(f"{key} = ?" for key in keys)
        self.delete = (
            f"UPDATE {table} SET {quoted(DELETED)} = 1 WHERE {same}"
            if soft
            else f"DELETE FROM {table} WHERE {same}"
        )
        self.empty = f"UPDATE {table} SET {quoted(DELETED)} = 1" if soft else f"DELETE FROM {table}"
        staged = f"temp.flow_load_{binding.index}"
        numbered = [f"k{index}" for index in range(len(keys))]
        joined = " AND ".join(
            f"t.{key} = l.{number}" for key, number in zip(keys, numbered, strict=True)
        )
        visible = f" AND t.{quoted(DELETED)} IS NOT 1" if soft else ""
        loaded = names
        if binding.document is not None:
            loaded = [quoted(dialect.column_name(binding.document.name))]
        selected = ", ".join(f"t.{column}" for column in loaded)
        self._table = f'table "{binding}"'
        self._assembly = None if binding.document is not None else Assembly(binding)
        self.create_keys = f"CREATE TABLE {staged} ({', '.join(numbered)})"
        self.insert_key = f"INSERT INTO {staged} VALUES ({', '.join('?' * len(keys))})"
        join = f"l CROSS JOIN {table} t ON"
        self.load_staged = f"SELECT {selected} FROM {staged} {join} {joined}{visible}"
        one = f"t.{keys[0]} = l.value"
        self.load_json = f"SELECT {selected} FROM json_each(?) {join} {one}{visible}"
        self.delete_keys = f"DELETE FROM {staged}"

    def documents(self, columns: Sequence[Sequence[Any]]) -> pa.BinaryArray:
        """Return documents from loaded columns."""
        if self._assembly is not None:
            return self._assembly.documents(columns)
        documents = pa.array(columns[0], pa.string()).cast(pa.binary())
        if documents.null_count:
            raise Refused(
                f"{self._table} has a row without a document",
                hint="Delete such rows, or set document: false.",
            )
        return documents


def _json_of(columns: list[pa.Array], fields: Sequence[Field]) -> str | None:
    """Return keys as JSON; None if they have several columns or JSON is not exact."""
    [column, *others], kind = columns, fields[0].kind
    exact = column.type == pa.string() if kind is FieldKind.STRING else column.type == pa.int64()
    if others or column.null_count or not exact:
        return None
    text = json.dumps(_values(column, fields[0]), ensure_ascii=False)
    # SQLite ends a string at NUL.
    return None if "\\u0000" in text else text


def _rows(columns: list[pa.Array], fields: Sequence[Field]) -> Iterator[tuple[Any, ...]]:
    """Return columns as tuples."""
    lists = [_values(column, field) for column, field in zip(columns, fields, strict=True)]
    return zip(*lists, strict=True)


def _values(column: pa.Array, field: Field) -> list[Any]:
    kind = column.type
    if pa.types.is_string(kind) and field.kind in (FieldKind.INTEGER, FieldKind.NUMBER):
        return [_number(text) for text in column.to_pylist()]
    if pa.types.is_boolean(kind):
        column = column.cast(pa.int8())
        kind = column.type
    if pa.types.is_integer(kind) and column.null_count == 0:
        return column.to_numpy(zero_copy_only=False).tolist()  # type: ignore[no-any-return]
    if pa.types.is_floating(kind):
        if column.null_count == 0:
            numbers = column.to_numpy(zero_copy_only=False)
            if not np.isnan(numbers).any():
                return numbers.tolist()  # type: ignore[no-any-return]
        # SQLite stores NaN as null.
        return [
            "NaN" if value is not None and value != value else value for value in column.to_pylist()
        ]
    return column.to_pylist()  # type: ignore[no-any-return]


def _number(text: str | None) -> int | float | str | None:
    """Parse a number of a text column; beyond 64 bits, return the text."""
    if text is None:
        return None
    try:
        integer = int(text)
    except ValueError:
        number = float(text)
        return "NaN" if number != number else number
    return integer if -(2**63) <= integer < 2**63 else text
