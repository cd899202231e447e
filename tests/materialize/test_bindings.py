"""Bindings that are added, removed, added again or backfilled, also after a crash at each step."""

import random
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from penstock import persist
from penstock.cli.options import SETTINGS
from penstock.errors import IndeterminateError, PenstockError, UsageError
from penstock.failpoints import Action, Failpoint, armed
from penstock.materialize import shard
from penstock.persist.holds import list_holds
from penstock.persist.store import open_store
from tests.materialize.lake import KEYED, TU, Endpoint, Table, bring, materializing, once, row
from tests.materialize.test_documents import COLUMNS, SUMMED

STEPS = (
    Failpoint.PLAN_DONE,
    Failpoint.STORE_DONE,
    Failpoint.RECOVERY_DONE,
    Failpoint.ACKNOWLEDGE_DONE,
)
FILES = tuple({"collection": f"shop.{name}", "resource": {"name": name}} for name in "tu")


def test_binding_added_with_later_since_during_planned_transaction_is_stored(
    lake: str, table: Table, tmp_path: Path
) -> None:
    endpoint = Endpoint("sqlite", tmp_path)
    with materializing(lake, endpoint, tmp_path, bindings=TU[:1]) as materialization:
        once(materialization)
        table.change()
        with armed(Failpoint.PLAN_DONE, Action.ERROR), pytest.raises(IndeterminateError):
            once(materialization)
    planned = table.collection.upper
    table.change()
    other = table.client.create_or_load("shop.u", **KEYED)
    other.compare_and_append([(row(1), planned + 1, 1)], 0, table.collection.upper)
    other.allow_compaction(planned + 5).result()
    bring(lake, endpoint, tmp_path, bindings=TU)
    assert endpoint.rows() == table.contents()
    assert [each["id"] for each in endpoint.rows("u")] == [1]


def test_binding_added_with_earlier_upper_during_planned_transaction_is_stored(
    lake: str, table: Table, tmp_path: Path
) -> None:
    endpoint = Endpoint("sqlite", tmp_path)
    with materializing(lake, endpoint, tmp_path, bindings=TU[:1]) as materialization:
        once(materialization)
        table.change()
        with armed(Failpoint.PLAN_DONE, Action.ERROR), pytest.raises(IndeterminateError):
            once(materialization)
    other = table.client.create_or_load("shop.u", **KEYED)
    other.compare_and_append([(row(1), 3, 1)], 0, 10)
    bring(lake, endpoint, tmp_path, bindings=TU)
    assert endpoint.rows() == table.contents(), "the planned transaction is complete"
    assert [each["id"] for each in endpoint.rows("u")] == [1]


def test_staged_transaction_is_applied_while_added_binding_waits_for_data(
    lake: str, table: Table, tmp_path: Path
) -> None:
    endpoint = Endpoint("staged-files", tmp_path)
    t, u = FILES
    with (
        materializing(lake, endpoint, tmp_path, bindings=[t]) as materialization,
        armed(Failpoint.RECOVERY_DONE, Action.ERROR),
        pytest.raises(IndeterminateError),
    ):
        once(materialization)
    table.client.create_or_load("shop.u", **KEYED)
    with (
        materializing(lake, endpoint, tmp_path, bindings=[t, u]) as materialization,
        pytest.raises(UsageError, match="waits for"),
    ):
        once(materialization)
    assert endpoint.rows() == table.contents(), "staged work is applied"


@pytest.mark.parametrize("delta", [False, True])
def test_rebalance_to_two_shards_with_unacknowledged_staged_commit_keeps_all_rows(
    lake: str, table: Table, tmp_path: Path, delta: bool
) -> None:
    endpoint = Endpoint("staged-files", tmp_path)
    t, u = {**FILES[0], "delta_updates": delta}, FILES[1]
    with (
        materializing(lake, endpoint, tmp_path, bindings=[t]) as materialization,
        armed(Failpoint.RECOVERY_DONE, Action.ERROR),
        pytest.raises(IndeterminateError),
    ):
        once(materialization)
    other = table.client.create_or_load("shop.u", **KEYED)
    other.compare_and_append([(row(1), 0, 1)], 0, 20)
    bring(lake, endpoint, tmp_path, bindings=[t, u], shards=2)
    assert endpoint.rows() == table.contents()


def test_binding_removed_while_shard_frontiers_differ_keeps_other_binding_complete(
    lake: str, table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = table.client.create_or_load("shop.u", **KEYED)
    other.compare_and_append([(row(n), 0, 1) for n in range(9)], 0, 20)
    endpoint = Endpoint("sqlite", tmp_path)
    with materializing(lake, endpoint, tmp_path, bindings=TU, shards=2) as materialization:
        once(materialization)
        table.change()
        other.compare_and_append([(row(n + 9), 20, 1) for n in range(9)], 20, 40)
        real = shard.TransactionInput.store

        def store(self: shard.TransactionInput, session: Any) -> Any:
            if self._key_range.begin:
                raise IndeterminateError("killed")
            return real(self, session)

        monkeypatch.setattr(shard.TransactionInput, "store", store)
        with pytest.raises(IndeterminateError):
            once(materialization)
        monkeypatch.undo()
    bring(lake, endpoint, tmp_path, bindings=TU[:1], shards=2)
    bring(lake, endpoint, tmp_path, bindings=TU[:1], shards=1)
    assert endpoint.rows() == table.contents()


def test_removed_binding_releases_hold_on_its_source(
    lake: str, table: Table, tmp_path: Path
) -> None:
    second = persist.open(f"{lake}/crm", writer="upstream")
    c = second.create_or_load("crm.u", **KEYED)
    c.compare_and_append([(row(1), 0, 1)], 0, 20)
    u = {"collection": "crm.u", "resource": {"table": "u"}}
    endpoint = Endpoint("sqlite", tmp_path)
    bring(lake, endpoint, tmp_path, bindings=[TU[0], u])
    bring(lake, endpoint, tmp_path, bindings=TU[:1])
    blob = open_store(f"{lake}/crm", SETTINGS)
    held = {h.owner: h.sinces for _, h in list_holds(blob).values()}
    blob.close()
    second.close()
    assert not held.get("materialize-local"), held


def test_two_bindings_of_one_resource_raise_penstock_error(
    lake: str, table: Table, tmp_path: Path
) -> None:
    with (
        materializing(
            lake, Endpoint("sqlite", tmp_path), tmp_path, bindings=[TU[0], TU[0]]
        ) as materialization,
        pytest.raises(PenstockError),
    ):
        once(materialization)


def test_two_bindings_of_one_collection_are_backfilled_independently(
    lake: str, table: Table, tmp_path: Path
) -> None:
    endpoint = Endpoint("sqlite", tmp_path)
    for a, b in ((0, 0), (1, 0), (1, 2)):
        bound = [
            {"collection": "shop.t", "resource": {"table": "t"}, "backfill": a},
            {"collection": "shop.t", "resource": {"table": "v"}, "backfill": b},
        ]
        bring(lake, endpoint, tmp_path, bindings=bound)
        assert endpoint.rows() == endpoint.rows("v") == table.contents()
        table.change()


def test_binding_removed_after_crash_and_added_again_stores_current_rows(
    lake: str, table: Table, tmp_path: Path
) -> None:
    endpoint = Endpoint("plain-files", tmp_path)
    t, u = FILES
    other = table.client.create_or_load("shop.u", **KEYED)
    other.compare_and_append([(row(1), 0, 1)], 0, 20)
    with materializing(lake, endpoint, tmp_path, bindings=[t, u]) as materialization:
        once(materialization)
        table.change()
        other.compare_and_append([(row(2), 25, 1)], 20, 40)
        with armed(Failpoint.STORE_DONE, Action.ERROR), pytest.raises(IndeterminateError):
            once(materialization)
    bring(lake, endpoint, tmp_path, bindings=[t])
    table.change()
    other.compare_and_append([(row(2), 45, -1)], 40, 60)
    bring(lake, endpoint, tmp_path, bindings=[t, u])
    assert [each["id"] for each in endpoint.rows("u")] == [1]


def test_binding_added_again_after_its_table_was_dropped_stores_all_rows(
    lake: str, table: Table, tmp_path: Path
) -> None:
    endpoint = Endpoint("sqlite", tmp_path)
    u = table.client.create_or_load("shop.u", **KEYED)
    u.compare_and_append([(row(1), 0, 1)], 0, 20)
    bring(lake, endpoint, tmp_path, bindings=TU)
    bring(lake, endpoint, tmp_path, bindings=TU[:1])
    db = sqlite3.connect(tmp_path / "t.db")
    db.execute("DROP TABLE u")
    db.commit()
    db.close()
    u.compare_and_append([(row(3), 20, 1)], 20, 40)
    table.change()
    bring(lake, endpoint, tmp_path, bindings=TU)
    assert [each["id"] for each in endpoint.rows("u")] == [1, 3]


def test_binding_added_again_with_adopt_replaces_existing_rows(
    lake: str, table: Table, tmp_path: Path
) -> None:
    endpoint = Endpoint("sqlite", tmp_path)
    u = table.client.create_or_load("shop.u", **KEYED)
    u.compare_and_append([(row(1), 0, 1)], 0, 20)
    bring(lake, endpoint, tmp_path, bindings=TU)
    bring(lake, endpoint, tmp_path, bindings=TU[:1])
    u.compare_and_append([(row(3), 20, 1), (row(1), 20, -1)], 20, 40)
    table.change()
    adopt = [TU[0], {"collection": "shop.u", "resource": {"table": "u", "adopt": True}}]
    bring(lake, endpoint, tmp_path, bindings=adopt)
    assert [each["id"] for each in endpoint.rows("u")] == [3]


def nine(time: int) -> list[tuple[Any, int, int]]:
    """Return documents whose amounts sum to nine."""
    same = {"amount": 1, "name": "n", "least": 0}
    return [({"seq": 10 * time + n, "id": n % 3, **same}, time, 1) for n in range(9)]


def test_binding_added_during_crash_at_each_step_is_stored_once(
    lake: str, table: Table, tmp_path: Path
) -> None:
    endpoint = Endpoint("staged-files", tmp_path)
    bound = [*FILES[:1]]
    bring(lake, endpoint, tmp_path, bindings=bound)
    for n, step in enumerate(STEPS):
        name = f"shop.d{n}"
        c = table.client.create_or_load(name, schema=COLUMNS)
        c.compare_and_append(nine(0), 0, 500)
        table.change()
        bound = [*bound, {"collection": name, "resource": {"name": f"d{n}"}}]
        said = {
            f"shop.d{k}": {"key": ["/id"], "schema": SUMMED, "order": ["seq"]} for k in range(n + 1)
        }
        with armed(step, Action.ERROR), pytest.raises(IndeterminateError):
            bring(lake, endpoint, tmp_path, bindings=bound, collections=said)
        bring(lake, endpoint, tmp_path, bindings=bound, collections=said)
        assert endpoint.rows() == table.contents()
        assert sum(each["amount"] for each in endpoint.rows(f"d{n}")) == 9, step


@pytest.mark.parametrize("what", ["sum", "row"])
def test_backfill_with_crash_at_each_step_is_done_once(
    lake: str, table: Table, tmp_path: Path, what: str
) -> None:
    endpoint = Endpoint("sqlite", tmp_path)
    c = table.client.create_or_load("shop.s", schema=COLUMNS)
    said = {
        "shop.s": {"key": "row"}
        if what == "row"
        else {"key": ["/id"], "schema": SUMMED, "order": ["seq"]}
    }
    total = 0

    def add() -> None:
        nonlocal total
        u = c.upper
        c.compare_and_append(nine(u), u, u + 5)
        total += 9

    for backfill, step in enumerate((None, *STEPS)):
        add()
        b = [{"collection": "shop.s", "resource": {"table": "t"}, "backfill": backfill}]
        if step:
            with armed(step, Action.ERROR), pytest.raises(IndeterminateError):
                bring(lake, endpoint, tmp_path, bindings=b, collections=said)
            add()
        bring(lake, endpoint, tmp_path, bindings=b, collections=said)
        assert sum(each["amount"] for each in endpoint.rows()) == total, step


@pytest.mark.parametrize("kind", ["documents", "counted"])
def test_backfill_of_documents_replaces_rows_instead_of_reducing_into_them(
    lake: str, table: Table, tmp_path: Path, kind: str
) -> None:
    schema = {"reduce": {"strategy": "merge"}, "properties": {"id": {"type": "integer"}}}
    schema |= {"type": "object", "required": ["id"]}
    said = {"key": "row"} if kind == "counted" else {"key": ["/id"], "schema": schema}
    rows = table.client.create_or_load("shop.log", schema=table.collection.schema)
    rows.compare_and_append([(row(1), 0, 1)], 0, 5)
    endpoint = Endpoint("sqlite", tmp_path)
    bound = [{"collection": "shop.log", "resource": {"table": "t"}}]
    for backfill in (0, 1):
        with materializing(
            lake,
            endpoint,
            tmp_path,
            bindings=[{**bound[0], "backfill": backfill}],
            collections={"shop.log": said},
        ) as materialization:
            once(materialization)
        assert [each["id"] for each in endpoint.rows()] == [1]
    assert materialization.status().documents == 1


def test_recreated_collection_raises_usage_error_until_backfill_replaces_rows(
    lake: str, tmp_path: Path
) -> None:
    endpoint = Endpoint("sqlite", tmp_path)
    table = Table(f"{lake}/shop", random.Random(5))
    table.change()
    bring(lake, endpoint, tmp_path)
    table.client.destroy("shop.t")
    table.client.close()
    again = Table(f"{lake}/shop", random.Random(6))
    again.change()
    again.change()
    again.change()
    with (
        materializing(lake, endpoint, tmp_path) as refused,
        pytest.raises(UsageError, match="another history") as told,
    ):
        once(refused)
    assert "backfill to 1" in told.value.hint
    bring(lake, endpoint, tmp_path, backfill=1)
    assert endpoint.rows() == again.contents(), "the earlier rows are deleted"
    again.client.close()
