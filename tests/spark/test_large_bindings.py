"""Transactions that Spark reads and sorts, with bindings of every kind.

The size threshold is 0, so a little data takes the path of a large transaction. The
endpoint must hold the same rows as after the path of small transactions.
"""

import ast
import json
import sqlite3
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from tests.materialize.lake import Endpoint, materializing, once
from tests.materialize.test_documents import COLUMNS, SUMMED

import penstock
from penstock import persist
from penstock.engine.storage_access.spark import find_native_root
from penstock.materialize.runner import LocalRunner, Runner
from penstock.materialize.spark import SparkRunner

ORDERS: Final = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        ("name", pa.string()),
        ("amount", pa.int32()),
        ("dropped", pa.string()),
    ]
)
PRICES: Final = pa.schema(
    [
        pa.field("region", pa.string(), nullable=False),
        pa.field("item", pa.binary(), nullable=False),
        ("price", pa.decimal128(12, 2)),
        ("since", pa.timestamp("us", tz="UTC")),
    ]
)
TEXTS: Final = pa.schema([pa.field("seq", pa.int64(), nullable=False), ("doc", pa.string())])
DELETING: Final = {
    "type": "object",
    "properties": {"id": {"type": "integer"}, "n": {"reduce": {"strategy": "sum"}}},
    "required": ["id"],
    "if": {"properties": {"op": {"const": "d"}}, "required": ["op"]},
    "then": {"reduce": {"strategy": "merge", "delete": True}},
    "else": {"reduce": {"strategy": "merge"}},
}
FOLDED: Final = {
    **SUMMED,
    "properties": {**SUMMED["properties"], "name": {"type": "string", "minLength": 1}},
}
COLLECTIONS: Final[Mapping[str, Any]] = {
    "shop.native": {"key": ["/id"], "schema": SUMMED, "order": ["seq"]},
    "shop.folded": {"key": ["/id"], "schema": FOLDED, "order": ["seq"]},
    "shop.texts": {"key": ["/id"], "schema": DELETING, "order": ["seq"], "document": "doc"},
    "shop.keyless": {"key": "row"},
}
BINDINGS: Final[Sequence[Mapping[str, Any]]] = [
    {"collection": "shop.orders", "resource": {"table": "orders"}},
    {"collection": "shop.prices", "resource": {"table": "prices"}},
    {"collection": "shop.native", "resource": {"table": "native"}},
    {"collection": "shop.prices", "resource": {"table": "soft"}, "delete": "soft"},
    {"collection": "shop.folded", "resource": {"table": "folded"}},
    {
        "collection": "shop.orders",
        "resource": {"table": "orders_log"},
        "delta_updates": True,
        "fields": {"exclude": ["dropped"]},
    },
    {"collection": "shop.texts", "resource": {"table": "texts"}},
    {"collection": "shop.keyless", "resource": {"table": "keyless"}},
]

Updates = Sequence[tuple[Mapping[str, Any], int, int]]


class Shop:
    """Collections of every kind that advance together."""

    def __init__(self, lake: str) -> None:
        self.client = persist.open(f"{lake}/shop", writer="upstream")
        made: Mapping[str, tuple[pa.Schema, Sequence[str]]] = {
            "orders": (ORDERS, ["id"]),
            "prices": (PRICES, ["region", "item"]),
            "native": (COLUMNS, ()),
            "folded": (COLUMNS, ()),
            "texts": (TEXTS, ()),
            "keyless": (pa.schema([("a", pa.string())]), ()),
        }
        self.collections = {
            name: self.client.create_or_load(f"shop.{name}", schema=schema, key_columns=key)
            for name, (schema, key) in made.items()
        }
        self.upper = 0

    def append(self, **updates: Updates) -> None:
        """Append changes to some collections, and advance all collections by 10."""
        for name, collection in self.collections.items():
            collection.compare_and_append(updates.get(name, []), self.upper, self.upper + 10)
        self.upper += 10


def order(id: int, name: str, dropped: str | None = "d") -> Mapping[str, Any]:
    return {"id": id, "name": name, "amount": id * 10, "dropped": dropped}


def price(region: str, item: bytes, amount: str) -> Mapping[str, Any]:
    return {"region": region, "item": item, "price": Decimal(amount), "since": None}


def event(seq: int, id: int) -> Mapping[str, Any]:
    return {"seq": seq, "id": id, "amount": seq, "name": f"n{seq}", "least": -seq}


def text(seq: int, **document: Any) -> Mapping[str, Any]:
    return {"seq": seq, "doc": json.dumps(document)}


def held(folder: Path) -> Mapping[str, Sequence[tuple[Any, ...]]]:
    """Return all rows of all tables of the endpoint."""
    connection = sqlite3.connect(folder / "t.db")
    try:
        return {
            table: sorted(connection.execute(f"SELECT * FROM {table}").fetchall(), key=repr)
            for table in (each["resource"]["table"] for each in BINDINGS)
        }
    finally:
        connection.close()


def bring(
    lake: str, folder: Path, jobs: Runner, shards: int, bindings: Sequence[Mapping[str, Any]]
) -> Mapping[str, Sequence[tuple[Any, ...]]]:
    endpoint = Endpoint("sqlite", folder)
    with materializing(
        lake,
        endpoint,
        folder,
        shards=shards,
        jobs=jobs,
        bindings=bindings,
        collections=COLLECTIONS,
        name=folder.name,
    ) as materialization:
        once(materialization)
    return held(folder)


@pytest.mark.parametrize("shards", [1, 2])
def test_large_and_small_transactions_store_same_rows_for_every_kind_of_binding(
    spark: SparkSession, tmp_path: Path, shards: int
) -> None:
    lake = f"file:{tmp_path / 'lake'}"
    shop = Shop(lake)
    ways: Mapping[str, Runner] = {
        "large": SparkRunner(spark, lambda url: find_native_root(spark, url), large_bytes=0),
        "small": LocalRunner(),
    }
    for name in ways:
        (tmp_path / name).mkdir()

    def both(bindings: Sequence[Mapping[str, Any]]) -> Mapping[str, Sequence[tuple[Any, ...]]]:
        large, small = (
            bring(lake, tmp_path / name, jobs, shards, bindings) for name, jobs in ways.items()
        )
        assert large == small
        return large

    shop.append(
        orders=[(order(id, f"first {id}"), 3, 1) for id in range(9)],
        prices=[(price("eu", bytes([n]), f"{n}.50"), 2 + n, 1) for n in range(5)],
        native=[(event(n, n % 3), n % 10, 1) for n in range(12)],
        folded=[(event(n, n % 4), n % 10, 1) for n in range(12)],
        texts=[(text(n, id=n, n=1), n, 1) for n in range(4)],
        keyless=[({"a": "xy"[n % 2]}, n, 1) for n in range(7)],
    )
    found = both(BINDINGS)
    assert {name: len(rows) for name, rows in found.items()} == {
        "orders": 9,
        "prices": 5,
        "soft": 5,
        "native": 3,
        "folded": 4,
        "orders_log": 9,
        "texts": 4,
        "keyless": 2,
    }

    # Updated and deleted rows, deleting documents, a new column and a widened column.
    orders = shop.collections["orders"]
    wider = ORDERS.set(2, pa.field("amount", pa.int64()))
    orders.alter(wider.append(pa.field("note", pa.string())))
    shop.collections["orders"] = shop.client.collection("shop.orders")
    upper = shop.upper
    shop.append(
        orders=[
            ({**order(1, "first 1"), "note": None}, upper, -1),
            ({**order(1, "second 1", None), "amount": 1 << 40, "note": "new"}, upper, 1),
            ({**order(2, "first 2"), "note": None}, upper + 1, -1),
            ({**order(20, "second 20", None), "note": "new"}, upper + 2, 1),
        ],
        prices=[
            (price("eu", b"\x01", "1.50"), upper, -1),
            (price("us", b"\x01", "7.25"), upper, 1),
        ],
        native=[(event(20 + n, n), upper + n, 1) for n in range(5)],
        folded=[(event(20 + n, n), upper + n, 1) for n in range(5)],
        texts=[(text(10, id=1, op="d"), upper, 1), (text(11, id=9, n=5), upper + 1, 1)],
        keyless=[({"a": "x"}, upper, -1), ({"a": None}, upper + 1, 1)],
    )
    found = both(BINDINGS)
    assert sorted(row[0] for row in found["orders"]) == [0, 1, 3, 4, 5, 6, 7, 8, 20]
    assert (1 << 40) in [value for row in found["orders"] for value in row]
    assert len(found["prices"]) == 5
    assert len(found["soft"]) == 6

    # Some bindings are backfilled, next to bindings that only have changes. Several shards
    # do not truncate a table, so they rewrite only rows whose earlier contents are known.
    rewritten = ("orders", "soft", "native", "folded", "texts") if shards == 1 else ("orders",)
    upper = shop.upper
    shop.append(
        orders=[({**order(3, "first 3"), "note": None}, upper, -1)],
        prices=[(price("us", b"\x01", "7.25"), upper, -1)],
        native=[(event(40, 0), upper, 1)],
        keyless=[({"a": "z"}, upper + 1, 2)],
    )
    found = both(
        [{**each, "backfill": int(each["resource"]["table"] in rewritten)} for each in BINDINGS]
    )
    assert len(found["orders"]) == 8
    assert len(found["prices"]) == 4
    shop.client.close()


def test_modules_that_import_pyspark_do_not_use_positional_union() -> None:
    checked = 0
    for path in sorted(Path(penstock.__file__).parent.rglob("*.py")):
        text = path.read_text()
        if "pyspark" not in text:
            continue
        checked += 1
        positional = [
            f"{path}:{node.lineno}"
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Attribute) and node.attr in ("union", "unionAll")
        ]
        assert not positional, "columns change places: use unionByName"
    assert checked > 10
