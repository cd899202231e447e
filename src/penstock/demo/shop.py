"""Small shop with live traffic, whose books balance at every commit.

One transaction writes an order, its lines and the reduced stock, and one transaction reverts them
when the order is cancelled. A reader that sees a part of a transaction therefore sees unbalanced
books: an order whose total is not the sum of its lines, or units that are neither in stock nor in a
line.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Final

import psycopg
from psycopg.types.json import Jsonb

from penstock.demo.repeated_action import RepeatedAction
from penstock.errors import UsageError

__all__ = [
    "BOOKS",
    "TABLES",
    "UNITS",
    "Books",
    "ChangeCounts",
    "Traffic",
    "describe_imbalance",
    "open_shop",
]

CUSTOMERS: Final = 600
PRODUCTS: Final = 120
STOCK: Final = 10_000
ORDERS: Final = 800
LINES: Final = 2
MAX_ORDERS: Final = 5_000
"""Order count above which cancellations balance new orders, to bound a demo that runs for days."""

TABLES: Final[Mapping[str, tuple[str, ...]]] = {
    "customers": ("id", "name", "address", "joined"),
    "products": ("id", "name", "price", "stock", "attributes"),
    "orders": ("id", "customer_id", "status", "total", "placed", "note"),
    "order_lines": ("order_id", "line", "product_id", "quantity", "amount"),
}
"""Columns of each table."""

UNITS: Final = PRODUCTS * STOCK
"""Units of all products together, in stock or in a line."""

_SCHEMA: Final = """
CREATE TABLE customers (
    id int PRIMARY KEY, name text NOT NULL, address text, joined timestamptz NOT NULL
);
CREATE TABLE products (
    id int PRIMARY KEY, name text NOT NULL, price numeric(8,2) NOT NULL,
    stock int NOT NULL CHECK (stock >= 0), attributes jsonb NOT NULL
);
CREATE TABLE orders (
    id bigint PRIMARY KEY, customer_id int NOT NULL REFERENCES customers, status text NOT NULL,
    total numeric(12,2) NOT NULL, placed timestamptz NOT NULL, note text
);
CREATE TABLE order_lines (
    order_id bigint REFERENCES orders, line int, product_id int NOT NULL REFERENCES products,
    quantity int NOT NULL CHECK (quantity > 0), amount numeric(12,2) NOT NULL,
    PRIMARY KEY (order_id, line)
);
"""

_SEED: Final = f"""
INSERT INTO customers
SELECT g, 'customer ' || g, g || ' Mill Lane', timestamptz '2024-01-01' + g * interval '1 hour'
FROM generate_series(1, {CUSTOMERS}) g;
INSERT INTO products
SELECT g, 'product ' || g, 0.5 + g * 1.05, {STOCK}, jsonb_build_object('shelf', g % 9, 'kg', 0.1)
FROM generate_series(1, {PRODUCTS}) g;
INSERT INTO orders
SELECT g, 1 + g % {CUSTOMERS}, 'placed', 0, timestamptz '2025-01-01' + g * interval '1 minute', NULL
FROM generate_series(1, {ORDERS}) g;
INSERT INTO order_lines
SELECT o.id, l, p.id, 1 + o.id % 3, p.price * (1 + o.id % 3)
FROM orders o, generate_series(1, {LINES}) l, products p
WHERE p.id = 1 + (o.id * 7 + l * 31) % {PRODUCTS};
UPDATE orders SET total = (SELECT sum(amount) FROM order_lines WHERE order_id = orders.id);
UPDATE products SET stock = stock - taken
FROM (SELECT product_id, sum(quantity) AS taken FROM order_lines GROUP BY product_id) t
WHERE product_id = id;
ANALYZE
"""

BOOKS: Final = """
SELECT
    (SELECT count(*) FROM (
        SELECT id FROM (
            SELECT id, 1 AS ordered, CAST(replace(CAST(total AS text), '.', '') AS bigint) AS cents
            FROM orders
            UNION ALL
            SELECT order_id, 0, -CAST(replace(CAST(amount AS text), '.', '') AS bigint)
            FROM order_lines
        ) AS amounts GROUP BY id HAVING max(ordered) = 1 AND sum(cents) <> 0
    ) AS unequal),
    (SELECT count(*) FROM order_lines LEFT JOIN orders ON id = order_id WHERE id IS NULL),
    (SELECT coalesce(sum(stock), 0) FROM products)
        + (SELECT coalesce(sum(quantity), 0) FROM order_lines),
    (SELECT count(*) FROM customers) + (SELECT count(*) FROM products)
        + (SELECT count(*) FROM orders) + (SELECT count(*) FROM order_lines)
"""
"""Query for orders with a wrong total, lines without an order, all units, and all rows.

The SQL is valid in Postgres and in SQLite, where a price is text. SQLite joins orders with sums of
lines in quadratic time, so the first value is computed without a join.
"""

Books = tuple[int, int, int, int]


def describe_imbalance(books: Books) -> str:
    """Return a description of unbalanced books; empty if they balance."""
    wrong_totals, orphans, units, _ = books
    errors = []
    if wrong_totals:
        errors.append(f"{wrong_totals} orders whose total is not the sum of their lines")
    if orphans:
        errors.append(f"{orphans} lines without an order")
    if units != UNITS:
        errors.append(f"{units} units in stock and in lines, not {UNITS}")
    return ", ".join(errors)


def open_shop(url: str) -> int:
    """Create the tables and their rows; return the number of rows."""
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in (_SCHEMA + _SEED).split(";\n"):
            connection.execute(statement.encode())
    return CUSTOMERS + PRODUCTS + ORDERS * (1 + LINES)


@dataclass(frozen=True, slots=True)
class ChangeCounts:
    """Number of committed transactions, and of the rows that they wrote."""

    transactions: int = 0
    inserts: int = 0
    updates: int = 0
    deletes: int = 0

    def __sub__(self, other: "ChangeCounts") -> "ChangeCounts":
        """Return the changes after `other`."""
        return ChangeCounts(
            self.transactions - other.transactions,
            self.inserts - other.inserts,
            self.updates - other.updates,
            self.deletes - other.deletes,
        )


@dataclass(slots=True)
class _Rows:
    """Rows written by a transaction."""

    inserts: int = 0
    updates: int = 0
    deletes: int = 0


@dataclass(slots=True)
class Traffic(RepeatedAction):
    """Transactions on the shop, which must have no other writer."""

    counts: ChangeCounts = ChangeCounts()
    _orders: list[int] = field(default_factory=lambda: list(range(1, ORDERS + 1)))
    _customers: int = CUSTOMERS
    _next: int = ORDERS + 1

    @contextmanager
    def _connect(self) -> Iterator[Callable[[], None]]:
        try:
            with psycopg.connect(self.url, autocommit=True) as connection:
                yield lambda: self._transact(connection)
        except psycopg.Error as error:
            raise UsageError(
                "could not write to the database of the shop", detail=f"Postgres reports: {error}"
            ) from error

    def _transact(self, connection: psycopg.Connection) -> None:
        kinds = (self._place, self._cancel, self._update_status, self._rename, self._add_customer)
        weights = (8, 8, 8, 3, 1) if len(self._orders) > MAX_ORDERS else (8, 4, 8, 3, 1)
        (kind,) = self.rng.choices(kinds, weights)
        if len(self._orders) < ORDERS // 2:
            kind = self._place
        rows = _Rows()
        with connection.transaction():
            kind(connection, rows)
        previous = self.counts
        self.counts = ChangeCounts(
            previous.transactions + 1,
            previous.inserts + rows.inserts,
            previous.updates + rows.updates,
            previous.deletes + rows.deletes,
        )

    def _place(self, connection: psycopg.Connection, rows: _Rows) -> None:
        """Insert an order and its lines, and reduce the stock."""
        products = self.rng.sample(range(1, PRODUCTS + 1), self.rng.randint(1, 4))
        lines: list[tuple[int, int, Decimal]] = []
        for product in sorted(products):
            quantity = self.rng.randint(1, 5)
            product_row = connection.execute(
                "UPDATE products SET stock = stock - %s WHERE id = %s AND stock >= %s"
                " RETURNING price",
                [quantity, product, quantity],
            ).fetchone()
            if product_row is not None:
                lines.append((product, quantity, product_row[0] * quantity))
        connection.execute(
            "INSERT INTO orders VALUES (%s, %s, 'placed', %s, now(), %s)",
            [
                self._next,
                self.rng.randint(1, self._customers),
                sum((amount for _, _, amount in lines), Decimal(0)),
                self._note(),
            ],
        )
        for number, line in enumerate(lines, 1):
            connection.execute(
                "INSERT INTO order_lines VALUES (%s, %s, %s, %s, %s)", [self._next, number, *line]
            )
        self._orders.append(self._next)
        self._next += 1
        rows.inserts += 1 + len(lines)
        rows.updates += len(lines)

    def _cancel(self, connection: psycopg.Connection, rows: _Rows) -> None:
        """Delete an order with its lines, and restore the stock."""
        index = self.rng.randrange(len(self._orders))
        self._orders[index], self._orders[-1] = self._orders[-1], self._orders[index]
        order = self._orders.pop()
        lines = connection.execute(
            "DELETE FROM order_lines WHERE order_id = %s RETURNING product_id, quantity", [order]
        ).fetchall()
        for product, quantity in sorted(lines):
            connection.execute(
                "UPDATE products SET stock = stock + %s WHERE id = %s", [quantity, product]
            )
        connection.execute("DELETE FROM orders WHERE id = %s", [order])
        rows.deletes += 1 + len(lines)
        rows.updates += len(lines)

    def _update_status(self, connection: psycopg.Connection, rows: _Rows) -> None:
        """Update the status of some orders in one transaction."""
        orders = self.rng.sample(self._orders, self.rng.randint(1, 3))
        status = self.rng.choice(("paid", "packed", "sent", "delivered"))
        cursor = connection.execute(
            "UPDATE orders SET status = %s WHERE id = ANY (%s)", [status, sorted(orders)]
        )
        rows.updates += cursor.rowcount

    def _rename(self, connection: psycopg.Connection, rows: _Rows) -> None:
        """Update the address of a customer and the attributes of a product."""
        street = self.rng.choice(("Mühlgasse", "Rue de l'Écluse", "水車通り", 'The "Weir"'))
        customer, product = (
            self.rng.randint(1, self._customers),
            self.rng.randint(1, PRODUCTS),
        )
        connection.execute(
            "UPDATE customers SET address = %s WHERE id = %s",
            [f"{self.rng.randint(1, 99)} {street}", customer],
        )
        connection.execute(
            "UPDATE products SET attributes = %s WHERE id = %s",
            [Jsonb({"shelf": self.rng.randint(0, 9), "tags": [street, None]}), product],
        )
        rows.updates += 2

    def _add_customer(self, connection: psycopg.Connection, rows: _Rows) -> None:
        """Insert a customer."""
        self._customers += 1
        connection.execute(
            "INSERT INTO customers VALUES (%s, %s, NULL, now())",
            [self._customers, f"customer {self._customers}"],
        )
        rows.inserts += 1

    def _note(self) -> str | None:
        """Return None, a short text, or a TOAST value, which Postgres omits from updates."""
        match self.rng.randrange(20):
            case 0:
                return self.rng.randbytes(3_000).hex()
            case 1 | 2 | 3:
                return "leave it\nat the neighbour's door"
            case _:
                return None
