"""Initial snapshot of a table: splits, each read by one task.

All splits of a table read the same exported snapshot, each in its own transaction.
Together they return the table exactly as of the consistent point of the snapshot (hazard
B2). A split is a range of pages. Rows do not move within a snapshot, so the ranges
neither overlap nor miss a row.
"""

import threading
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa

from penstock.errors import DefiniteError, TransientError
from penstock.pgclient import Connection, connect, quote_literal
from penstock.sources.postgres.catalog import PgLeaf, PgTable
from penstock.sources.postgres.copy_decoder import CopyDecoder
from penstock.sources.postgres.names import identifier
from penstock.sources.postgres.replication_stream import CopyStream
from penstock.sources.postgres.table_schema import Table
from penstock.sources.postgres.types import ColumnType

__all__ = ["SnapshotSplit", "application_name_of", "import_snapshot", "page_ranges", "splits"]

NOT_PERMITTED: Final = "42501"

PAGES_WORTH_A_TASK: Final = 1_024
"""Minimum number of pages (8 MiB) per additional connection."""


def page_ranges(pages: int, tasks: int) -> list[tuple[int, int | None]]:
    """Return page ranges of nearly equal size for up to `tasks` tasks; the last is unbounded.

    A table may grow after its pages were counted, and rows visible in the snapshot may lie
    in the new pages. The unbounded range includes them. Empty ranges are omitted.

    >>> page_ranges(10, 4)
    [(0, 2), (2, 5), (5, 7), (7, None)]
    >>> page_ranges(0, 4)
    [(0, None)]
    """
    tasks = max(1, min(tasks, pages))
    bounds = [pages * task // tasks for task in range(tasks)]
    ends: list[int | None] = [*bounds[1:], None]
    return list(zip(bounds, ends, strict=True))


@dataclass(frozen=True, slots=True)
class SnapshotSplit:
    """Page range of a table, as of a snapshot. Picklable."""

    parameters: Mapping[str, str] = field(repr=False)
    snapshot: str
    table: str
    oid: int
    sql: str
    schema: pa.Schema
    types: tuple[ColumnType, ...]

    def read(self, stop: threading.Event | None = None) -> Generator[pa.RecordBatch, None, None]:
        """Yield the rows of the split. A blocking wait ends soon after `stop` is set.

        Raises:
            TransientError: the snapshot or server is not available, or `stop` was set.
            DefiniteError: the role is not allowed to read the table.
        """
        with connect(
            self.parameters, application_name=application_name_of(self.oid), stop=stop
        ) as connection:
            connection.execute("BEGIN READ ONLY ISOLATION LEVEL REPEATABLE READ")
            import_snapshot(connection, self.snapshot, f'for the copy of table "{self.table}"')
            decoder = CopyDecoder(len(self.types))
            try:
                for data in CopyStream(connection, self.sql):
                    columns = decoder.decode(data)
                    if columns is not None:
                        yield self._typed(columns)
            except TransientError as error:
                if error.sqlstate != NOT_PERMITTED:
                    raise
                # The error concerns this table only: the other tables of the source continue.
                role = identifier(connection.pgconn.user.decode())
                raise DefiniteError(
                    f'table "{self.table}" cannot be read: {error}',
                    detail=error.detail,
                    hint=f"Run: GRANT SELECT ON {self.table} TO {role}; or grant it the columns "
                    "that are new. Then resync the table.",
                ) from error

    def _typed(self, columns: Sequence[pa.Array]) -> pa.RecordBatch:
        arrays = [kind.from_copy(values) for kind, values in zip(self.types, columns, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


def import_snapshot(connection: Connection, snapshot: str, purpose: str) -> None:
    """Import an exported snapshot into a transaction that has just begun.

    Raises:
        TransientError: the snapshot no longer exists.
    """
    try:
        connection.execute(f"SET TRANSACTION SNAPSHOT {quote_literal(snapshot)}")
    except DefiniteError as error:
        # Always transient, regardless of the SQLSTATE: the exporting session has ended.
        raise TransientError(f"snapshot {purpose} does not exist", detail=str(error)) from error


def splits(
    parameters: Mapping[str, str],
    table: Table,
    snapshot: str,
    *,
    tasks: int,
    server_version: int,
) -> list[SnapshotSplit]:
    """Return the splits of a table, or of its partitions."""
    described = table.described
    parts: Sequence[PgTable | PgLeaf] = [described]
    if described.leaves and all(leaf.selectable and leaf.kind == "r" for leaf in described.leaves):
        parts = described.leaves
    snapshot_splits = []
    for part in parts:
        # Before version 14, a condition on ctid scans all pages, not only the range.
        count = min(tasks, part.pages // PAGES_WORTH_A_TASK) if server_version >= 14_00_00 else 1
        for start, end in page_ranges(part.pages, max(1, count)):
            snapshot_splits.append(
                SnapshotSplit(
                    parameters,
                    snapshot,
                    table.name,
                    table.oid,
                    copy_sql(table, part, start, end),
                    table.schema,
                    tuple(column.type for column in table.columns),
                )
            )
    return snapshot_splits


def application_name_of(oid: int | str) -> str:
    """Return the `application_name` of connections that read a snapshot of table `oid`."""
    return f"penstock copy {oid}"


def copy_sql(table: Table, part: PgTable | PgLeaf, start: int, end: int | None) -> str:
    """Return the COPY statement for pages `[start, end)` of `part`, in the columns of `table`."""
    select_list = ", ".join(
        column.type.select.format(identifier(column.name)) for column in table.columns
    )
    conditions = []
    if start > 0:
        conditions.append(f"ctid >= '({start},0)'::pg_catalog.tid")
    if end is not None:
        conditions.append(f"ctid < '({end},0)'::pg_catalog.tid")
    if table.described.row_filter:
        conditions.append(f"({table.described.row_filter})")
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    only = "" if part.kind == "p" else "ONLY "
    return (
        f"COPY (SELECT {select_list} FROM {only}{part.table_name}{where}) TO STDOUT (FORMAT binary)"
    )
