"""Bindings of a collection that was replaced by another with the same name."""

import contextlib
import json
import sqlite3
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock.clock import SYSTEM_CLOCK
from penstock.errors import IndeterminateError, UsageError
from penstock.failpoints import Action, Failpoint, armed
from penstock.materialize.backfill import ForeignRows
from penstock.materialize.loop import MaterializationLoop, StoppedByError
from penstock.materialize.recovery_log import RecoveryLog
from penstock.materialize.spec_builder import IncompatibleCollection, IncompatibleResource
from penstock.persist import AppendTo, Begin, Fail, Recover, Replace
from tests.materialize.lake import (
    KEYED,
    TU,
    Endpoint,
    Table,
    bring,
    following,
    materializing,
    once,
    row,
    stored_state,
)
from tests.materialize.test_documents import COLUMNS
from tests.materialize.test_errored_collections import LOST, committed, fail


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
def test_binding_of_replaced_collection_is_rewritten_from_new_collection(
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
    # The holds on the old collection are released.
    for id in (old, new.id):
        as_of = None if id == new.id else 0
        table.client.collection("shop.t", as_of=as_of).allow_compaction(79).result()
    assert old not in table.client.state.collections


@pytest.mark.parametrize("on_error", ["stop", "leave_behind"])
def test_running_materialization_resumes_when_collection_is_replaced(
    lake: str, table: Table, tmp_path: Path, on_error: str
) -> None:
    other = table.client.create_or_load("shop.u", **KEYED)
    other.compare_and_append([(row(1), 0, 1)], 0, 20)
    endpoint, before = Endpoint("sqlite", tmp_path), table.contents()
    renamed = [{"id": 3, "name": "three"}, {"id": 100, "name": "hundred"}]
    with (
        materializing(
            lake, endpoint, tmp_path, bindings=TU, section={"on_error": on_error}
        ) as materialization,
        following(materialization) as until,
    ):
        fail(table, 25)
        other.compare_and_append([(row(2), 30, 1)], 20, 40)
        phase = "stopped" if on_error == "stop" else "degraded"
        until(lambda: materialization.status().phase == phase)
        reached = {"t": 25, "u": 25 if on_error == "stop" else 40}
        until(lambda: committed(materialization) == reached)
        assert endpoint.rows() == before
        replace_table(table, 60, renamed)
        other.compare_and_append([(row(3), 61, 1)], 40, 70)
        until(lambda: committed(materialization) == {"t": 70, "u": 70})
        until(lambda: materialization.status().phase == "following")
        assert materialization.status().error is None
    assert endpoint.rows() == renamed
    assert [each["id"] for each in endpoint.rows("u")] == [1, 2, 3]


@pytest.mark.parametrize("connector", ["sqlite", "staged-files", "plain-files"])
@pytest.mark.parametrize("step", [Failpoint.APPLY_DONE, Failpoint.PLAN_DONE, Failpoint.STORE_DONE])
def test_crash_while_frozen_binding_moves_to_new_collection_is_recovered(
    lake: str, table: Table, tmp_path: Path, connector: str, step: Failpoint
) -> None:
    other = table.client.create_or_load("shop.u", **KEYED)
    other.compare_and_append([(row(1), 0, 1)], 0, 20)
    endpoint = Endpoint(connector, tmp_path)
    key = "table" if connector == "sqlite" else "name"
    bindings = [{**each, "resource": {key: each["resource"]["table"]}} for each in TU]
    fail(table, 25)
    other.compare_and_append([(row(2), 30, 1)], 20, 40)
    bring(lake, endpoint, tmp_path, bindings=bindings)
    renamed = [{"id": 3, "name": "three"}, {"id": 100, "name": "hundred"}]
    replace_table(table, 60, renamed)
    other.compare_and_append([(row(3), 61, 1)], 40, 70)
    with (
        materializing(lake, endpoint, tmp_path, bindings=bindings) as crashed,
        armed(step, Action.ERROR),
        pytest.raises(IndeterminateError),
    ):
        once(crashed)
    other.compare_and_append([(row(4), 70, 1)], 70, 80)
    table.client.collection("shop.t").compare_and_append([], 70, 80)
    bring(lake, endpoint, tmp_path, bindings=bindings)
    assert endpoint.rows() == renamed
    assert [each["id"] for each in endpoint.rows("u")] == [1, 2, 3, 4]


def test_transaction_planned_before_replacement_is_finished_with_old_collection(
    lake: str, table: Table, tmp_path: Path
) -> None:
    endpoint = Endpoint("sqlite", tmp_path)
    with materializing(lake, endpoint, tmp_path) as materialization:
        once(materialization)
        table.change()
        with armed(Failpoint.PLAN_DONE, Action.ERROR), pytest.raises(IndeterminateError):
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


def test_type_change_of_replaced_collection_is_stored_in_endpoint_column(
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
def test_incompatible_replacement_requires_allow_drop_and_recovers_from_crash(
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
        armed(step, Action.ERROR),
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
    # Now the resource is compatible.
    with materializing(lake, endpoint, tmp_path) as materialization:
        once(materialization)
    assert endpoint.rows() == after


@pytest.mark.parametrize("change", INCOMPATIBLE)
@pytest.mark.parametrize("on_error", ["stop", "leave_behind"])
def test_incompatible_replacement_freezes_only_its_binding(
    lake: str, table: Table, tmp_path: Path, change: str, on_error: str
) -> None:
    types, amount, key, reason = INCOMPATIBLE[change]
    other = table.client.create_or_load("shop.u", **KEYED)
    other.compare_and_append([(row(1), 0, 1)], 0, table.collection.upper)
    endpoint = Endpoint("sqlite", tmp_path)
    section = {"on_error": on_error}
    bring(lake, endpoint, tmp_path, bindings=TU, section=section)
    before = endpoint.rows()
    upper = table.collection.upper
    change_schema(table, types, amount, key)
    other.compare_and_append([(row(2), upper, 1)], upper, upper + 15)

    def ids() -> list[int]:
        return [each["id"] for each in endpoint.rows("u")]

    with materializing(lake, endpoint, tmp_path, bindings=TU, section=section) as rejected:
        with pytest.raises(IncompatibleResource, match=reason):
            once(rejected)
        assert ids() == ([1] if on_error == "stop" else [1, 2])
    if on_error == "leave_behind":
        with (
            materializing(lake, endpoint, tmp_path, bindings=TU) as materialization,
            following(materialization) as until,
        ):
            other.compare_and_append([(row(3), upper + 15, 1)], upper + 15, upper + 20)
            until(lambda: ids() == [1, 2, 3])
            (degraded,) = materialization.status().degraded
            assert degraded.collection == "shop.t"
            assert "--allow-drop" in degraded.hint
            assert materialization.status().phase == "degraded"
    assert endpoint.rows() == before
    bring(lake, endpoint, tmp_path, bindings=TU, section=section, allow_drop=True)
    assert endpoint.rows() == [{"id": 1, "name": "a", "amount": amount}]
    assert ids() == ([1, 2] if on_error == "stop" else [1, 2, 3])


@pytest.mark.parametrize("step", [Failpoint.PLAN_DONE, Failpoint.STORE_DONE])
def test_crash_while_incompatible_replacement_is_frozen_stops_no_other_binding(
    lake: str, table: Table, tmp_path: Path, step: Failpoint
) -> None:
    types, amount, key, reason = INCOMPATIBLE["type"]
    other = table.client.create_or_load("shop.u", **KEYED)
    upper = table.collection.upper
    other.compare_and_append([(row(1), 0, 1)], 0, upper)
    endpoint = Endpoint("sqlite", tmp_path)
    bring(lake, endpoint, tmp_path, bindings=TU)
    before = endpoint.rows()
    change_schema(table, types, amount, key)
    other.compare_and_append([(row(2), upper, 1)], upper, upper + 15)
    with armed(step, Action.ERROR), pytest.raises(IndeterminateError):
        bring(lake, endpoint, tmp_path, bindings=TU)
    assert stored_state(lake)["materialization"]["planned"] == upper + 15
    other.compare_and_append([(row(3), upper + 15, 1)], upper + 15, upper + 20)
    with pytest.raises(IncompatibleResource, match=reason):
        bring(lake, endpoint, tmp_path, bindings=TU)
    assert [each["id"] for each in endpoint.rows("u")] == [1, 2, 3]
    assert endpoint.rows() == before
    bring(lake, endpoint, tmp_path, bindings=TU, allow_drop=True)
    assert endpoint.rows() == [{"id": 1, "name": "a", "amount": amount}]


@pytest.mark.parametrize("on_error", ["stop", "leave_behind"])
def test_incompatible_replacement_with_several_shards_is_rejected_with_working_hint(
    lake: str, table: Table, tmp_path: Path, on_error: str
) -> None:
    types, amount, key, reason = INCOMPATIBLE["type"]
    other = table.client.create_or_load("shop.u", **KEYED)
    upper = table.collection.upper
    other.compare_and_append([(row(1), 0, 1)], 0, upper)
    endpoint, section = Endpoint("sqlite", tmp_path), {"on_error": on_error}
    bring(lake, endpoint, tmp_path, bindings=TU, section=section, shards=2)
    before = endpoint.rows()
    change_schema(table, types, amount, key)
    other.compare_and_append([(row(2), upper, 1)], upper, upper + 15)
    with pytest.raises(IncompatibleResource, match=reason) as rejected:
        bring(lake, endpoint, tmp_path, bindings=TU, section=section, shards=2)
    assert "shards: 1" in rejected.value.hint
    assert "Drop it yourself" in rejected.value.hint
    assert "backfill: 1" in rejected.value.hint
    stored = [1] if on_error == "stop" else [1, 2]
    assert [each["id"] for each in endpoint.rows("u")] == stored
    assert endpoint.rows() == before
    with contextlib.closing(sqlite3.connect(tmp_path / "t.db", timeout=60)) as database:
        database.execute("DROP TABLE t")
        database.commit()
    raised = [{**TU[0], "backfill": 1}, TU[1]]
    bring(lake, endpoint, tmp_path, bindings=raised, section=section)
    assert endpoint.rows() == [{"id": 1, "name": "a", "amount": amount}]
    assert [each["id"] for each in endpoint.rows("u")] == [1, 2]
    bring(lake, endpoint, tmp_path, bindings=raised, section=section, shards=2)


@pytest.mark.parametrize("change", ["key", "field"])
def test_replacement_with_missing_key_or_field_freezes_only_its_binding(
    lake: str, table: Table, tmp_path: Path, change: str
) -> None:
    other = table.client.create_or_load("shop.u", **KEYED)
    upper = table.collection.upper
    other.compare_and_append([(row(1), 0, 1)], 0, upper)
    endpoint = Endpoint("sqlite", tmp_path)
    bindings = [{**TU[0], "fields": {"include": ["amount"]}}, TU[1]]
    bring(lake, endpoint, tmp_path, bindings=bindings)
    before = endpoint.rows()
    if change == "key":
        change_schema(table, {"name": pa.string(), "amount": pa.int64()}, 7, key=[])
    else:
        replace_table(table, upper + 5, [{"id": 1, "name": "a"}])
    other.compare_and_append([(row(2), upper, 1)], upper, upper + 15)
    reason = "has no key" if change == "key" else "cannot select fields"
    with pytest.raises(IncompatibleCollection, match=reason):
        bring(lake, endpoint, tmp_path, bindings=bindings)
    assert [each["id"] for each in endpoint.rows("u")] == [1, 2]
    assert endpoint.rows() == before
    collections = {"shop.t": {"key": ["/id"]}} if change == "key" else None
    bindings = bindings if change == "key" else TU
    bring(lake, endpoint, tmp_path, bindings=bindings, collections=collections)
    assert ids_of(endpoint) == [1]


def move_name(table: Table, time: int, ids: Sequence[int]) -> None:
    """Move the name of the table to a new collection with the same columns."""
    new = table.client.create_or_load("shop.t-new", **KEYED)
    updates = [(row(id), time, 1) for id in ids]
    table.client.append_all(
        [AppendTo(new, updates, 0, time + 10)],
        [Begin(new, time), Replace(table.collection, new, time)],
    )


def insert_foreign_row(folder: Path) -> None:
    with contextlib.closing(sqlite3.connect(folder / "t.db", timeout=60)) as database:
        document = json.dumps({**row(999), "name": "foreign"})
        database.execute(
            "INSERT INTO t (id, name, amount, flow_document) VALUES (999, 'foreign', 1, ?)",
            [document],
        )
        database.commit()


def ids_of(endpoint: Endpoint) -> list[int]:
    return [each["id"] for each in endpoint.rows()]


@pytest.mark.parametrize("running", [False, True], ids=["restart", "running"])
def test_replaced_collection_removes_foreign_rows_only_with_allow_drop(
    lake: str, table: Table, tmp_path: Path, running: bool
) -> None:
    endpoint = Endpoint("sqlite", tmp_path)
    with (
        materializing(lake, endpoint, tmp_path) as materialization,
        ThreadPoolExecutor(1) as pool,
    ):
        run = pool.submit(materialization.run, threading.Event(), once=not running)
        while not materialization.status().transactions:
            SYSTEM_CLOCK.wait(threading.Event(), 5)
        if not running:
            run.result()
        insert_foreign_row(tmp_path)
        before = ids_of(endpoint)
        move_name(table, 60, [1, 2])
        if not running:
            run = pool.submit(materialization.run, threading.Event(), once=True)
        rejected = run.exception(timeout=300)
    assert isinstance(rejected, ForeignRows)
    assert "would remove 1 rows" in str(rejected)
    assert "--allow-drop" in rejected.hint
    assert "backfill" not in str(rejected)
    assert 999 in before
    assert ids_of(endpoint) == before
    bring(lake, endpoint, tmp_path, allow_drop=True)
    assert ids_of(endpoint) == [1, 2]


def test_replacement_after_commit_not_recorded_treats_no_row_as_foreign(
    lake: str, table: Table, tmp_path: Path
) -> None:
    endpoint = Endpoint("sqlite", tmp_path)
    bring(lake, endpoint, tmp_path)
    move_name(table, 60, range(1, 40))
    with armed(Failpoint.STORE_DONE, Action.ERROR), pytest.raises(IndeterminateError):
        bring(lake, endpoint, tmp_path)
    assert ids_of(endpoint) == [*range(1, 40)]
    bring(lake, endpoint, tmp_path)
    assert ids_of(endpoint) == [*range(1, 40)]


def test_binding_added_again_removes_foreign_rows_only_with_allow_drop(
    lake: str, table: Table, tmp_path: Path
) -> None:
    other = table.client.create_or_load("shop.u", **KEYED)
    other.compare_and_append([(row(1), 0, 1)], 0, 20)
    endpoint = Endpoint("sqlite", tmp_path)
    bring(lake, endpoint, tmp_path, bindings=TU)
    bring(lake, endpoint, tmp_path, bindings=TU[1:])
    insert_foreign_row(tmp_path)
    again = [{"collection": "shop.t", "resource": {"table": "t", "adopt": True}}, TU[1]]
    with pytest.raises(ForeignRows, match=r"replacement of .* would remove 1 rows"):
        bring(lake, endpoint, tmp_path, bindings=again)
    assert 999 in ids_of(endpoint)
    bring(lake, endpoint, tmp_path, bindings=again, allow_drop=True)
    assert endpoint.rows() == table.contents()


def test_replaced_collection_with_several_shards_is_rejected_before_plan(
    lake: str, table: Table, tmp_path: Path
) -> None:
    endpoint = Endpoint("sqlite", tmp_path)
    bring(lake, endpoint, tmp_path, shards=2)
    before = endpoint.rows()
    move_name(table, 60, [1, 2])
    with pytest.raises(UsageError, match="cannot be written again by several shards") as rejected:
        bring(lake, endpoint, tmp_path, shards=2)
    assert "shards: 1" in rejected.value.hint
    assert stored_state(lake)["materialization"]["planned"] is None
    assert endpoint.rows() == before
    insert_foreign_row(tmp_path)
    with pytest.raises(ForeignRows, match="would remove 1 rows"):
        bring(lake, endpoint, tmp_path)
    bring(lake, endpoint, tmp_path, allow_drop=True)
    assert ids_of(endpoint) == [1, 2]
    bring(lake, endpoint, tmp_path, shards=2)
    assert ids_of(endpoint) == [1, 2]


def test_backfill_of_counted_rows_with_several_shards_is_rejected_before_plan(
    lake: str, table: Table, tmp_path: Path
) -> None:
    log = table.client.create_or_load("shop.log", schema=COLUMNS)
    document = {"seq": 1, "id": 1, "amount": 1, "name": "n", "least": 0}
    log.compare_and_append([(document, 0, 1)], 0, 20)
    endpoint = Endpoint("sqlite", tmp_path)
    collections = {"shop.log": {"key": "row"}}
    bindings = [{"collection": "shop.log", "resource": {"table": "t"}}]
    bring(lake, endpoint, tmp_path, shards=2, bindings=bindings, collections=collections)
    raised = [{**bindings[0], "backfill": 1}]
    with pytest.raises(UsageError, match="cannot be written again by several shards"):
        bring(lake, endpoint, tmp_path, shards=2, bindings=raised, collections=collections)
    assert stored_state(lake)["materialization"]["planned"] is None
    bring(lake, endpoint, tmp_path, bindings=raised, collections=collections)
    assert ids_of(endpoint) == [1]


@pytest.mark.parametrize("change", ["column", "error"])
def test_rewrite_of_counted_rows_with_several_shards_is_rejected_until_one_shard(
    lake: str, table: Table, tmp_path: Path, change: str
) -> None:
    log = table.client.create_or_load("shop.t-log", schema=COLUMNS)
    document = {"seq": 1, "id": 1, "amount": 1, "name": "n", "least": 0}
    log.compare_and_append([(document, 0, 1)], 0, 20)
    endpoint = Endpoint("sqlite", tmp_path)
    collections = {"shop.t-log": {"key": "row"}}
    bindings = [{"collection": "shop.t-log", "resource": {"table": "t"}}]

    def bring_log(shards: int) -> None:
        bring(lake, endpoint, tmp_path, shards=shards, bindings=bindings, collections=collections)

    bring_log(2)
    added = {**document, "seq": 2, "id": 2}
    if change == "column":
        log.alter(pa.schema([*COLUMNS, ("extra", pa.string())]))
        log = table.client.collection("shop.t-log")
    else:
        table.client.append_all([AppendTo(log, [], 20, 25)], [Fail(log, 20, LOST)])
        table.client.append_all([AppendTo(log, [], 25, 27)], [Recover(log, 25)])
    log.compare_and_append([(added, log.upper, 1)], log.upper, 40)
    with pytest.raises(UsageError, match="cannot be written again by several shards") as rejected:
        bring_log(2)
    assert "shards: 1" in rejected.value.hint
    assert stored_state(lake)["materialization"]["planned"] is None
    assert ids_of(endpoint) == [1]
    bring_log(1)
    assert ids_of(endpoint) == [1, 2]
    bring_log(2)
    assert ids_of(endpoint) == [1, 2]


def test_keys_are_rebalanced_only_after_commits_are_acknowledged(
    lake: str, table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    types, amount, key, _ = INCOMPATIBLE["type"]
    other = table.client.create_or_load("shop.u", **KEYED)
    upper = table.collection.upper
    other.compare_and_append([(row(1), 0, 1)], 0, upper)
    endpoint = Endpoint("sqlite", tmp_path)
    with armed(Failpoint.RECOVERY_DONE, Action.ERROR), pytest.raises(IndeterminateError):
        bring(lake, endpoint, tmp_path, bindings=TU, shards=2)
    acknowledged: list[bool] = []
    rebalance, look = RecoveryLog.rebalance, MaterializationLoop._update_status

    def recorded(log: RecoveryLog, *arguments: Any) -> RecoveryLog:
        acknowledged.append(log.is_acknowledged)
        return rebalance(log, *arguments)

    def replaced_meanwhile(materialization: MaterializationLoop) -> None:
        monkeypatch.setattr(MaterializationLoop, "_update_status", look)
        change_schema(table, types, amount, key)
        other.compare_and_append([(row(2), upper, 1)], upper, upper + 15)
        look(materialization)

    monkeypatch.setattr(RecoveryLog, "rebalance", recorded)
    monkeypatch.setattr(MaterializationLoop, "_update_status", replaced_meanwhile)
    with pytest.raises(IncompatibleResource):
        bring(lake, endpoint, tmp_path, bindings=TU)
    assert acknowledged == [True]
    assert [each["id"] for each in endpoint.rows("u")] == [1, 2]


def test_replaced_collection_in_error_is_not_revalidated_for_each_transaction(
    lake: str, table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = table.client.create_or_load("shop.u", **KEYED)
    upper = table.collection.upper
    other.compare_and_append([(row(1), 0, 1)], 0, upper)
    endpoint = Endpoint("sqlite", tmp_path)
    bring(lake, endpoint, tmp_path, bindings=TU)
    before = endpoint.rows()
    new, time = table.client.create_or_load("shop.t-new", **KEYED), upper + 5
    table.client.append_all(
        [AppendTo(new, [(row(1), time, 1)], 0, upper + 60)],
        [Begin(new, time), Replace(table.collection, new, time), Fail(new, time, LOST)],
    )
    built: list[int | None] = []
    build = MaterializationLoop._build

    def counted(materialization: MaterializationLoop, described: Any, upper: int | None) -> None:
        built.append(upper)
        build(materialization, described, upper)

    monkeypatch.setattr(MaterializationLoop, "_build", counted)
    with (
        materializing(lake, endpoint, tmp_path, bindings=TU) as materialization,
        following(materialization) as until,
    ):
        until(lambda: materialization.status().phase == "degraded")
        for id in (2, 3, 4):
            other.compare_and_append([(row(id), other.upper, 1)], other.upper, other.upper + 15)
            until(lambda: committed(materialization)["u"] == other.upper)
        assert built == [None]
        assert endpoint.rows() == before
        # In one entry: a transaction between two of them would build once more.
        ends = [AppendTo(item, [], item.upper, upper + 70) for item in (new, other)]
        table.client.append_all(ends, [Recover(new, upper + 60)])
        until(lambda: committed(materialization)["t"] == upper + 70)
    assert ids_of(endpoint) == [1]
    assert len(built) == 2
