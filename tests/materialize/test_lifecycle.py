"""Lifecycle of a materialization: shard count, schema changes, status and waits."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock.connectors.sqlite.connector import SqliteConnector
from penstock.connectors.sqlite.transactor import SqliteTransactor
from penstock.data import DIFF, TIME
from penstock.errors import IndeterminateError, PenstockError, UsageError
from penstock.failpoints import Action, Failpoint, armed
from penstock.materialize.shard import close_sessions
from penstock.persist import CollectionMissing
from tests.materialize.lake import (
    KEYED,
    TU,
    Endpoint,
    Table,
    following,
    materializing,
    once,
    stored_state,
)


@pytest.mark.parametrize("connector", ["sqlite", "plain-files", "staged-files"])
@pytest.mark.parametrize("step", [None, Failpoint.PLAN_DONE, Failpoint.RECOVERY_DONE])
def test_changed_shard_count_rebalances_keys_and_loses_no_change(
    lake: str, table: Table, tmp_path: Path, connector: str, step: Failpoint | None
) -> None:
    endpoint = Endpoint(connector, tmp_path)
    for shards in (1, 3, 2, 1):
        table.change()
        if step is not None:
            with (
                materializing(lake, endpoint, tmp_path, shards=shards) as crashed,
                armed(step, Action.ERROR),
                pytest.raises(IndeterminateError),
            ):
                once(crashed)
            table.change()
        with materializing(lake, endpoint, tmp_path, shards=shards) as materialization:
            once(materialization)
        assert endpoint.rows() == table.contents(), shards


def add_a_column(table: Table) -> None:
    table.collection.alter(pa.schema([*table.collection.schema, ("more", pa.string())]))


def test_added_column_is_stored_and_changes_spec_version(
    lake: str, table: Table, tmp_path: Path
) -> None:
    endpoint = Endpoint("sqlite", tmp_path)
    with materializing(lake, endpoint, tmp_path) as materialization:
        once(materialization)
        version = materialization.version
        table.change()
        once(materialization)
        assert materialization.version == version, "it changes exactly when the specification does"
        add_a_column(table)
        collection, upper = table.client.collection("shop.t"), table.collection.upper
        row = {"id": [99], "name": ["n"], "amount": [1], "more": ["much"]}
        updates = pa.table({**row, TIME: [upper], DIFF: [1]})
        collection.compare_and_append(updates, upper, upper + 1)
        once(materialization)
        assert materialization.version != version
    held = {row["id"]: row for row in endpoint.rows()}
    assert held[99]["more"] == "much"


def test_status_names_collection_that_is_behind(lake: str, table: Table, tmp_path: Path) -> None:
    other = table.client.create_or_load("shop.u", **KEYED)
    other.compare_and_append([], 0, 7)
    with materializing(
        lake, Endpoint("sqlite", tmp_path), tmp_path, bindings=TU
    ) as materialization:
        once(materialization)
        told = materialization.status()
    assert told.upper == 7
    assert 'collection "shop.u"' in (told.waits_for or "")


def test_status_names_collection_that_its_source_has_not_created(
    lake: str, table: Table, tmp_path: Path
) -> None:
    endpoint = Endpoint("sqlite", tmp_path)
    with (
        materializing(lake, endpoint, tmp_path, collection="shop.x", sources=["shop"]) as waiting,
        following(waiting) as until,
    ):
        until(lambda: waiting.status().waits_for == "its source to make shop.x")


def test_collection_without_source_raises_collection_missing(
    lake: str, table: Table, tmp_path: Path
) -> None:
    with (
        materializing(lake, Endpoint("sqlite", tmp_path), tmp_path, collection="shop.x") as wrong,
        pytest.raises(CollectionMissing, match=r"shop\.x"),
    ):
        once(wrong)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"endpoint": {"pfad": "x"}}, "endpoint"),
        ({"bindings": [{"collection": "shop.t", "resource": {"table": 7}}]}, '"table"'),
    ],
    ids=["endpoint", "resource"],
)
def test_config_that_violates_connector_schema_raises_usage_error(
    lake: str, table: Table, tmp_path: Path, changed: dict[str, Any], named: str
) -> None:
    with (
        materializing(lake, Endpoint("sqlite", tmp_path), tmp_path, section=changed) as wrong,
        pytest.raises(UsageError, match=named),
    ):
        once(wrong)


def test_running_materialization_follows_changes_and_stores_status(
    lake: str, table: Table, tmp_path: Path
) -> None:
    endpoint = Endpoint("sqlite", tmp_path)
    with (
        materializing(lake, endpoint, tmp_path) as materialization,
        following(materialization) as until,
    ):
        for _ in range(3):
            table.change()
            until(lambda: materialization.status().upper >= table.collection.upper)
    assert endpoint.rows() == table.contents()
    note = stored_state(lake)["status"]
    assert note["upper"] == table.collection.upper
    assert set(note["last_transaction"]) >= {"read_ms", "stored_ms", "acknowledged_ms"}
    assert json.dumps(note)


class Failing(SqliteTransactor):
    """A transactor whose commits fail."""

    def start_commit(self, checkpoint: bytes) -> None:
        raise RuntimeError("no")


class Unreliable(SqliteConnector):
    """A connector whose transactors fail once `fails` is set."""

    fails = False

    def open(self, opening: Any) -> SqliteTransactor:
        found = super().open(opening)
        if self.fails:
            found.__class__ = Failing
        return found


def test_status_upper_does_not_advance_before_connector_commits(
    lake: str, table: Table, tmp_path: Path
) -> None:
    endpoint, connector = Endpoint("sqlite", tmp_path), Unreliable()
    with materializing(lake, endpoint, tmp_path, connector=connector) as materialization:
        once(materialization)
        reached = materialization.status().upper
        table.change()
        connector.fails = True
        close_sessions()
        with following(materialization) as until:
            until(lambda: materialization.status().phase == "retrying")
            told = materialization.status()
    assert told.upper == reached


def test_status_error_is_cleared_after_successful_run(
    lake: str, table: Table, tmp_path: Path
) -> None:
    endpoint = Endpoint("sqlite", tmp_path)
    with materializing(lake, endpoint, tmp_path) as materialization:
        once(materialization)
        materialization._fail("retrying", PenstockError("connector is away"))
        once(materialization)
        assert materialization.status().error is None
