"""Collections of documents, reduced into the documents of an endpoint."""

import json
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from penstock import persist
from penstock.connectors.files.__main__ import documents
from penstock.data import DIFF, TIME
from penstock.errors import DefiniteError, IndeterminateError, UsageError
from penstock.failpoints import Action, Failpoint, armed
from tests.materialize.lake import SCHEMA, Endpoint, materializing, once, row

SUMMED = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "amount": {"type": "integer", "reduce": {"strategy": "sum"}},
        "name": {"type": "string"},
        "least": {"type": "integer", "reduce": {"strategy": "minimize"}},
    },
    "required": ["id"],
    "reduce": {"strategy": "merge"},
}
COLUMNS = pa.schema(
    [
        pa.field("seq", pa.int64(), nullable=False),
        pa.field("id", pa.int64(), nullable=False),
        pa.field("amount", pa.int64(), nullable=False),
        pa.field("name", pa.string(), nullable=False),
        pa.field("least", pa.int64(), nullable=False),
    ]
)
TEXTS = pa.schema([pa.field("seq", pa.int64(), nullable=False), pa.field("doc", pa.string())])

Row = tuple[Any, ...]


class Log:
    """An append-only collection."""

    def __init__(self, lake: str, name: str, columns: pa.Schema) -> None:
        self.client = persist.open(f"{lake}/shop", writer="upstream")
        self.collection = self.client.create_or_load(name, schema=columns)

    def add(self, *rows: Row, diff: int = 1) -> None:
        upper = self.collection.upper
        columns = self.collection.schema
        updates = [(*row, upper + at, diff) for at, row in enumerate(rows)]
        table = pa.table(
            [list(each) for each in zip(*updates, strict=True)],
            schema=pa.schema([*columns, (TIME, pa.int64()), (DIFF, pa.int64())]),
        )
        self.collection.compare_and_append(table, upper, upper + len(rows) + 1)


@pytest.fixture
def summed(lake: str) -> Iterator[Log]:
    log = Log(lake, "shop.t", COLUMNS)
    yield log
    log.client.close()


@pytest.fixture
def texts(lake: str) -> Iterator[Log]:
    log = Log(lake, "shop.t", TEXTS)
    yield log
    log.client.close()


def by_columns(schema: Any = SUMMED) -> Mapping[str, Any]:
    return {"shop.t": {"key": ["/id"], "schema": schema, "order": ["seq"]}}


def by_text(schema: Any) -> Mapping[str, Any]:
    return {"shop.t": {"key": ["/id"], "schema": schema, "order": ["seq"], "document": "doc"}}


def table(endpoint: Endpoint, columns: str, name: str = "t") -> list[Row]:
    found = sqlite3.connect(endpoint.folder / "t.db")
    try:
        return sorted(found.execute(f"SELECT {columns} FROM {name}").fetchall())
    finally:
        found.close()


@pytest.mark.parametrize("shards", [1, 2])
def test_documents_of_next_transaction_are_reduced_into_loaded_documents(
    lake: str, summed: Log, tmp_path: Path, shards: int
) -> None:
    endpoint = Endpoint("sqlite", tmp_path)
    summed.add((0, 1, 5, "first", 3), (1, 2, 7, "second", 4), (2, 1, -2, "third", 9))
    with materializing(
        lake, endpoint, tmp_path, shards=shards, collections=by_columns()
    ) as materialization:
        once(materialization)
        assert table(endpoint, "id, amount, name, least") == [
            (1, 3, "third", 3),
            (2, 7, "second", 4),
        ]
        summed.add((3, 1, 10, "fourth", 1), (4, 3, 1, "new", 0))
        once(materialization)
    assert table(endpoint, "id, amount, name, least") == [
        (1, 13, "fourth", 1),
        (2, 7, "second", 4),
        (3, 1, "new", 0),
    ]


@pytest.mark.parametrize("connector", ["sqlite", "staged-files"])
def test_sum_reduction_is_exact_after_crash_at_each_step(
    lake: str, summed: Log, tmp_path: Path, connector: str
) -> None:
    endpoint = Endpoint(connector, tmp_path)
    total = 0
    for number, step in enumerate(
        (
            None,
            Failpoint.PLAN_DONE,
            Failpoint.STORE_DONE,
            Failpoint.RECOVERY_DONE,
            Failpoint.ACKNOWLEDGE_DONE,
        )
    ):
        summed.add(*((10 * number + at, at % 3, 1, "n", 0) for at in range(6)))
        total += 6
        if step is not None:
            with (
                materializing(lake, endpoint, tmp_path, collections=by_columns()) as crashed,
                armed(step, Action.ERROR),
                pytest.raises(IndeterminateError),
            ):
                once(crashed)
        with materializing(lake, endpoint, tmp_path, collections=by_columns()) as materialization:
            once(materialization)
        assert sum(row["amount"] for row in endpoint.rows()) == total, step


def test_delta_updates_are_combined_within_transaction_and_not_loaded(
    lake: str, summed: Log, tmp_path: Path
) -> None:
    endpoint = Endpoint("push-files", tmp_path)
    summed.add((0, 1, 5, "first", 3), (1, 1, 7, "second", 4))
    with materializing(lake, endpoint, tmp_path, collections=by_columns()) as materialization:
        once(materialization)
        summed.add((2, 1, 10, "third", 9), (3, 1, 1, "fourth", 8))
        once(materialization)
        assert materialization.status().bindings[0].delta_updates is True
    pushed = list(documents(tmp_path / "files" / "t"))
    assert [(each["amount"], each["name"]) for each in pushed] == [(12, "second"), (11, "fourth")]


@pytest.mark.parametrize("delete", ["hard", "soft", "ignore"])
def test_document_that_deletes_is_stored_per_delete_mode(
    lake: str, texts: Log, tmp_path: Path, delete: str
) -> None:
    schema = {
        "type": "object",
        "properties": {"id": {"type": "integer"}, "n": {"reduce": {"strategy": "sum"}}},
        "required": ["id"],
        "if": {"properties": {"op": {"const": "d"}}, "required": ["op"]},
        "then": {"reduce": {"strategy": "merge", "delete": True}},
        "else": {"reduce": {"strategy": "merge"}},
    }
    endpoint = Endpoint("sqlite", tmp_path)

    def add(*said: Mapping[str, Any]) -> None:
        start = add.seq  # type: ignore[attr-defined]
        texts.add(*((start + at, json.dumps(each)) for at, each in enumerate(said)))
        add.seq += len(said)  # type: ignore[attr-defined]

    add.seq = 0  # type: ignore[attr-defined]
    add({"id": 1, "n": 1}, {"id": 2, "n": 2})
    with materializing(
        lake, endpoint, tmp_path, collections=by_text(schema), delete=delete
    ) as materialization:
        once(materialization)
        add({"id": 1, "op": "d"}, {"id": 3, "n": 1}, {"id": 3, "op": "d"})
        once(materialization)
        there = {row[0] for row in table(endpoint, "id")}
        marked = "flow_deleted" if delete == "soft" else "0"
        assert (1 in there) is (delete != "hard")
        if delete == "soft":
            assert (1, 1) in table(endpoint, f"id, {marked}")
        add({"id": 1, "n": 4})
        once(materialization)
    # A document after a delete is not reduced into the deleted one, unless deletes are ignored.
    expected = 5 if delete == "ignore" else 4
    held = {row["id"]: row for row in endpoint.rows()}
    assert held[1]["n"] == expected


def test_documents_are_reduced_in_order_columns_sequence(
    lake: str, texts: Log, tmp_path: Path
) -> None:
    schema = {
        "type": "object",
        "properties": {
            "id": {"type": "integer"},
            "all": {"type": "array", "reduce": {"strategy": "append"}},
        },
        "required": ["id"],
        "reduce": {"strategy": "merge"},
    }
    endpoint = Endpoint("sqlite", tmp_path)
    said = [(seq, json.dumps({"id": 1, "all": [seq]})) for seq in range(9)]
    texts.add(*reversed(said))
    with materializing(lake, endpoint, tmp_path, collections=by_text(schema)) as materialization:
        once(materialization)
        assert endpoint.rows() == [{"id": 1, "all": list(range(9))}]


def test_rows_without_key_are_stored_with_mz_count(lake: str, tmp_path: Path) -> None:
    rows = Log(lake, "shop.t", pa.schema([("a", pa.string()), ("b", pa.float64())]))
    endpoint = Endpoint("sqlite", tmp_path)
    counted = {"shop.t": {"key": "row"}}
    rows.add(("x", 1.5), ("x", 1.5), (None, 2.0))
    with materializing(lake, endpoint, tmp_path, collections=counted) as materialization:
        once(materialization)
        assert table(endpoint, "b, a, mz_count") == [(1.5, "x", 2), (2.0, None, 1)]
        rows.add(("x", 1.5), diff=-1)
        rows.add((None, 2.0), diff=-1)
        rows.add(("y", 3.0))
        once(materialization)
        assert table(endpoint, "b, a, mz_count") == [(1.5, "x", 1), (3.0, "y", 1)]
    rows.client.close()


def test_rows_without_key_raise_usage_error_unless_delta_updates(lake: str, tmp_path: Path) -> None:
    rows = Log(lake, "shop.t", pa.schema([("a", pa.string())]))
    rows.add(("x",), ("x",), ("y",))
    with (
        materializing(lake, Endpoint("sqlite", tmp_path), tmp_path) as refused,
        pytest.raises(UsageError, match="has no key") as told,
    ):
        once(refused)
    assert "key: row" in told.value.hint
    (tmp_path / "delta").mkdir()
    with materializing(
        f"{lake}", Endpoint("push-files", tmp_path / "delta"), tmp_path
    ) as materialization:
        once(materialization)
    pushed = list(documents(tmp_path / "delta" / "files" / "t"))
    assert sorted((each["a"], each["mz_count"]) for each in pushed) == [("x", 2), ("y", 1)]
    rows.client.close()


def test_delete_of_reduced_document_raises_definite_error(
    lake: str, summed: Log, tmp_path: Path
) -> None:
    summed.add((0, 1, 5, "first", 3))
    with materializing(
        lake, Endpoint("sqlite", tmp_path), tmp_path, collections=by_columns()
    ) as materialization:
        once(materialization)
        summed.add((0, 1, 5, "first", 3), diff=-1)
        with pytest.raises(DefiniteError, match="has deleted rows"):
            once(materialization)
    assert materialization.status().phase == "stopped"


def test_counted_row_is_deleted_after_column_was_added(lake: str, tmp_path: Path) -> None:
    client = persist.open(f"{lake}/shop", writer="upstream")
    c = client.create_or_load("shop.t", schema=SCHEMA)
    c.compare_and_append([(row(1), 0, 1), (row(2), 0, 1)], 0, 5)
    endpoint = Endpoint("sqlite", tmp_path)
    said = {"shop.t": {"key": "row"}}
    with materializing(lake, endpoint, tmp_path, collections=said) as materialization:
        once(materialization)
        c.alter(pa.schema([*SCHEMA, ("more", pa.string())]))
        c = client.collection("shop.t")
        c.compare_and_append([({**row(1), "more": None}, 5, -1)], 5, 10)
        once(materialization)
    assert [each["id"] for each in endpoint.rows()] == [2]
    client.close()


def test_counted_row_is_deleted_after_float_column_was_widened(lake: str, tmp_path: Path) -> None:
    client = persist.open(f"{lake}/shop", writer="upstream")
    a = pa.schema([pa.field("id", pa.int64(), nullable=False), ("x", pa.float32())])
    c = client.create_or_load("shop.t", schema=a)
    c.compare_and_append([({"id": 1, "x": 0.1}, 0, 1)], 0, 5)
    endpoint = Endpoint("sqlite", tmp_path)
    with materializing(
        lake, endpoint, tmp_path, collections={"shop.t": {"key": "row"}}
    ) as materialization:
        once(materialization)
        c.alter(pa.schema([pa.field("id", pa.int64(), nullable=False), ("x", pa.float64())]))
        c = client.collection("shop.t")
        c.compare_and_append([({"id": 1, "x": float(np.float32(0.1))}, 5, -1)], 5, 10)
        once(materialization)
    assert endpoint.rows() == []
    client.close()


def test_counted_row_with_negative_count_raises_definite_error(lake: str, tmp_path: Path) -> None:
    client = persist.open(f"{lake}/shop", writer="upstream")
    c = client.create_or_load("shop.t", schema=SCHEMA)
    c.compare_and_append([(row(1), 0, 1)], 0, 5)
    endpoint = Endpoint("sqlite", tmp_path)
    with materializing(
        lake, endpoint, tmp_path, collections={"shop.t": {"key": "row"}}
    ) as materialization:
        once(materialization)
        c.compare_and_append([(row(2), 5, -1)], 5, 10)
        with pytest.raises(DefiniteError, match="negative count"):
            once(materialization)
    client.close()
