"""A shop and a bank in one database, with a known checksum of every committed state.

Each transaction of `LedgerTraffic` changes the shop of the demo, moves money between the
tables of the bank and increments the version in table `ledger`. The writer records the
checksum of all tables under that version before it commits:

    observed checksum == history[observed version]

holds for a copy of the database exactly if the copy is a state that the source had.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

import psycopg

from penstock.demo.shop import BOOKS, Books, Traffic, describe_imbalance, open_shop
from penstock.demo.shop import TABLES as SHOP_TABLES
from penstock.errors import UsageError

ACCOUNTS: Final = 40
OPENING: Final = 1_000
MONEY: Final = 2 * ACCOUNTS * OPENING
"""The sum of all balances in every committed state."""

TRANSFERS: Final = 200
"""The number of transfers that the bank keeps; the writer deletes older ones."""

TABLES: Final[Mapping[str, tuple[str, ...]]] = {
    **SHOP_TABLES,
    "checking": ("id", "balance"),
    "savings": ("id", "balance"),
    "transfers": ("number", "payer", "payee", "amount"),
    "ledger": ("id", "version"),
}
"""Columns by table."""

_SCHEMA: Final = f"""
CREATE TABLE checking (id int PRIMARY KEY, balance bigint NOT NULL);
CREATE TABLE savings (id int PRIMARY KEY, balance bigint NOT NULL);
CREATE TABLE transfers (
    number bigint PRIMARY KEY, payer int NOT NULL, payee int NOT NULL, amount bigint NOT NULL
);
CREATE TABLE ledger (id int PRIMARY KEY, version bigint NOT NULL);
INSERT INTO checking SELECT g, {OPENING} FROM generate_series(1, {ACCOUNTS}) g;
INSERT INTO savings SELECT g, {OPENING} FROM generate_series(1, {ACCOUNTS}) g;
INSERT INTO ledger VALUES (1, 0)
"""

CHECKSUM: Final = """
SELECT * FROM
    (SELECT count(*), coalesce(max(version), 0) FROM ledger) l,
    (SELECT coalesce(sum(balance), 0), count(*), coalesce(sum(id * balance), 0) FROM checking) c,
    (SELECT coalesce(sum(balance), 0), count(*), coalesce(sum(id * balance), 0) FROM savings) s,
    (SELECT count(*), coalesce(sum(number), 0),
        coalesce(sum(number * (amount + 7 * payer + 1001 * payee)), 0) FROM transfers) t,
    (SELECT count(*), coalesce(sum(id * length(address)), 0) FROM customers) u,
    (SELECT count(*), coalesce(sum(id * stock), 0) FROM products) p,
    (SELECT count(*), coalesce(sum(id), 0), coalesce(sum(id * length(status)), 0), count(note)
        FROM orders) o,
    (SELECT count(*), coalesce(sum(order_id * (product_id + 1000 * quantity)), 0)
        FROM order_lines) i
"""
"""Sums over all tables, in SQL that Postgres and SQLite both accept."""


@dataclass(frozen=True, slots=True)
class State:
    """One state of all tables, read in one transaction."""

    books: Books
    checksum: tuple[int, ...]

    @property
    def version(self) -> int:
        return self.checksum[1]

    @property
    def is_empty(self) -> bool:
        """Return whether no table has a row."""
        return not any((*self.books, *self.checksum))

    def torn(self) -> str:
        """Return the cross-table invariants that do not hold; an empty string if all do."""
        ledgers, money = self.checksum[0], self.checksum[2] + self.checksum[5]
        wrong = [describe_imbalance(self.books)]
        if ledgers != 1:
            wrong.append(f"{ledgers} rows in ledger, not 1")
        if money != MONEY:
            wrong.append(f"{money} in all accounts, not {MONEY}")
        return ", ".join(filter(None, wrong))


def read_state(query: Callable[[str], Sequence[object]]) -> State:
    """Read a state with a function that returns the single row of a query."""
    books, checksum = (tuple(map(_to_int, query(text))) for text in (BOOKS, CHECKSUM))
    totals, lines, units, rows = books
    return State((totals, lines, units, rows), checksum)


class History:
    """The checksum of each version that the source committed."""

    def __init__(self) -> None:
        self._checksums: dict[int, tuple[int, ...]] = {}

    def record(self, version: int, checksum: tuple[int, ...]) -> None:
        self._checksums[version] = checksum

    def forget_after(self, version: int) -> None:
        """Forget versions that were recorded and then not committed."""
        for later in [number for number in self._checksums if number > version]:
            del self._checksums[later]

    def checksum(self, version: int) -> tuple[int, ...] | None:
        return self._checksums.get(version)

    @property
    def latest(self) -> int:
        return max(self._checksums)


class LedgerTraffic(Traffic):
    """Traffic that resumes after a restart of its server, and records its commits."""

    def __init__(self, url: str, rng: random.Random, rate: float) -> None:
        super().__init__(url, rng, rate)
        self.history = History()
        self._version = 0
        self._connection: psycopg.Connection | None = None

    def create(self) -> None:
        """Create all tables with their first rows, which are version 0."""
        open_shop(self.url)
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(_SCHEMA.encode())
            self.history.record(0, _checksum(connection))

    @contextmanager
    def _acting(self) -> Iterator[Callable[[], None]]:
        try:
            yield self._act
        except psycopg.Error as error:
            raise UsageError("traffic has ended", detail=f"Postgres says: {error}") from error
        finally:
            self._disconnect()

    def _act(self) -> None:
        try:
            if self._connection is None:
                self._connection = psycopg.connect(self.url, autocommit=True, connect_timeout=5)
                self._resume(self._connection)
            self._transact(self._connection)
        except psycopg.OperationalError:
            self._disconnect()

    def _disconnect(self) -> None:
        if self._connection is not None:
            with suppress(psycopg.Error):
                self._connection.close()
            self._connection = None

    def _resume(self, connection: psycopg.Connection) -> None:
        """Learn from the server whether the last transaction was committed."""
        ((self._version,),) = connection.execute("SELECT version FROM ledger").fetchall()
        self.history.forget_after(self._version)
        self._orders = [id for (id,) in connection.execute("SELECT id FROM orders").fetchall()]
        ((self._customers,),) = connection.execute("SELECT max(id) FROM customers").fetchall()

    def _transact(self, connection: psycopg.Connection) -> None:
        version = self._version + 1
        with connection.transaction():
            super()._transact(connection)
            self._move_money(connection, version)
            connection.execute("UPDATE ledger SET version = %s", [version])
            # Before the commit: an observer may see the version before COMMIT returns here.
            self.history.record(version, _checksum(connection))
        self._version = version

    def _move_money(self, connection: psycopg.Connection, version: int) -> None:
        payer, payee = (self.rng.randint(1, ACCOUNTS) for _ in range(2))
        amount = self.rng.randint(-100, 100)
        match self.rng.randrange(10):
            case 0:  # A savings account is closed.
                connection.execute(
                    "WITH closed AS (DELETE FROM savings WHERE id = %s RETURNING balance)"
                    " UPDATE checking SET balance = checking.balance + closed.balance FROM closed"
                    " WHERE id = %s",
                    [payee, payer],
                )
            case 1:
                connection.execute(
                    "INSERT INTO savings VALUES (%s, 0) ON CONFLICT DO NOTHING", [payee]
                )
            case _:
                connection.execute(
                    "WITH paid AS (UPDATE savings SET balance = balance + %s WHERE id = %s"
                    " RETURNING 1)"
                    " UPDATE checking SET balance = balance - %s FROM paid WHERE id = %s",
                    [amount, payee, amount, payer],
                )
        connection.execute(
            "INSERT INTO transfers VALUES (%s, %s, %s, %s)", [version, payer, payee, amount]
        )
        connection.execute("DELETE FROM transfers WHERE number <= %s", [version - TRANSFERS])


def _checksum(connection: psycopg.Connection) -> tuple[int, ...]:
    (row,) = connection.execute(CHECKSUM.encode()).fetchall()
    return tuple(map(_to_int, row))


def _to_int(value: object) -> int:
    return int(str(value))
