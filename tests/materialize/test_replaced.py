"""Bindings of a collection that was replaced by another of its name."""

import contextlib
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock.errors import IndeterminateError
from penstock.failpoints import Action, Failpoint, tripped
from penstock.materialize.building import IncompatibleResource
from penstock.materialize.driver import StoppedByError
from penstock.persist import AppendTo, Begin, Replace
from tests.materialize.lake import KEYED, TU, Endpoint, Table, materializing, once, row
from tests.materialize.test_in_error import fail


def replace_table(table: Table, time: int, rows: Sequence[Mapping[str, Any]]) -> None:
    """Move the name of the table to a new collection without the column `amount`."""
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), ("name", pa.string())])
    old = table.collection
    new = table.client.create_or_load("shop.t-new", schema=schema, key_columns=["id"])
    updates = [(each, time, 1) for each in rows]
    table.client.append_all(
        [AppendTo(new, updates, 0, time + 10)], [Begin(new, time), Replace(old, new, time)]
    )


@pytest.mark.parametrize("on_error", ["stop", "leave_behind"])
def test_binding_of_replaced_collection_is_written_again_from_the_new_one(
    lake: str, table: Table, tmp_path: Path, on_error: str
) -> None:
    other = table.client.create_or_load("shop.u", **KEYED)
    other.compare_and_append([(row(1), 0, 1)], 0, 20)
    endpoint = Endpoint("sqlite", tmp_path)
    renamed = [{"id": 3, "name": "three"}, {"id": 100, "name": "hundred"}]
    with materializing(
        lake, endpoint, tmp_path, bindings=TU, section={"on_error": on_error}
    ) as materialization:
        once(materialization)
        before = table.contents()
        old = table.collection.id
        fail(table, 25)
        other.compare_and_append([(row(2), 30, 1)], 20, 40)
        if on_error == "stop":
            with pytest.raises(StoppedByError):
                once(materialization)
        else:
            once(materialization)
        assert endpoint.rows() == before
        replace_table(table, 60, renamed)
        other.compare_and_append([(row(3), 61, 1)], 40, 70)
        once(materialization)
        assert endpoint.rows() == renamed
        assert [each["id"] for each in endpoint.rows("u")] == [1, 2, 3]
        new = table.client.collection("shop.t")
        new.compare_and_append([({"id": 3, "name": "three"}, 75, -1)], 70, 80)
        other.compare_and_append([], 70, 80)
        once(materialization)
        assert endpoint.rows() == renamed[1:]
    # Nothing holds the old collection any more.
    for id in (old, new.id):
        as_of = None if id == new.id else 0
        table.client.collection("shop.t", as_of=as_of).allow_compaction(79).result()
    assert old not in table.client.state.collections


def test_transaction_planned_before_a_replacement_is_finished_with_the_old_collection(
    lake: str, table: Table, tmp_path: Path
) -> None:
    endpoint = Endpoint("sqlite", tmp_path)
    with materializing(lake, endpoint, tmp_path) as materialization:
        once(materialization)
        table.change()
        with tripped(Failpoint.PLAN_DONE, Action.ERROR), pytest.raises(IndeterminateError):
            once(materialization)
    planned = table.contents()
    upper = table.collection.upper
    renamed = [{"id": 100, "name": "hundred"}]
    replace_table(table, upper + 5, renamed)
    table.client.collection("shop.t", as_of=0).allow_compaction(upper + 4).result()
    with materializing(lake, endpoint, tmp_path) as materialization:
        finished: list[list[dict[str, Any]]] = []
        commit = materialization.commit

        def committed(*arguments: Any, **named: Any) -> None:
            finished.append(endpoint.rows())
            commit(*arguments, **named)

        materialization.commit = committed  # type: ignore[method-assign]
        once(materialization)
    assert finished[0] == planned
    assert endpoint.rows() == renamed


def change_schema(
    table: Table, types: Mapping[str, pa.DataType], amount: Any, key: Sequence[str]
) -> None:
    """Move the name of the table to a new collection with one row."""
    fields = [pa.field(name, each, nullable=name not in key) for name, each in types.items()]
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), *fields])
    old = table.collection
    new = table.client.create_or_load("shop.t-new", schema=schema, key_columns=key)
    time = old.upper + 5
    updates = [({"id": 1, "name": "a", "amount": amount}, time, 1)]
    table.client.append_all(
        [AppendTo(new, updates, 0, time + 10)], [Begin(new, time), Replace(old, new, time)]
    )


def test_type_change_of_replaced_collection_reaches_the_column_of_the_endpoint(
    lake: str, table: Table, tmp_path: Path
) -> None:
    endpoint = Endpoint("sqlite", tmp_path)
    with materializing(lake, endpoint, tmp_path) as materialization:
        once(materialization)
        change_schema(table, {"name": pa.string(), "amount": pa.string()}, "many", key=["id"])
        once(materialization)
    stored = sqlite3.connect(tmp_path / "t.db").execute("SELECT id, name, amount FROM t")
    assert stored.fetchall() == [(1, "a", "many")]


INCOMPATIBLE = {
    "type": ({"name": pa.string(), "amount": pa.bool_()}, True, ["id"], 'column "amount" is'),
    "key": (
        {"name": pa.string(), "amount": pa.int64()},
        7,
        ["id", "name"],
        r"has the key \(id\), not \(id, name\)",
    ),
}


@pytest.mark.parametrize("change", INCOMPATIBLE)
@pytest.mark.parametrize(
    "step",
    [
        Failpoint.APPLY_DONE,
        Failpoint.PLAN_DONE,
        Failpoint.RESOURCE_DROPPED,
        Failpoint.STORE_DONE,
        Failpoint.RECOVERY_DONE,
    ],
)
def test_incompatible_replacement_needs_allow_drop_and_survives_a_crash(
    lake: str, table: Table, tmp_path: Path, change: str, step: Failpoint
) -> None:
    types, amount, key, reason = INCOMPATIBLE[change]
    endpoint = Endpoint("sqlite", tmp_path)
    with materializing(lake, endpoint, tmp_path) as materialization:
        once(materialization)
    before = endpoint.rows()
    change_schema(table, types, amount, key)
    with (
        materializing(lake, endpoint, tmp_path) as materialization,
        pytest.raises(IncompatibleResource, match=reason) as raised,
    ):
        once(materialization)
    assert "Run with --allow-drop" in raised.value.hint
    assert endpoint.rows() == before
    with (
        materializing(lake, endpoint, tmp_path, allow_drop=True) as materialization,
        tripped(step, Action.ERROR),
        # A failure within the connector is retried.
        contextlib.nullcontext()
        if step is Failpoint.RESOURCE_DROPPED
        else pytest.raises(IndeterminateError),
    ):
        once(materialization)
    after = [{"id": 1, "name": "a", "amount": amount}]
    assert endpoint.rows() in (before, after)
    with materializing(lake, endpoint, tmp_path, allow_drop=True) as materialization:
        once(materialization)
    assert endpoint.rows() == after
    # Afterwards the resource fits.
    with materializing(lake, endpoint, tmp_path) as materialization:
        once(materialization)
    assert endpoint.rows() == after
