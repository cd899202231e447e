"""Comparison of source, collection and target as of one time.

Each row is compared as text, column by column, as Postgres prints it. A collection can print its
values in this form, and SQLite stores them in it. The books of the shop must balance in all three.
Of a topic, the committed records are compared. A comparison of almost no rows proves nothing, and
fails.
"""

import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psycopg
import pyarrow as pa

from penstock import persist
from penstock.data import DIFF
from penstock.data.schema import label_of
from penstock.demo.clicks import COLUMNS, TOPIC, ClickCounts, committed_clicks
from penstock.demo.shop import BOOKS, TABLES, Books, ChangeCounts, describe_imbalance
from penstock.ingest import find_progress_view
from penstock.persist.lake import find_collection, time_of
from penstock.sources.registry import to_text

__all__ = [
    "FEWEST_ROWS",
    "Compared",
    "Places",
    "Row",
    "books_in_sqlite",
    "compare",
    "position",
    "rows_in_collection",
    "rows_in_postgres",
    "rows_in_sqlite",
    "time_at",
]

FEWEST_ROWS: Final = 1_000
MAX_REPORTED: Final = 3
"""Maximum number of reported differences per table."""

Row = tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class Places:
    """Addresses of source, lake and target."""

    postgres: str
    lake: str
    sqlite: Path
    source: str = "shop"
    brokers: str | None = None
    """Brokers of the topic of clicks, if there is one."""

    def collection(self, table: str) -> str:
        """Return the name of the collection of a table."""
        return f"{self.source}.public.{table}"


@dataclass(frozen=True, slots=True)
class Compared:
    """Result of a comparison."""

    as_of: int
    rows: int
    """Rows of the source, in all tables."""

    updates: int
    deletes: int
    inserts: int
    transactions: int
    """Number of upstream changes during replication."""

    first_row_s: float
    looks: int
    """Number of checks of the books in SQLite while the pipeline ran."""

    differences: tuple[str, ...]
    """The first few differences of each table, and books that did not balance."""

    clicks: int | None = None
    """Number of committed records of the topic, if there is one."""

    aborted: int = 0
    """Number of clicks sent in aborted transactions."""

    @property
    def equal(self) -> bool:
        """Return whether all three have the same contents."""
        return not self.differences

    @property
    def trivial(self) -> str:
        """Reason why equality would prove nothing; empty if it proves something."""
        if self.rows < FEWEST_ROWS:
            return f"only {self.rows} rows were compared, fewer than {FEWEST_ROWS}"
        if not self.updates:
            return "no row was updated during replication"
        if not self.deletes:
            return "no row was deleted during replication"
        if self.clicks is not None and not (self.clicks and self.aborted):
            return f"{self.clicks} clicks were committed and {self.aborted} aborted"
        return ""

    def to_json(self) -> dict[str, Any]:
        """Return the result as a JSON object."""
        return {
            "first_row_s": self.first_row_s,
            "rows": self.rows,
            "updates": self.updates,
            "deletes": self.deletes,
            "equal": self.equal,
            "trivial": self.trivial or None,
            "inserts": self.inserts,
            "transactions": self.transactions,
            "looks": self.looks,
            "as_of": self.as_of,
            "differences": list(self.differences),
        } | ({} if self.clicks is None else {"clicks": self.clicks, "aborted": self.aborted})


def compare(
    places: Places,
    as_of: int,
    *,
    changes: ChangeCounts,
    clicks_sent: ClickCounts | None = None,
    first_row_s: float = 0.0,
    looks: int = 0,
    torn: str = "",
) -> Compared:
    """Compare source, collections and target, which must have reached `as_of`.

    There must be no concurrent writer. `changes` counts the changes during replication,
    `clicks_sent` the clicks sent to the topic. `looks` is the number of checks of the books in the
    target, and `torn` describes the imbalance that one of them found; empty if there was none.
    """
    rows, clicks, differences = 0, None, list[str]()
    with (
        psycopg.connect(places.postgres, autocommit=True) as source,
        closing(sqlite3.connect(places.sqlite)) as target,
        closing(sqlite3.connect(":memory:")) as copy,
    ):
        source.execute("SET TimeZone = 'UTC'; SET DateStyle = 'ISO'")
        for table, columns in TABLES.items():
            upstream = rows_in_postgres(source, table, columns)
            stored = rows_in_collection(places.lake, places.collection(table), columns, as_of)
            written = rows_in_sqlite(target, table, columns)
            rows += upstream.total()
            differences += _differences(table, columns, "Postgres", upstream, stored, written)
            copy.execute(f"CREATE TABLE {table} ({', '.join(columns)})")
            marks = ", ".join("?" * len(columns))
            copy.executemany(f"INSERT INTO {table} VALUES ({marks})", stored.elements())
        if places.brokers is not None:
            columns = (*COLUMNS, "_partition", "_offset")
            upstream = committed_clicks(places.brokers)
            stored = rows_in_collection(places.lake, TOPIC, columns, as_of)
            written = rows_in_sqlite(target, TOPIC, columns)
            clicks = upstream.total()
            differences += _differences(TOPIC, columns, "the topic", upstream, stored, written)
        (books,) = source.execute(BOOKS.encode()).fetchall()
        sides = {
            "Postgres": books,
            "the collections": copy.execute(BOOKS).fetchone(),
            "SQLite": target.execute(BOOKS).fetchone(),
        }
    for side, books in sides.items():
        if imbalance := describe_imbalance(books):
            differences.append(f"the books of {side} do not balance: {imbalance}")
    if torn:
        differences.append(f"the books of SQLite did not balance during replication: {torn}")
    return Compared(
        as_of=as_of,
        rows=rows,
        updates=changes.updates,
        deletes=changes.deletes,
        inserts=changes.inserts,
        transactions=changes.transactions,
        first_row_s=first_row_s,
        looks=looks,
        differences=tuple(differences),
        clicks=clicks,
        aborted=0 if clicks_sent is None else clicks_sent.aborted,
    )


def position(postgres: str) -> int:
    """Return the current WAL position; everything committed before the call is below it."""
    with psycopg.connect(postgres, autocommit=True) as connection:
        (row,) = connection.execute("SELECT pg_current_wal_insert_lsn() - '0/0'").fetchall()
        return int(row[0])


def time_at(places: Places, lsn: int, ends: Mapping[int, int] | None = None) -> int | None:
    """Return a time when the remap bindings have reached these positions; None if there is none.

    The positions are an LSN of Postgres and the end offsets of the topic's partitions.
    """
    time, rows = _progress(places, places.source)
    if not any(row["lsn"] >= lsn for row in rows):
        return None
    if ends is None:
        return time
    clicks_time, rows = _progress(places, TOPIC)
    bound = {row["partition"]: row["offset"] for row in rows}
    has_reached = all(bound.get(partition, 0) >= end for partition, end in ends.items())
    return max(time, clicks_time) if has_reached else None


def _progress(places: Places, source: str) -> tuple[int, Sequence[Mapping[str, Any]]]:
    """Return the latest time of a source, and its remap bindings as of that time."""
    view = find_progress_view(
        places.lake, f"{source}_progress", hold=False, settings=persist.Settings()
    )
    if view is None:
        return 0, ()
    client, bindings = view
    with client:
        latest = time_of("latest", bindings.remap.state)
        return latest, bindings.as_of(latest).to_pylist()


def books_in_sqlite(path: Path) -> Books | None:
    """Return the books as of the last commit; None if there are no rows yet."""
    if not path.exists():
        return None
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as target:
            books: Books = target.execute(BOOKS).fetchone()
    except sqlite3.OperationalError:
        return None  # The tables do not exist yet.
    return books if books[3] else None


def rows_in_postgres(
    source: psycopg.Connection, table: str, columns: Sequence[str]
) -> Counter[Row]:
    """Return the rows of a table, each value as Postgres prints it."""
    texts = ", ".join(f"{column}::text" for column in columns)
    return Counter(source.execute(f"SELECT {texts} FROM {table}".encode()).fetchall())


def rows_in_collection(lake: str, name: str, columns: Sequence[str], as_of: int) -> Counter[Row]:
    """Return the rows of a collection as of a time, each value as its source prints it."""
    client, collection = find_collection(lake, name, hold=False, settings=persist.Settings())
    with client:
        snapshot = collection.snapshot(as_of).arrow()
    stored: Counter[Row] = Counter()
    texts = [_texts(snapshot, column) for column in columns]
    for count, *row in zip(snapshot.column(DIFF).to_pylist(), *texts, strict=True):
        stored[tuple(row)] += count
    return stored


def rows_in_sqlite(target: sqlite3.Connection, table: str, columns: Sequence[str]) -> Counter[Row]:
    """Return the rows of a table, each value as text."""
    rows = target.execute(f"SELECT {', '.join(columns)} FROM {table}")
    return Counter(tuple(None if value is None else str(value) for value in row) for row in rows)


def _texts(table: pa.Table, name: str) -> list[str | None]:
    label = label_of(table.schema.field(name))
    values = table.column(name).combine_chunks()
    if label is None:  # A column that is not from Postgres.
        return [None if value is None else str(value) for value in values.to_pylist()]
    texts: list[str | None] = to_text(label, values).to_pylist()
    return texts


def _differences(
    table: str,
    columns: Sequence[str],
    upstream_name: str,
    upstream: Counter[Row],
    stored: Counter[Row],
    written: Counter[Row],
) -> Iterable[str]:
    """Yield a description of missing and of unexpected rows."""
    unexpected = f"has, and {upstream_name} does not have,"
    for verb, place, rows in (
        ("is missing", "the collection", upstream - stored),
        (unexpected, "the collection", stored - upstream),
        ("is missing", "SQLite", upstream - written),
        (unexpected, "SQLite", written - upstream),
    ):
        for row in list(rows)[:MAX_REPORTED]:
            values = (f"{c}={v!s:.40}" for c, v in zip(columns, row, strict=True))
            yield f"{table}: {place} {verb} {', '.join(values)}"
        if len(rows) > MAX_REPORTED:
            yield f"{table}: {place} {verb} {len(rows) - MAX_REPORTED} more rows"
