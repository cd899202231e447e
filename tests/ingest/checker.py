"""Comparison of collections with their tables.

`histories` reads complete collections: the contents as of `since`, and every later
change with its time. `check` scans them tick by tick (invariants 9 and 11): no
multiplicity is negative, and every invariant over all tables holds at every readable
time. Finally it compares the last contents with the tables, as the server prints them.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import psycopg
import pyarrow as pa

from penstock.data import DIFF, TIME
from penstock.data.collection_name import parse_name
from penstock.persist import Collection
from penstock.pgclient import SETTINGS, quote_identifier
from penstock.servers.postgres import Database
from penstock.sources.postgres.table_schema import LABEL
from penstock.sources.postgres.types import to_text
from tests.ingest.pump import SOURCE, Pump

Row = tuple[str | None, ...]
"""Row, as the server prints its columns."""

State = Mapping[str, Counter[Row]]
Law = Callable[[State], str | None]
"""Invariant: returns the violation in the state of all tables at one time, or None."""


@dataclass(frozen=True)
class History:
    """All changes of a collection, in order of time."""

    name: str
    columns: tuple[str, ...]
    since: int
    upper: int
    changes: Mapping[int, Counter[Row]]


def histories(pump: Pump, tables: Iterable[str]) -> dict[str, History]:
    """Return the histories of the collections of `tables`, up to one upper."""
    with pump.reader(hold=True) as client:
        state = client.state
        uppers = {
            state.collections[state.names[name]].upper
            for name in (f"{SOURCE}_remap", *(f"{SOURCE}.{table}" for table in tables))
        }
        assert len(uppers) == 1, f"uppers differ: {uppers}"
        return {
            table: _history(client.collection(f"{SOURCE}.{table}"), table, *uppers)
            for table in tables
        }


def broken(by_table: Mapping[str, History], law: Law | None = None) -> list[str]:
    """Return the defects of the histories, without a comparison with upstream."""
    wrong = []
    state: dict[str, Counter[Row]] = {table: Counter() for table in by_table}
    begun = {history.since for history in by_table.values()}
    if len(begun) > 1:
        wrong.append(f"tables begin at different times: {begun}")
    for time in sorted({time for history in by_table.values() for time in history.changes}):
        for table, history in by_table.items():
            counts = state[table]
            for row, diff in history.changes.get(time, {}).items():
                counts[row] += diff
                if counts[row] < 0:
                    wrong.append(f"{table} at {time} holds {row} {counts[row]} times")
                if not counts[row]:
                    del counts[row]
        if law is not None and time >= max(begun) and (violation := law(state)) is not None:
            wrong.append(f"at {time}: {violation}")
    return wrong


def differing(pump: Pump, database: Database, tables: Iterable[str]) -> list[str]:
    """Return the differences between the last contents and the tables upstream."""
    wrong = []
    for table, history in histories(pump, tables).items():
        held: Counter[Row] = Counter()
        for changes in history.changes.values():
            held.update(changes)
        held = Counter({row: count for row, count in held.items() if count})
        rows = upstream(database, table, history.columns)
        if held != rows:
            missing, extra = rows - held, held - rows
            wrong.append(
                f"{table}: {sum(missing.values())} rows are missing, such as "
                f"{_few(missing)}; {sum(extra.values())} should not be there, such as "
                f"{_few(extra)}"
            )
    return wrong


def check(
    pump: Pump, database: Database, tables: Iterable[str], law: Law | None = None
) -> dict[str, History]:
    """Assert that the histories are valid and end equal to the tables; return them."""
    tables = list(tables)
    wrong = differing(pump, database, tables)
    by_table = histories(pump, tables)
    wrong += broken(by_table, law)
    assert not wrong, "\n".join(wrong[:10])
    return by_table


def upstream(database: Database, table: str, columns: Iterable[str]) -> Counter[Row]:
    """Return the rows of a table, as the server prints them with the pinned settings."""
    pinned = "; ".join(f"SET {name} = '{value}'" for name, value in SETTINGS.items())
    chosen = ", ".join(map(quote_identifier, columns))
    named = ".".join(map(quote_identifier, parse_name(table) or ()))
    with psycopg.connect(database.url(), autocommit=True) as connection:
        connection.execute(pinned.encode())
        result = connection.execute(f"SELECT {chosen} FROM {named}".encode()).pgresult
        assert result is not None
        return Counter(
            tuple(
                None if (value := result.get_value(row, column)) is None else value.decode()
                for column in range(result.nfields)
            )
            for row in range(result.ntuples)
        )


def _history(collection: Collection, table: str, upper: int) -> History:
    since = collection.since
    chunks = [collection.snapshot(since).arrow()]
    with collection.listen(since) as listener:
        while listener.frontier < upper:
            updates = listener.next_changes(timeout_ms=0)
            assert updates is not None
            chunks.append(updates.arrow())
    changes: dict[int, Counter[Row]] = {}
    names: tuple[str, ...] = ()
    for chunk in chunks:
        names = tuple(name for name in chunk.column_names if name not in (TIME, DIFF))
        columns = [_texts(chunk.schema.field(name), chunk.column(name)) for name in names]
        times, diffs = chunk.column(TIME).to_pylist(), chunk.column(DIFF).to_pylist()
        for time, diff, *row in zip(times, diffs, *columns, strict=True):
            if time < upper:
                changes.setdefault(time, Counter())[tuple(row)] += diff
    return History(table, names, since, upper, changes)


def _texts(field: pa.Field, column: pa.ChunkedArray) -> list[str | None]:
    label = (field.metadata or {}).get(LABEL)
    assert label is not None, f'column "{field.name}" has no label'
    values = column.combine_chunks()
    if isinstance(values, pa.ChunkedArray):
        values = pa.concat_arrays(values.chunks) if values.num_chunks else pa.array([], field.type)
    return [
        value.decode() if isinstance(value, bytes) else value
        for value in to_text(label.decode(), values).to_pylist()
    ]


def _few(rows: Counter[Row]) -> list[str]:
    return [str(row)[:120] for row in list(rows)[:3]]
