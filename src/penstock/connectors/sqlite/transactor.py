"""Loads, stores and commits in a SQLite file.

The file is locked only while a transaction is committed, so that nobody waits for a
stream that stands still: until then its documents wait in a spool. Keys to load are
handed over as one text of JSON, or, where JSON cannot hold them, staged in a temporary
table, which is not in the file. The last statement of a commit is the fence's.
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
"""So much of a transaction is kept in memory; the rest of it in a file."""


class SqliteTransactor(Transactor):
    """One stream's writer of a SQLite file."""

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
        self._waiting = Spool(session.path.parent, bindings, WAITING_BYTES)
        self._emptied: list[int] = []
        """The bindings whose tables are to be emptied, before what waits is written."""

        self._recreations = dict(recreations)
        """By binding, tables that are dropped and created again when they are emptied."""

        self._statements = [_Statements(dialect, each) for each in bindings]
        for each in self._statements:
            session.run(each.create_keys)

    def load(self, keys: Iterator[Keys]) -> Iterator[LoadedDocuments]:
        """By way of JSON, or of a temporary table of keys."""
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
                connection.execute(statements.forget_keys)

    def store(self, documents: Iterator[Documents]) -> None:
        """Keep them until they are committed."""
        for batch in documents:
            index = batch.binding.index
            if index in self._recreations and index not in self._emptied:
                self._recreations[index].check_truncated(batch)
            if batch.empties:
                self._emptied.append(index)
            else:
                self._waiting.add(batch)

    def _write_batch(self, batch: Documents) -> None:
        statements = self._statements[batch.binding.index]
        connection = self._session.connection
        stored = batch
        if batch.deletes is not None and pc.any(batch.deletes).as_py():
            if batch.binding.delta_updates:
                raise RemoteProtocolError(
                    f'deletes from table "{batch.binding}", which takes delta updates',
                    hint="What was inserted there stays; it does not accept deletes.",
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
                    f'table "{batch.binding}" does not take a document: {error}'
                ) from error

    def _columns(self, batch: Documents) -> list[pa.Array]:
        """Return the columns of a batch, with decimals as the endpoint stores them."""
        return [
            column.cast(pa.float64()) if self._dialect.stores_real(field) else column
            for field, column in zip(batch.binding.fields, batch.columns(), strict=True)
        ]

    def start_commit(self, checkpoint: bytes) -> StateUpdate | None:
        """Commit what was stored with its checkpoint, if we are still the one who may."""
        self._session.begin()
        try:
            for index in self._emptied:
                if index in self._recreations:
                    self._recreations[index].run(self._session)
                else:
                    self._session.run(self._statements[index].empty)
            for batch in self._waiting:
                self._session.must_go_on()
                self._write_batch(batch)
            commit_fence(self._session, self._dialect, self._fence, checkpoint)
            self._session.commit()
        except BaseException:
            self._session.roll_back()
            raise
        self._waiting.clear()
        for index in self._emptied:
            self._recreations.pop(index, None)
        self._emptied = []
        return None

    def cancel(self) -> None:
        """Break off what SQLite is doing."""
        self._session.interrupt()

    def close(self) -> None:
        """Roll back what is not committed."""
        self._session.close()
        self._waiting.clear()


class _Statements:
    """What is run for one binding."""

    def __init__(self, dialect: Dialect, binding: Binding[SqlResource]) -> None:
        quoted = dialect.quoted
        table = dialect.quoted_path(binding.path)
        names = [quoted(dialect.column_name(each.name)) for each in binding.fields]
        keys = [quoted(dialect.column_name(each.name)) for each in binding.keys]
        soft = binding.resource.delete == "soft" and not binding.delta_updates
        columns = [*names, *([quoted(DELETED)] if soft else [])]
        places = ["?"] * len(names) + (["0"] if soft else [])
        insert = f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join(places)})"
        others = [each for each in columns if each not in keys]
        if binding.delta_updates:
            self.store = insert
        else:
            updates = ", ".join(f"{each} = excluded.{each}" for each in others)
            deed = f"UPDATE SET {updates}" if updates else "NOTHING"
            self.store = f"{insert} ON CONFLICT ({', '.join(keys)}) DO {deed}"
        same = " AND ".join(f"{each} = ?" for each in keys)
        self.delete = (
            f"UPDATE {table} SET {quoted(DELETED)} = 1 WHERE {same}"
            if soft
            else f"DELETE FROM {table} WHERE {same}"
        )
        self.empty = f"UPDATE {table} SET {quoted(DELETED)} = 1" if soft else f"DELETE FROM {table}"
        staged = f"temp.flow_load_{binding.index}"
        numbered = [f"k{index}" for index in range(len(keys))]
        joined = " AND ".join(
            f"t.{key} = l.{each}" for key, each in zip(keys, numbered, strict=True)
        )
        visible = f" AND t.{quoted(DELETED)} IS NOT 1" if soft else ""
        wanted = names
        if binding.document is not None:
            wanted = [quoted(dialect.column_name(binding.document.name))]
        found = ", ".join(f"t.{each}" for each in wanted)
        self._table = f'table "{binding}"'
        self._assembly = None if binding.document is not None else Assembly(binding)
        self.create_keys = f"CREATE TABLE {staged} ({', '.join(numbered)})"
        self.insert_key = f"INSERT INTO {staged} VALUES ({', '.join('?' * len(keys))})"
        rest = f"l CROSS JOIN {table} t ON"
        self.load_staged = f"SELECT {found} FROM {staged} {rest} {joined}{visible}"
        one = f"t.{keys[0]} = l.value"
        self.load_json = f"SELECT {found} FROM json_each(?) {rest} {one}{visible}"
        self.forget_keys = f"DELETE FROM {staged}"

    def documents(self, columns: Sequence[Sequence[Any]]) -> pa.BinaryArray:
        """What was loaded, as documents."""
        if self._assembly is not None:
            return self._assembly.documents(columns)
        found = pa.array(columns[0], pa.string()).cast(pa.binary())
        if found.null_count:
            raise Refused(
                f"{self._table} has a row without a document",
                hint="Delete such rows, or say document: false.",
            )
        return found


def _json_of(columns: list[pa.Array], fields: Sequence[Field]) -> str | None:
    """Keys as JSON; none, if they are of several columns or JSON would not be exact."""
    [column, *others], kind = columns, fields[0].kind
    exact = column.type == pa.string() if kind is FieldKind.STRING else column.type == pa.int64()
    if others or column.null_count or not exact:
        return None
    text = json.dumps(_values(column, fields[0]), ensure_ascii=False)
    # SQLite takes a NUL for the end of a string.
    return None if "\\u0000" in text else text


def _rows(columns: list[pa.Array], fields: Sequence[Field]) -> Iterator[tuple[Any, ...]]:
    """Tuples, made by columns."""
    lists = [_values(column, field) for column, field in zip(columns, fields, strict=True)]
    return zip(*lists, strict=True)


def _values(column: pa.Array, field: Field) -> list[Any]:
    kind = column.type
    if pa.types.is_string(kind) and field.kind in (FieldKind.INTEGER, FieldKind.NUMBER):
        return [_number(each) for each in column.to_pylist()]
    if pa.types.is_boolean(kind):
        column = column.cast(pa.int8())
        kind = column.type
    if pa.types.is_integer(kind) and column.null_count == 0:
        return column.to_numpy(zero_copy_only=False).tolist()  # type: ignore[no-any-return]
    if pa.types.is_floating(kind):
        if column.null_count == 0:
            found = column.to_numpy(zero_copy_only=False)
            if not np.isnan(found).any():
                return found.tolist()  # type: ignore[no-any-return]
        # SQLite would make a null of NaN.
        return ["NaN" if each is not None and each != each else each for each in column.to_pylist()]
    return column.to_pylist()  # type: ignore[no-any-return]


def _number(text: str | None) -> int | float | str | None:
    """A number of a column that does not hold all of its numbers; as text, if SQLite cannot."""
    if text is None:
        return None
    try:
        whole = int(text)
    except ValueError:
        number = float(text)
        return "NaN" if number != number else number
    return whole if -(2**63) <= whole < 2**63 else text
