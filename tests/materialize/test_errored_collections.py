"""Collections in error, temporarily or permanently, and the other bindings of their tasks."""

import json
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock.errors import DefiniteError, IndeterminateError, PenstockError
from penstock.failpoints import Action, Failpoint, armed
from penstock.materialize import loop, tasks
from penstock.materialize.commit_barrier import CommitBarrier, CommitCoordinator
from penstock.materialize.loop import MaterializationLoop, StoppedByError
from penstock.materialize.runner import LocalChannel, LocalRunner
from penstock.materialize.shard import ShardPlan, run_shard
from penstock.persist import AppendTo, Fail, Recover, StoredError
from penstock.pipeline.file import Pipeline
from tests.materialize.lake import (
    KEYED,
    SCHEMA,
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

LOST = StoredError("SlotLost", "slot is gone", "It was dropped.", "Copy it again.")


def fail(table: Table, time: int) -> None:
    upper = table.collection.upper
    table.client.append_all(
        [AppendTo(table.collection, [], upper, time + 10)], [Fail(table.collection, time, LOST)]
    )


def recover(table: Table) -> None:
    """Resync: correct the diverged row at the upper and end the error, in one entry."""
    upper = table.collection.upper
    gone = table.contents()[0]
    del table.rows[gone["id"]]
    table.client.append_all(
        [AppendTo(table.collection, [(gone, upper, -1)], upper, upper + 5)],
        [Recover(table.collection, upper)],
    )


class Other:
    """A collection next to the table, bound as rows and as a log of its changes."""

    BINDINGS: Sequence[Mapping[str, Any]] = [
        *TU,
        {"collection": "shop.u", "resource": {"table": "log"}, "delta_updates": True},
    ]

    def __init__(self, table: Table) -> None:
        self.collection = table.client.create_or_load("shop.u", **KEYED)
        self.ids: list[int] = []

    def add(self, upper: int) -> None:
        """Insert one row, and advance to `upper`."""
        lower, id = self.collection.upper, len(self.ids)
        self.ids.append(id)
        self.collection.compare_and_append([(row(id), lower, 1)], lower, upper)


def frontiers(lake: str) -> Mapping[str, int]:
    """Return the frontier of each resource in the stored recovery log."""
    (shard,) = (each for name, each in stored_state(lake).items() if name.startswith("shard "))
    bindings = json.loads(shard["checkpoint"])["bindings"]
    return {json.loads(path)[0]: each["frontier"] for path, each in bindings.items()}


def committed(materialization: MaterializationLoop) -> Mapping[str, int]:
    """Return the frontier of each resource in the recovery log of a running materialization."""
    checkpoint = materialization._log.shards[0].checkpoint
    bindings = {} if checkpoint is None else checkpoint.bindings
    return {json.loads(path)[0]: each.frontier for path, each in bindings.items()}


def test_materialization_with_on_error_stop_stops_at_error_time(
    lake: str, table: Table, tmp_path: Path
) -> None:
    other = Other(table)
    other.add(100)
    endpoint, before = Endpoint("sqlite", tmp_path), table.contents()
    fail(table, 25)
    stop = {"on_error": "stop"}
    with materializing(lake, endpoint, tmp_path, bindings=TU, section=stop) as materialization:
        with pytest.raises(StoppedByError, match="slot is gone") as raised:
            once(materialization)
        assert endpoint.rows() == before, "everything below the error time is there"
        assert "Copy it again." in raised.value.hint
        assert frontiers(lake) == {"t": 25, "u": 25}
        assert "slot is gone" in str(materialization.status().error)
        assert materialization.status().phase == "stopped"


def test_materialization_with_on_error_stop_resumes_after_resync(
    lake: str, table: Table, tmp_path: Path
) -> None:
    other = Other(table)
    other.add(30)
    endpoint = Endpoint("sqlite", tmp_path)
    fail(table, 25)
    stop = {"on_error": "stop"}
    with (
        materializing(lake, endpoint, tmp_path, bindings=TU, section=stop) as materialization,
        following(materialization) as until,
    ):
        until(lambda: materialization.status().phase == "stopped")
        assert "slot is gone" in str(materialization.status().error)
        assert committed(materialization) == {"t": 25, "u": 25}
        recover(table)
        other.add(table.collection.upper)
        until(lambda: materialization.status().upper == table.collection.upper)
        until(lambda: materialization.status().phase == "following")
        assert materialization.status().error is None
    assert endpoint.rows() == table.contents()
    assert [each["id"] for each in endpoint.rows("u")] == other.ids


def test_binding_to_errored_collection_freezes_at_error_time(
    lake: str, table: Table, tmp_path: Path
) -> None:
    other = Other(table)
    other.add(20)
    endpoint = Endpoint("sqlite", tmp_path)
    with materializing(lake, endpoint, tmp_path, bindings=TU) as materialization:
        once(materialization)
        table.change()
        fail(table, 45)
        other.add(60)
        once(materialization)
        assert endpoint.rows() == table.contents(), "everything below the error time is there"
        assert frontiers(lake) == {"t": 45, "u": 60}
        other.add(80)
        once(materialization)
        assert frontiers(lake) == {"t": 45, "u": 80}
        status = materialization.status().to_json()
        assert status["left_behind"] == ["shop.t"]
        assert status["degraded"] == [
            {
                "collection": "shop.t",
                "time": 45,
                "message": "slot is gone",
                "detail": "It was dropped.",
                "hint": "Copy it again.",
            }
        ]
        assert status["error"] is None
    assert [each["id"] for each in endpoint.rows("u")] == other.ids


def test_binding_added_after_error_receives_all_rows_below_error_time(
    lake: str, table: Table, tmp_path: Path
) -> None:
    other = Other(table)
    other.add(60)
    fail(table, 25)
    endpoint = Endpoint("sqlite", tmp_path)
    bring(lake, endpoint, tmp_path, bindings=TU[1:])
    bring(lake, endpoint, tmp_path, bindings=TU)
    assert endpoint.rows() == table.contents()
    assert frontiers(lake) == {"t": 25, "u": 60}


def test_two_errored_collections_each_freeze_at_own_error_time(
    lake: str, table: Table, tmp_path: Path
) -> None:
    other = Other(table)
    other.add(40)
    fail(table, 25)
    table.client.append_all(
        [AppendTo(other.collection, [], 40, 60)], [Fail(other.collection, 50, LOST)]
    )
    endpoint = Endpoint("sqlite", tmp_path)
    with materializing(lake, endpoint, tmp_path, bindings=TU) as materialization:
        once(materialization)
        assert materialization.status().left_behind == ("shop.t", "shop.u")
    assert endpoint.rows() == table.contents()
    assert [each["id"] for each in endpoint.rows("u")] == other.ids
    assert frontiers(lake) == {"t": 25, "u": 50}


def test_frozen_binding_resumes_after_resync_and_reaches_frontier_of_others(
    lake: str, table: Table, tmp_path: Path
) -> None:
    other = Other(table)
    other.add(20)
    endpoint = Endpoint("sqlite", tmp_path)
    with (
        materializing(lake, endpoint, tmp_path, bindings=TU) as materialization,
        following(materialization) as until,
    ):
        until(lambda: materialization.status().upper == 20)
        table.change()
        fail(table, 45)
        other.add(80)
        until(lambda: committed(materialization) == {"t": 45, "u": 80})
        until(lambda: materialization.status().phase == "degraded")
        recover(table)
        upper = table.collection.upper
        table.collection.compare_and_append([], upper, 100)
        other.add(100)
        until(lambda: committed(materialization) == {"t": 100, "u": 100})
        until(lambda: materialization.status().phase == "following")
        assert materialization.status().degraded == ()
    assert endpoint.rows() == table.contents()
    assert [each["id"] for each in endpoint.rows("u")] == other.ids


@pytest.mark.parametrize("connector", ["sqlite", "staged-files", "plain-files"])
def test_crash_at_each_step_of_freeze_and_resume_delivers_each_change_once(
    lake: str, table: Table, tmp_path: Path, connector: str
) -> None:
    other = Other(table)
    other.add(20)
    endpoint = Endpoint(connector, tmp_path)
    resource = "table" if connector == "sqlite" else "name"
    # Only SQLite has rows of delta updates to count.
    bindings = [
        {**each, "resource": {resource: each["resource"]["table"]}}
        for each in (Other.BINDINGS if connector == "sqlite" else TU)
    ]

    def crash_and_finish(step: Failpoint) -> None:
        with (
            materializing(lake, endpoint, tmp_path, bindings=bindings) as crashed,
            armed(step, Action.ERROR),
            pytest.raises(IndeterminateError),
        ):
            once(crashed)
        bring(lake, endpoint, tmp_path, bindings=bindings)
        assert endpoint.rows() == table.contents()
        assert [each["id"] for each in endpoint.rows("u")] == other.ids
        if connector == "sqlite":
            assert [each["id"] for each in endpoint.rows("log")] == other.ids

    bring(lake, endpoint, tmp_path, bindings=bindings)
    for step in (
        Failpoint.PLAN_DONE,
        Failpoint.STORE_DONE,
        Failpoint.RECOVERY_DONE,
        Failpoint.ACKNOWLEDGE_DONE,
    ):
        table.change()
        time = table.collection.upper + 5
        fail(table, time)
        other.add(time + 40)
        crash_and_finish(step)  # The transaction that ends at the error time.
        other.add(time + 60)
        crash_and_finish(step)  # A transaction without the frozen binding.
        upper = table.collection.upper
        recover(table)
        table.collection.compare_and_append([], upper + 5, time + 80)
        other.add(time + 80)
        crash_and_finish(step)  # The frozen binding resumes in this transaction.


def test_planned_transaction_is_finished_without_binding_that_was_frozen(
    lake: str, table: Table, tmp_path: Path
) -> None:
    other = Other(table)
    other.add(20)
    endpoint = Endpoint("plain-files", tmp_path)
    bindings = [{**each, "resource": {"name": each["resource"]["table"]}} for each in TU]
    bring(lake, endpoint, tmp_path, bindings=bindings)
    fail(table, 25)
    other.add(30)
    bring(lake, endpoint, tmp_path, bindings=bindings)
    other.add(60)
    with (
        materializing(lake, endpoint, tmp_path, bindings=bindings) as crashed,
        armed(Failpoint.PLAN_DONE, Action.ERROR),
        pytest.raises(IndeterminateError),
    ):
        once(crashed)
    planned = stored_state(lake)["materialization"]
    assert (planned["planned"], planned["frozen"]) == (60, ['["t"]'])

    recover(table)
    table.collection.compare_and_append([], table.collection.upper, 80)
    other.add(80)
    jobs = Counting()
    bring(lake, endpoint, tmp_path, bindings=bindings, jobs=jobs)
    first = jobs.plans[0]
    frozen = [each.bound.path for each in first.bindings if each.bound.frozen]
    assert (first.upper, frozen) == (60, ['["t"]'])
    assert frontiers(lake) == {"t": 80, "u": 80}
    assert endpoint.rows() == table.contents()
    assert [each["id"] for each in endpoint.rows("u")] == other.ids


def test_backlog_is_split_by_size_while_binding_is_frozen(
    lake: str, table: Table, tmp_path: Path
) -> None:
    other = Other(table)
    other.add(20)
    endpoint, jobs = Endpoint("sqlite", tmp_path), Counting()
    given = {"bindings": TU, "section": {"size": "1KiB"}, "jobs": jobs}
    bring(lake, endpoint, tmp_path, **given)
    fail(table, 25)
    bring(lake, endpoint, tmp_path, **given)
    for upper in range(60, 100, 10):
        lower = other.collection.upper
        rows = [(row(1_000 * upper + number), lower, 1) for number in range(90)]
        other.collection.compare_and_append(rows, lower, upper)
    jobs.plans.clear()
    with materializing(lake, endpoint, tmp_path, **given) as materialization:
        once(materialization)
        assert materialization.status().transactions > 2
    assert frontiers(lake) == {"t": 25, "u": 90}


def test_run_once_with_frozen_binding_raises_definite_error_after_storing_others(
    lake: str, table: Table, tmp_path: Path
) -> None:
    other = Other(table)
    other.add(60)
    fail(table, 25)
    pipeline = Pipeline.model_validate(
        {
            "location": lake,
            "materializations": {
                "local": {
                    "connector": "sqlite",
                    "endpoint": {"path": str(tmp_path / "t.db")},
                    "bindings": list(TU),
                }
            },
        }
    )
    with pytest.raises(DefiniteError, match="degraded") as raised:
        tasks.run(pipeline, jobs=LocalRunner(), once=True)
    assert "shop.t" in str(raised.value)
    assert "shop.t is in error since 25: slot is gone." in raised.value.detail
    assert "Copy it again." in raised.value.hint
    assert len(Endpoint("sqlite", tmp_path).rows("u")) == len(other.ids)


def test_endpoint_equals_collection_after_error_and_resync_between_runs(
    lake: str, table: Table, tmp_path: Path
) -> None:
    endpoint = Endpoint("sqlite", tmp_path)
    with materializing(lake, endpoint, tmp_path) as materialization:
        once(materialization)
        at = table.collection.upper + 5
        fail(table, at)
        # A resync: the correction and the recovery are one entry.
        upper = table.collection.upper
        gone = table.contents()[0]
        del table.rows[gone["id"]]
        updates = [(gone, upper, -1)]
        table.client.append_all(
            [AppendTo(table.collection, updates, upper, upper + 5)],
            [Recover(table.collection, upper)],
        )
        once(materialization)
    assert endpoint.rows() == table.contents()


class Counting:
    """Tasks that record their plans, and fail after too many transactions."""

    def __init__(self) -> None:
        self.plans: list[ShardPlan] = []

    def run(self, plans: Sequence[ShardPlan], commits: CommitCoordinator) -> None:
        self.plans.append(plans[0])
        assert len(self.plans) < 30, [each.upper for each in self.plans]
        LocalRunner().run(plans, commits)


class Large:
    """Tasks of large transactions: running tasks receive no next transaction."""

    def run(self, plans: Sequence[ShardPlan], commits: CommitCoordinator) -> None:
        rounds = CommitBarrier(len(plans), commits, lambda _: False)
        for at, plan in enumerate(plans):
            run_shard(plan, LocalChannel(rounds, at))
        if rounds.error:
            raise rounds.error


def test_backlog_is_not_split_within_interval_of_recovered_error(
    lake: str, table: Table, tmp_path: Path
) -> None:
    other = table.client.create_or_load("shop.u", **KEYED)
    other.compare_and_append([(row(1), 0, 1)], 0, 20)
    endpoint = Endpoint("sqlite", tmp_path)
    with materializing(
        lake, endpoint, tmp_path, bindings=TU, jobs=Counting(), section={"size": "1KiB"}
    ) as materialization:
        once(materialization)
        up = table.collection.upper
        table.client.append_all(
            [AppendTo(table.collection, [], up, up + 10)], [Fail(table.collection, up + 2, LOST)]
        )
        u = other.upper
        for n in range(4):
            rows = [(row(100 * n + k), u + 2 * n, 1) for k in range(10, 90)]
            other.compare_and_append(rows, u + 2 * n, u + 2 * n + 2)
        u = other.upper
        other.compare_and_append([(row(99), u, 1)], u, u + 30)
        up = table.collection.upper
        table.client.append_all(
            [AppendTo(table.collection, [], up, up + 20)], [Recover(table.collection, up)]
        )
        once(materialization)
    assert len(endpoint.rows("u")) == 2 + 4 * 80


def test_backlog_of_large_transactions_is_not_split_within_interval_of_recovered_error(
    lake: str, table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = loop.limit_upper, []

    def within(states: Any, reached: int, upper: int, most: int) -> int:
        found = real(states, reached, upper, most)
        seen.append((reached, upper, found))
        assert len(seen) < 60, f"the loop does not end: {seen[-6:]}"
        return found

    monkeypatch.setattr(loop, "limit_upper", within)
    other = table.client.create_or_load("shop.u", **KEYED)
    other.compare_and_append([(row(1), 0, 1)], 0, 20)
    endpoint = Endpoint("sqlite", tmp_path)

    with materializing(
        lake, endpoint, tmp_path, bindings=TU, section={"size": "1KiB"}, jobs=Large()
    ) as materialization:
        once(materialization)
        table.client.append_all(
            [AppendTo(table.collection, [], 20, 40)], [Fail(table.collection, 22, LOST)]
        )
        for n in range(5):
            low = 20 + 4 * n
            rows = [(row(1000 * n + k), low, 1) for k in range(10, 400)]
            other.compare_and_append(rows, low, low + 4)
        other.compare_and_append([(row(5), 40, 1)], 40, 60)
        table.client.append_all(
            [AppendTo(table.collection, [], 40, 60)], [Recover(table.collection, 40)]
        )
        once(materialization)
    assert len(endpoint.rows("u")) == 2 + 5 * 390


def test_binding_left_behind_that_recovers_during_planned_transaction_is_stored(
    lake: str, table: Table, tmp_path: Path
) -> None:
    other = table.client.create_or_load("shop.u", **KEYED)
    other.compare_and_append([(row(1), 0, 1)], 0, 20)
    endpoint = Endpoint("sqlite", tmp_path)
    said = {"on_error": "leave_behind"}
    with materializing(lake, endpoint, tmp_path, bindings=TU, section=said) as materialization:
        once(materialization)
        up = table.collection.upper
        table.client.append_all(
            [AppendTo(table.collection, [], up, up + 10)], [Fail(table.collection, up + 2, LOST)]
        )
        other.compare_and_append([(row(2), 30, 1)], 20, 60)
        with armed(Failpoint.PLAN_DONE, Action.ERROR), pytest.raises(IndeterminateError):
            once(materialization)
    up = table.collection.upper
    table.client.append_all(
        [AppendTo(table.collection, [], up, up + 5)], [Recover(table.collection, up)]
    )
    with materializing(lake, endpoint, tmp_path, bindings=TU, section=said) as materialization:
        once(materialization)
    assert endpoint.rows() == table.contents()


def test_error_before_since_of_another_collection_is_reported(
    lake: str, table: Table, tmp_path: Path
) -> None:
    up = table.collection.upper
    table.client.append_all(
        [AppendTo(table.collection, [], up, up + 50)], [Fail(table.collection, up + 5, LOST)]
    )
    other = table.client.create_or_load("shop.u", **KEYED)
    other.compare_and_append([(row(1), 0, 1)], 0, 60)
    other.allow_compaction(40).result()
    with (
        materializing(
            lake,
            Endpoint("sqlite", tmp_path),
            tmp_path,
            bindings=TU,
            section={"on_error": "stop"},
        ) as materialization,
        pytest.raises(PenstockError, match="slot is gone"),
    ):
        once(materialization)


@pytest.mark.parametrize("connector", ["sqlite", "staged-files", "plain-files"])
@pytest.mark.parametrize("step", [None, Failpoint.APPLY_DONE, Failpoint.STORE_DONE])
def test_frozen_binding_with_changed_layout_resumes_with_new_layout(
    lake: str, table: Table, tmp_path: Path, connector: str, step: Failpoint | None
) -> None:
    other = Other(table)
    other.add(20)
    endpoint = Endpoint(connector, tmp_path)
    key = "table" if connector == "sqlite" else "name"
    bindings = [{**each, "resource": {key: each["resource"]["table"]}} for each in TU]
    bring(lake, endpoint, tmp_path, bindings=bindings)
    before = table.contents()
    fail(table, 25)
    other.add(40)
    bring(lake, endpoint, tmp_path, bindings=bindings)
    # The column is added while the binding is frozen, and the default is in every row.
    grown = table.client.collection("shop.t")
    grown.alter(pa.schema([*SCHEMA, pa.field("n", pa.int32(), nullable=False)]), defaults={"n": 7})
    other.add(60)
    bring(lake, endpoint, tmp_path, bindings=bindings)
    assert endpoint.rows() == before
    upper = grown.upper
    added = {"id": 100, "name": "a", "amount": 1, "n": 9}
    table.client.append_all(
        [AppendTo(grown, [(added, upper, 1)], upper, 80)], [Recover(grown, upper)]
    )
    other.add(80)
    if step is not None:
        with (
            materializing(lake, endpoint, tmp_path, bindings=bindings) as crashed,
            armed(step, Action.ERROR),
            pytest.raises(IndeterminateError),
        ):
            once(crashed)
    bring(lake, endpoint, tmp_path, bindings=bindings)
    assert endpoint.rows() == [*({**each, "n": 7} for each in before), added]
    assert [each["id"] for each in endpoint.rows("u")] == other.ids
    assert frontiers(lake) == {"t": 80, "u": 80}


def test_raised_backfill_of_frozen_binding_stores_all_rows_below_error_time(
    lake: str, table: Table, tmp_path: Path
) -> None:
    other = Other(table)
    other.add(20)
    endpoint = Endpoint("sqlite", tmp_path)
    fail(table, 25)
    other.add(60)
    bring(lake, endpoint, tmp_path, bindings=TU)
    with closing(sqlite3.connect(tmp_path / "t.db")) as database:
        database.execute("DELETE FROM t WHERE id % 2 = 0")
        database.commit()
    raised = [{**TU[0], "backfill": 1}, TU[1]]
    bring(lake, endpoint, tmp_path, bindings=raised)
    assert endpoint.rows() == table.contents()
    assert frontiers(lake) == {"t": 25, "u": 60}
    recover(table)
    table.collection.compare_and_append([], table.collection.upper, 80)
    other.add(80)
    bring(lake, endpoint, tmp_path, bindings=raised)
    assert endpoint.rows() == table.contents()
    assert [each["id"] for each in endpoint.rows("u")] == other.ids


def test_field_included_while_binding_is_frozen_is_stored_after_resync(
    lake: str, table: Table, tmp_path: Path
) -> None:
    other = Other(table)
    other.add(20)
    endpoint = Endpoint("sqlite", tmp_path)
    fail(table, 25)
    other.add(60)
    resource = {"table": "t", "document": False}
    less = {**TU[0], "resource": resource, "fields": {"exclude": ["name"]}}
    bring(lake, endpoint, tmp_path, bindings=[less, TU[1]])
    more = [{**TU[0], "resource": resource}, TU[1]]
    bring(lake, endpoint, tmp_path, bindings=more)
    recover(table)
    table.collection.compare_and_append([], table.collection.upper, 80)
    other.add(80)
    bring(lake, endpoint, tmp_path, bindings=more)
    with closing(sqlite3.connect(tmp_path / "t.db")) as database:
        found = database.execute("SELECT id, name, amount FROM t ORDER BY id").fetchall()
    assert found == [(each["id"], each["name"], each["amount"]) for each in table.contents()]
