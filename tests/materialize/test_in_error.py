"""Collections in error, for a while or for good, and those that are bound beside them."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import IndeterminateError, PenstockError
from penstock.failpoints import Action, Failpoint, tripped
from penstock.materialize import driver
from penstock.materialize.driver import StoppedByError
from penstock.materialize.here import TasksHere, _Here
from penstock.materialize.rounds import Commits, Rounds
from penstock.materialize.shard import ShardPlan, run_shard
from penstock.persist import AppendTo, Fail, Recover, StoredError
from tests.materialize.lake import KEYED, TU, Endpoint, Table, materializing, once, row

LOST = StoredError("SlotLost", "slot is gone", "It was dropped.", "Copy it again.")


def fail(table: Table, time: int) -> None:
    upper = table.collection.upper
    table.client.append_all(
        [AppendTo(table.collection, [], upper, time + 10)], [Fail(table.collection, time, LOST)]
    )


def test_an_error_of_a_collection_stops_there_and_says_why(
    lake: str, table: Table, tmp_path: Path
) -> None:
    endpoint = Endpoint("sqlite", tmp_path)
    before = table.contents()
    fail(table, table.collection.upper + 5)
    with materializing(lake, endpoint, tmp_path) as materialization:
        for follows in (False, True):
            with pytest.raises(StoppedByError, match="slot is gone") as told:
                materialization.run(threading.Event(), once=not follows)
            assert endpoint.rows() == before, "up to there it is materialized"
    assert "leave_behind" in told.value.hint
    assert "slot is gone" in materialization.status()["error"]


def test_an_error_that_ended_leaves_the_endpoint_as_the_collection_is(
    lake: str, table: Table, tmp_path: Path
) -> None:
    endpoint = Endpoint("sqlite", tmp_path)
    with materializing(lake, endpoint, tmp_path) as materialization:
        once(materialization)
        at = table.collection.upper + 5
        fail(table, at)
        # A resync: what was wrong is put right, in one step.
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


def test_others_go_on_without_a_collection_in_error(
    lake: str, table: Table, tmp_path: Path
) -> None:
    other = table.client.create_or_load("shop.u", **KEYED)
    other.compare_and_append([(row(1), 0, 1)], 0, 20)
    endpoint = Endpoint("sqlite", tmp_path)
    before = table.contents()
    with materializing(
        lake, endpoint, tmp_path, bindings=TU, section={"on_error": "leave_behind"}
    ) as materialization:
        once(materialization)
        fail(table, 25)
        other.compare_and_append([(row(2), 30, 1)], 20, 40)
        once(materialization)
        assert [each["id"] for each in endpoint.rows("u")] == [1, 2]
        assert endpoint.rows() == before
        assert materialization.status()["left_behind"] == ["shop.t"]


class Counting:
    """Tasks that are given up if they come to no end."""

    def __init__(self) -> None:
        self.uppers: list[int] = []

    def run(self, plans: Sequence[ShardPlan], commits: Commits) -> None:
        self.uppers.append(plans[0].upper)
        assert len(self.uppers) < 30, f"it comes to no end: {self.uppers}"
        TasksHere().run(plans, commits)


class Large:
    """Tasks of transactions that are large: none is offered to those that run."""

    def run(self, plans: Sequence[ShardPlan], commits: Commits) -> None:
        rounds = Rounds(len(plans), commits, lambda _: False)
        for at, plan in enumerate(plans):
            run_shard(plan, _Here(rounds, at))
        if rounds.error:
            raise rounds.error


def test_a_backlog_is_not_cut_within_an_error_that_ended(
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


def test_a_backlog_without_offers_is_not_cut_within_an_error_that_ended(
    lake: str, table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = driver.upper_within, []

    def within(states: Any, reached: int, upper: int, most: int) -> int:
        found = real(states, reached, upper, most)
        seen.append((reached, upper, found))
        assert len(seen) < 60, f"it comes to no end: {seen[-6:]}"
        return found

    monkeypatch.setattr(driver, "upper_within", within)
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


def test_one_left_behind_recovers_while_a_transaction_is_planned(
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
        with tripped(Failpoint.PLAN_DONE, Action.ERROR), pytest.raises(IndeterminateError):
            once(materialization)
    up = table.collection.upper
    table.client.append_all(
        [AppendTo(table.collection, [], up, up + 5)], [Recover(table.collection, up)]
    )
    with materializing(lake, endpoint, tmp_path, bindings=TU, section=said) as materialization:
        once(materialization)
    assert endpoint.rows() == table.contents()


def test_one_in_error_before_another_begins_is_told(
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
        materializing(lake, Endpoint("sqlite", tmp_path), tmp_path, bindings=TU) as materialization,
        pytest.raises(PenstockError, match="slot is gone"),
    ):
        once(materialization)
