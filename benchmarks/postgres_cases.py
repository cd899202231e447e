"""Workloads of the stream benchmarks: four cases, each a table and its changes.

    narrow        4 small columns, inserted by transactions of 10,000 rows
    wide          12 columns of the usual types, inserted the same way
    full_update   updates of `wide` rows, under REPLICA IDENTITY FULL
    tiny_tx       `narrow` rows, each in a separate transaction

A row is a function of its number. The expected rows are therefore known, and a query of the
server is the check.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

__all__ = ["CASES", "WIDE_COLUMNS", "Case", "wide_inserts"]

NARROW_COLUMNS: Final = "id bigint PRIMARY KEY, quantity int, city text, at timestamptz"

NARROW_ROW: Final = (
    "g, (g * 7919 % 1000)::int, 'city-' || g % 500, timestamptz '2024-01-01Z' + g * interval '1 s'"
)

WIDE_COLUMNS: Final = """
    id bigint PRIMARY KEY,
    customer int NOT NULL,
    quantity smallint,
    price numeric(12,2),
    weight double precision,
    paid boolean,
    ordered_on date,
    ordered_at timestamp,
    changed_at timestamptz,
    status text,
    note varchar(200),
    token uuid
"""


def wide_rows(version: str = "0") -> str:
    """Return the select list for wide rows of the numbers `g`, after `version` updates."""
    seed = f"(g + {version} * 1000003::bigint)"
    return f"""
        g,
        ({seed} * 7919 % 100000)::int,
        ({seed} % 100)::smallint,
        ({seed} * 31 % 10000000) / 100.0,
        {seed} / 7.0::float8,
        {seed} % 3 = 0,
        date '2020-01-01' + ({seed} % 2000)::int,
        timestamp '2024-01-01' + {seed} % 100000000 * interval '1.001 s',
        timestamptz '2024-01-01Z' + {seed} % 100000000 * interval '1 s',
        (ARRAY['new', 'paid', 'sent', NULL])[1 + {seed} % 4],
        'note of ' || {seed} || repeat(' and more', ({seed} % 4)::int),
        ('00000000-0000-4000-8000-' || lpad(to_hex({seed}), 12, '0'))::uuid
    """


def wide_inserts(table: str, first: str, last: str) -> str:
    """Return a statement that inserts wide rows with the numbers `first` to `last`."""
    return f"INSERT INTO {table} SELECT {wide_rows()} FROM generate_series({first}, {last}) g"


@dataclass(frozen=True, slots=True)
class Case:
    """A table, its initial rows, and the changes of the stream."""

    name: str
    columns: str
    base: str = ""
    """Statement that inserts the initial rows; `{rows}` is their number."""

    step: str = ""
    """Statement of one transaction, for the rows `first` to `last`."""

    per_transaction: int = 10_000
    arrived: str = "id = {rows}"
    """Condition for a row of the last transaction."""

    @property
    def create(self) -> tuple[str, ...]:
        """Statements that create the empty table."""
        full = "ALTER TABLE stream REPLICA IDENTITY FULL"
        return (f"CREATE TABLE stream ({self.columns})", *([full] if self.base else []))

    def changes(self, rows: int) -> str:
        """Return one statement with all transactions; it commits after each."""
        return f"""
            DO $$
            DECLARE first bigint := 1; last bigint;
            BEGIN
                WHILE first <= {rows} LOOP
                    last := least(first + {self.per_transaction} - 1, {rows});
                    {self.step};
                    COMMIT;
                    first := last + 1;
                END LOOP;
            END $$
        """


_NARROW: Final = f"INSERT INTO stream SELECT {NARROW_ROW} FROM generate_series(first, last) g"
_ONE: Final = "INSERT INTO stream SELECT " + NARROW_ROW + " FROM (SELECT first) AS one (g)"
_SETS: Final = "customer, quantity, price, weight, paid, status, note"

CASES: Final[Mapping[str, Case]] = MappingProxyType(
    {
        case.name: case
        for case in (
            Case("narrow", NARROW_COLUMNS, step=_NARROW),
            Case("wide", WIDE_COLUMNS, step=wide_inserts("stream", "first", "last")),
            Case(
                "full_update",
                WIDE_COLUMNS,
                base=wide_inserts("stream", "1", "{rows}"),
                step=f"UPDATE stream SET ({_SETS}) = (SELECT {_SETS} FROM (SELECT "
                f"{wide_rows('1')} FROM (SELECT stream.id) AS one (g)) AS new (id, customer, "
                "quantity, price, weight, paid, ordered_on, ordered_at, changed_at, status, "
                "note, token)) WHERE id BETWEEN first AND last",
                arrived="id = {rows} AND note LIKE 'note of ' || 1000003 + {rows} || '%'",
            ),
            Case("tiny_tx", NARROW_COLUMNS, step=_ONE, per_transaction=1),
        )
    }
)
