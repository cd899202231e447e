"""Lakes and endpoints that were restored from a backup, emptied or created again."""

import contextlib
import json
import shutil
import sqlite3

import pyarrow as pa
import pytest

from penstock import materialize, persist
from penstock.errors import UsageError

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), ("n", pa.int64())])


def test_binding_newer_than_restored_lake_raises_usage_error_until_backfill(tmp_path):
    lake, copy, file = tmp_path / "lake", tmp_path / "copy", tmp_path / "f.yaml"

    def bring(*bound, backfill=0):
        bindings = "".join(
            f"      - {{collection: {name}, resource: {{table: {name}}}, backfill: {backfill}}}\n"
            for name in bound
        )
        file.write_text(
            f"location: file:{lake}\nwriter: w\nmaterializations:\n  desk:\n    connector: sqlite\n"
            f"    endpoint: {{path: {tmp_path}/desk.db}}\n    bindings:\n{bindings}"
        )
        materialize.run(file, jobs=materialize.LocalRunner(), once=True)

    def append(name, updates, lower, upper):
        with persist.open(f"file:{lake}/shop", writer="upstream") as client:
            made = client.create_or_load(name, schema=SCHEMA, key_columns=["id"])
            changes = [({"id": id, "n": n}, time, diff) for id, n, time, diff in updates]
            made.compare_and_append(changes, lower, upper)

    def stored_rows(name):
        with contextlib.closing(sqlite3.connect(tmp_path / "desk.db")) as endpoint:
            return endpoint.execute(f"SELECT id, n FROM {name} ORDER BY id").fetchall()

    append("a", [(1, 0, 1_000, 1)], 0, 2_000)
    append("b", [(1, 0, 1_000, 1)], 0, 2_000)
    bring("a")
    shutil.copytree(lake, copy)
    append("a", [], 2_000, 3_000)
    append("b", [(7, 7, 2_500, 1)], 2_000, 3_000)
    bring("a", "b")
    assert stored_rows("b") == [(1, 0), (7, 7)]
    shutil.rmtree(lake)
    copy.rename(lake)
    # Row 7 does not exist upstream either, so a comparison with the backup does not find it.
    append("a", [], 2_000, 5_000)
    append("b", [(1, 0, 4_000, -1), (1, 5, 4_000, 1)], 2_000, 5_000)
    with pytest.raises(UsageError, match="is ahead of its recovery log") as refused:
        bring("a", "b")
    assert "b" in str(refused.value)
    bring("a", "b", backfill=1)
    assert stored_rows("a") == [(1, 0)]
    assert stored_rows("b") == [(1, 5)]


@pytest.fixture
def orders(tmp_path):
    """A lake with one collection of two rows."""
    with persist.open(f"file:{tmp_path}/lake/shop", writer="upstream") as client:
        made = client.create_or_load("a", schema=SCHEMA, key_columns=["id"])
        rows = [({"id": id, "n": 0}, 1_000, 1) for id in (1, 2)]
        made.compare_and_append(rows, 0, 2_000)
    return tmp_path


def bring_orders(folder, *, backfill=0, endpoint=None):
    file = folder / "f.yaml"
    connector = "sqlite" if endpoint is None else "postgres"
    endpoint = endpoint or {"path": f"{folder}/desk.db"}
    file.write_text(
        f"location: file:{folder}/lake\nwriter: w\nmaterializations:\n  desk:\n"
        f"    connector: {connector}\n    endpoint: {json.dumps(endpoint)}\n    bindings:\n"
        f"      - {{collection: a, resource: {{table: a}}, backfill: {backfill}}}\n"
    )
    materialize.run(file, jobs=materialize.LocalRunner(), once=True)


def append_order(folder, id, lower, upper):
    with persist.open(f"file:{folder}/lake/shop", writer="upstream") as client:
        client.collection("a").compare_and_append([({"id": id, "n": 0}, lower, 1)], lower, upper)


def ids(folder):
    with contextlib.closing(sqlite3.connect(folder / "desk.db")) as endpoint:
        return [id for (id,) in endpoint.execute("SELECT id FROM a ORDER BY id")]


def test_start_with_empty_endpoint_after_commits_is_rejected_until_backfill(orders):
    bring_orders(orders)
    assert ids(orders) == [1, 2]
    for file in orders.glob("desk.db*"):
        file.unlink()
    append_order(orders, 3, 2_000, 3_000)
    for _ in range(2):
        with pytest.raises(UsageError, match="does not exist any more") as rejected:
            bring_orders(orders)
        assert "set the backfill of its binding to 1" in rejected.value.hint
        assert not [*orders.glob("desk.db*")]
    bring_orders(orders, backfill=1)
    assert ids(orders) == [1, 2, 3]


def test_start_without_endpoint_checkpoint_is_rejected_until_backfill(orders):
    bring_orders(orders)
    with contextlib.closing(sqlite3.connect(orders / "desk.db")) as endpoint:
        endpoint.execute("DELETE FROM flow_checkpoints_v1")
        endpoint.commit()
    append_order(orders, 3, 2_000, 3_000)
    for _ in range(2):
        with pytest.raises(UsageError, match="has no checkpoint for resource") as rejected:
            bring_orders(orders)
        assert "set the backfill of its binding to 1" in rejected.value.hint
    assert ids(orders) == [1, 2]
    bring_orders(orders, backfill=1)
    assert ids(orders) == [1, 2, 3]


def test_endpoint_restored_after_rejection_resumes(orders):
    bring_orders(orders)
    # The -wal file may hold the last commits.
    kept = {file: file.with_name(f"kept{file.suffix}") for file in orders.glob("desk.db*")}
    for file, copy in kept.items():
        file.rename(copy)
    append_order(orders, 3, 2_000, 3_000)
    with pytest.raises(UsageError, match="does not exist any more"):
        bring_orders(orders)
    for file, copy in kept.items():
        copy.rename(file)
    bring_orders(orders)
    assert ids(orders) == [1, 2, 3]


def test_start_with_recreated_database_after_commits_is_rejected_until_backfill(
    orders, postgres_server
):
    database = postgres_server.create_database("desk")
    endpoint = {"url": database.url()}
    bring_orders(orders, endpoint=endpoint)
    database.drop()
    database = postgres_server.create_database("desk")
    append_order(orders, 3, 2_000, 3_000)
    with pytest.raises(UsageError, match="does not exist any more"):
        bring_orders(orders, endpoint=endpoint)
    assert database.sql("SELECT to_regclass('public.a')") == [(None,)]
    bring_orders(orders, endpoint=endpoint, backfill=1)
    assert database.sql("SELECT id FROM a ORDER BY id") == [(1,), (2,), (3,)]
    database.drop()
