"""Commands against a running `penstock up`, each in its own process."""

import os
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from penstock.clock import SYSTEM_CLOCK
from penstock.servers.postgres import Database
from tests.e2e.process import Up, descendants, java_of, lines, penstock, until, well

pytestmark = [pytest.mark.spark, pytest.mark.long]

SECRET = "s3cret-of-the-follower"
LAKE = "file:./lake"
HTTP = ("--http", "127.0.0.1:0")

SOURCES = """\
location: file:./lake
writer: {writer}
tick: 250ms
sources:
  shop:
    postgres:
      url: ${{SHOP_URL}}
      publication: {publication}
      tables: [{tables}]
"""
ONE = """\
materializations:
  one:
    connector: sqlite
    endpoint: {path: ./one.db}
    bindings:
      - {collection: shop.public.customers, resource: {table: customers}}
      - {collection: shop.public.orders, resource: {table: orders}}
"""
ONE_MORE = """\
      - {collection: shop.public.extra, resource: {table: extra}}
"""
TWO = """\
  two:
    connector: sqlite
    endpoint: {path: ./two.db}
    bindings:
      - {collection: shop.public.customers, resource: {table: customers}}
"""


@dataclass
class Shop:
    """Tables and the pipeline files that materialize them."""

    folder: Path
    database: Database
    publication: str = "ours"
    rows: int = 0

    @property
    def environment(self) -> dict[str, str]:
        url = self.database.url(user=f"f_{self.database.name}", password=SECRET, host="tcp")
        return {"SHOP_URL": url}

    def write(
        self,
        more: str = "",
        *,
        tables: str = "public.customers, public.orders",
        writer: str = "desk-1",
        name: str = "pipeline.yaml",
    ) -> str:
        written = SOURCES.format(writer=writer, publication=self.publication, tables=tables)
        (self.folder / name).write_text(written + more)
        return name

    def insert(self) -> int:
        """Insert a customer with an order in one transaction; return their id."""
        self.rows += 1
        self.database.sql(
            f"BEGIN; INSERT INTO customers VALUES ({self.rows}, 'customer {self.rows}');"
            f" INSERT INTO orders VALUES ({self.rows}, {self.rows}, {self.rows}.50); COMMIT"
        )
        return self.rows

    def up(self, *words: str, log: str = "up.log") -> Up:
        return Up(self.folder, "up", *words, environment=self.environment, log=self.folder / log)

    def penstock(self, *words: str) -> Any:
        return penstock(self.folder, *words, environment=self.environment)

    def well(self, *words: str) -> str:
        return well(self.folder, *words, environment=self.environment)

    def in_sqlite(self, file: str, table: str) -> list[int] | None:
        """Return the ids of a table, or None if it does not exist."""
        if not (self.folder / file).exists():
            return None
        try:
            with closing(sqlite3.connect(self.folder / file)) as target:
                return [row[0] for row in target.execute(f"SELECT id FROM {table} ORDER BY id")]
        except sqlite3.OperationalError:
            return None

    def await_in(self, up: Up, file: str, table: str, id: int) -> None:
        def has_row() -> bool:
            up.check()
            return id in (self.in_sqlite(file, table) or ())

        until(has_row, f"row {id} in {table} of {file}")

    def ids(self, collection: str) -> list[int]:
        return sorted(row["id"] for row in lines(self.well("read", LAKE, collection)))

    def slots(self) -> list[Any]:
        return self.database.sql(
            "SELECT slot_name FROM pg_replication_slots WHERE database = current_database()"
        )

    def publications(self) -> list[Any]:
        return self.database.sql("SELECT pubname FROM pg_publication")


@pytest.fixture
def shop(tmp_path: Path, database: Database) -> Iterator[Shop]:
    role = f"f_{database.name}"
    database.sql(
        "CREATE TABLE customers (id int PRIMARY KEY, name text);"
        "CREATE TABLE orders (id int PRIMARY KEY, customer int, total numeric);"
        "CREATE TABLE extra (id int PRIMARY KEY)"
    )
    database.sql(f"CREATE ROLE {role} SUPERUSER LOGIN PASSWORD '{SECRET}'")
    shop = Shop(tmp_path, database)
    for _ in range(20):
        shop.insert()
    yield shop
    database.sql(f"REASSIGN OWNED BY {role} TO postgres; DROP OWNED BY {role}; DROP ROLE {role}")


def task(up: Up, kind: str, name: str) -> Any:
    (found,) = [each for each in up.state()[kind] if each["name"] == name]
    return found


def await_state(up: Up, kind: str, name: str, state: str) -> None:
    until(lambda: task(up, kind, name)["state"] == state, f'"{name}" to be {state}')


def test_running_pipeline_executes_requests(shop: Shop) -> None:
    file = shop.write(ONE + TWO)
    with shop.up(file, *HTTP) as up:
        up.await_ready("shop", "one", "two")
        _is_seen(shop, up)
        _is_catalogued(shop)
        _rests_and_goes_on(shop, up)
        _check_maintenance(shop, up)
        _loses_its_jvm(shop, up)
        assert up.terminate() == 0, up.output()[-4_000:]
        output = up.output()
    _is_changed(shop)
    with shop.up(file, *HTTP, "--allow-drop") as up:
        up.await_ready("shop", "one")
        shop.await_in(up, "one.db", "extra", 1)
        assert shop.in_sqlite("two.db", "customers") is None, "its tables are deleted"
        _is_let_go(shop, up)
        assert up.wait() == 0, "it has nothing to do any more"
        output += up.output()
    assert SECRET not in output
    for path in (shop.folder / "lake").rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path


def _is_seen(shop: Shop, up: Up) -> None:
    """Check status, read, tail and the status page."""
    (told,) = lines(shop.well("status", LAKE, "--json"))
    by_kind = {
        kind: {each[kind] for where in told["storage_locations"] for each in where[f"{kind}s"]}
        for kind in ("source", "materialization")
    }
    assert by_kind == {"source": {"shop"}, "materialization": {"one", "two"}}
    assert all(where["writer"] for where in told["storage_locations"] if where["sources"])
    assert "shop.public.orders" in shop.well("status", LAKE)
    assert shop.ids("shop.public.orders") == [*range(1, 21)]

    before = _upper(up, "shop.public.orders")
    id = shop.insert()
    shop.await_in(up, "one.db", "orders", id)
    shop.await_in(up, "two.db", "customers", id)
    # The page polls every second.
    noted = SYSTEM_CLOCK.now_ms()
    until(lambda: _upper(up, "shop.public.orders") > noted, "the page to know of it")
    after = _upper(up, "shop.public.orders")
    (change,) = lines(
        shop.well(
            *("tail", LAKE, "shop.public.orders", "--no-snapshot"),
            *("--as-of", str(before - 1), "--until", str(after)),
        )
    )
    assert (change["mz_diff"], change["id"], change["total"]) == (1, id, f"{id}.50")
    assert before <= change["mz_timestamp"] < after

    metrics = up.get("/metrics").body.decode()
    for line in ('source_up{source="shop"} 1.0', 'materialization_up{materialization="one"} 1.0'):
        assert f"penstock_{line}" in metrics
    assert up.get("/healthz").status == 200
    assert up.get("/readyz").json == {"ready": True, "waits_for": [], "degraded": []}
    for path in ("/", "/api/state", "/metrics", "/api/rows?collection=shop.public.orders"):
        answer = up.get(path)
        assert answer.status == 200
        assert SECRET.encode() not in answer.body


def _upper(up: Up, collection: str) -> int:
    (found,) = [each for each in up.state()["collections"] if each["name"] == collection]
    return int(found["upper"])


def _is_catalogued(shop: Shop) -> None:
    objects = lines(shop.well("read", LAKE, "mz_objects"))
    assert {(each["name"], each["type"]) for each in objects} == {
        ("shop", "source"),
        ("shop_progress", "source_progress"),
        ("shop_remap", "collection"),
        ("shop.public.customers", "collection"),
        ("shop.public.orders", "collection"),
        ("one", "materialization"),
        ("two", "materialization"),
    }
    ids = {each["name"]: each["id"] for each in objects}
    assert lines(shop.well("read", LAKE, "mz_sources")) == [
        {"id": ids["shop"], "name": "shop", "type": "postgres"}
    ]
    assert lines(shop.well("read", LAKE, "mz_source_progresses")) == [
        {"id": ids["shop_progress"], "name": "shop_progress", "source_id": ids["shop"]}
    ]
    assert "${SHOP_URL}" in str([each["definition"] for each in objects])


def _rests_and_goes_on(shop: Shop, up: Up) -> None:
    shop.well("pause", LAKE, "one")
    await_state(up, "materializations", "one", "paused")
    id = shop.insert()
    shop.await_in(up, "two.db", "customers", id)
    assert id not in (shop.in_sqlite("one.db", "customers") or ())
    shop.well("pause", LAKE, "shop")
    await_state(up, "sources", "shop", "paused")
    assert up.get("/healthz").status == 200
    refused = shop.penstock("resync", LAKE, "shop")
    assert refused.returncode == 1
    assert 'source "shop" cannot resync: it is paused' in refused.stderr
    assert "penstock resume" in refused.stderr
    later = shop.insert()
    shop.well("resume", LAKE, "one")
    shop.await_in(up, "one.db", "customers", id)
    assert later not in shop.ids("shop.public.customers")
    shop.well("resume", LAKE, "shop")
    shop.await_in(up, "one.db", "customers", later)
    shop.await_in(up, "two.db", "customers", later)


def _check_maintenance(shop: Shop, up: Up) -> None:
    """Check compact and resync by the owner, and rejected requests."""
    assert shop.well("compact", LAKE).count("compacted by its owner") == 3
    assert "shop: compared, " in shop.well("resync", LAKE, "shop", "public.orders")
    refused = shop.penstock("resync", LAKE, "one")
    assert refused.returncode == 1
    assert 'materialization "one" cannot resync' in refused.stderr
    unknown = shop.penstock("pause", LAKE, "missing")
    assert unknown.returncode == 1
    assert 'has no source or materialization "missing"' in unknown.stderr
    up.check()


def _loses_its_jvm(shop: Shop, up: Up) -> None:
    first = java_of(up.process.pid)
    os.kill(first, signal.SIGKILL)
    for _ in range(2):
        id = shop.insert()
        shop.await_in(up, "one.db", "orders", id)
        shop.await_in(up, "two.db", "customers", id)
    assert java_of(up.process.pid) != first
    up.await_ready()
    connectors = [
        pid
        for pid in descendants(up.process.pid)
        if b"serve" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    ]
    assert len(connectors) == 2, "each has one, and old ones have ended"


def _is_changed(shop: Shop) -> None:
    """Add a table and a binding, and remove a materialization."""
    shop.database.sql("INSERT INTO extra VALUES (1)")
    tables = "public.customers, public.orders, public.extra"
    file = shop.write(ONE + ONE_MORE, tables=tables)
    planned = shop.well("plan", file)
    assert 'create source "shop": table public.extra is added, with an initial snapshot' in planned
    assert 'create materialization "one": resource extra is bound' in planned
    assert 'drop materialization "two"' in planned
    refused = shop.penstock("up", file, "--http", "none")
    assert refused.returncode == 1
    assert 'error: the file would drop materialization "two"' in refused.stderr
    assert "--allow-drop" in refused.stderr
    assert shop.in_sqlite("two.db", "customers"), "nothing was done"


def _is_let_go(shop: Shop, up: Up) -> None:
    assert "raise backfill" in shop.well("drop", LAKE, "one", "--keep-target")
    assert shop.in_sqlite("one.db", "customers") == [*range(1, shop.rows + 1)]
    assert shop.slots()
    assert shop.publications() == [("ours",)]
    shop.well("drop", LAKE, "shop")
    assert shop.slots() == []
    assert shop.publications() == []
    gone = shop.penstock("read", LAKE, "shop.public.orders")
    assert gone.returncode == 1
    assert "shop.public.orders" in gone.stderr
    assert lines(shop.well("read", LAKE, "mz_objects")) == []


def test_removed_table_is_dropped_with_allow_drop(shop: Shop) -> None:
    file = shop.write()
    shop.well("up", file, "--once", "--http", "none")
    assert shop.ids("shop.public.orders") == [*range(1, 21)]
    shop.write(tables="public.orders, public.extra")
    assert "table public.customers is removed" in shop.well("plan", file)
    refused = shop.penstock("up", file, "--once", "--http", "none")
    assert refused.returncode == 1
    assert "--allow-drop" in refused.stderr
    assert shop.ids("shop.public.customers") == [*range(1, 21)]
    shop.insert()
    shop.database.sql("INSERT INTO extra VALUES (7)")
    shop.well("up", file, "--once", "--http", "none", "--allow-drop")
    assert shop.penstock("read", LAKE, "shop.public.customers").returncode == 1
    assert shop.ids("shop.public.orders") == [*range(1, 22)]
    assert shop.ids("shop.public.extra") == [7]
    assert shop.well("plan", file) == "nothing changes\n"
    # The table can be added again.
    shop.write(tables="public.orders, public.extra, public.customers")
    shop.well("up", file, "--once", "--http", "none")
    assert shop.ids("shop.public.customers") == [*range(1, 22)]
    # Without an owner, the command itself drops it.
    shop.well("drop", LAKE, "shop")
    assert (shop.slots(), shop.publications()) == ([], [])


def test_two_processes_on_one_lake_lose_nothing_and_one_continues(shop: Shop) -> None:
    file, other = shop.write(ONE), shop.write(ONE, writer="desk-2", name="other.yaml")
    with shop.up(file, *HTTP) as first:
        first.await_ready("shop", "one")
        refused = shop.penstock("up", other, "--http", "none")
        assert refused.returncode == 1
        assert "error: " in refused.stderr
        assert "hint: " in refused.stderr
        assert "desk-1" in refused.stderr
        first.check()
        for _ in range(20):
            shop.insert()
        rejected = shop.penstock("up", file, "--http", "none")
        assert rejected.returncode == 1
        assert f"Process {first.process.pid} of this host runs" in rejected.stderr
        assert "--take-over" in rejected.stderr
        first.check()
        length = len(first.output())
        with shop.up(file, *HTTP, "--take-over", log="second.log") as second:
            second.await_ready("shop", "one")
            assert first.wait() == 3
            ended = first.output()[length:]
            assert ended.count("was fenced") == 1, ended
            assert "Traceback" not in ended
            assert "warning" not in ended.lower()
            for _ in range(20):
                shop.insert()
            until(
                lambda: shop.ids("shop.public.orders") == [*range(1, shop.rows + 1)],
                "all rows in the collection",
            )
            assert second.terminate() == 0, second.output()
            assert "Traceback" not in second.output()
    shop.well("drop", LAKE, "one")
    shop.well("drop", LAKE, "shop")
