"""Lake restored from a copy, while its slot and its endpoint are newer."""

import contextlib
import shutil
import sqlite3
from pathlib import Path

import pytest

import penstock.ingest
import penstock.materialize
from penstock import persist
from penstock.errors import UsageError
from penstock.materialize import LocalRunner
from penstock.servers.postgres import Database


class Shop:
    """Table, its lake and its SQLite file."""

    def __init__(self, folder: Path, database: Database) -> None:
        self.database = database
        self.folder = folder
        self.lake = folder / "lake"
        self.file = folder / "shop.yaml"
        database.sql(
            "CREATE TABLE t (id int PRIMARY KEY, n int);"
            "INSERT INTO t SELECT g, 0 FROM generate_series(1, 50) g"
        )
        self.write(backfill=0)

    def write(self, backfill: int, lake: Path | None = None) -> None:
        self.lake = lake or self.lake
        self.file.write_text(f"""
location: file:{self.lake}
writer: w
tick: 100ms
sources:
  shop:
    postgres: {{url: "{self.database.url()}", tables: [public.t]}}
materializations:
  desk:
    connector: sqlite
    endpoint: {{path: {self.folder}/desk.db}}
    bindings:
      - {{collection: shop.public.t, resource: {{table: t}}, backfill: {backfill}}}
""")

    def ingest(self) -> None:
        penstock.ingest.run(self.file, once=True)

    def materialize(self) -> None:
        penstock.materialize.run(self.file, jobs=LocalRunner(), once=True)

    def upstream(self) -> list[tuple[object, ...]]:
        return [(int(id), int(n)) for id, n in self.database.sql("SELECT id, n FROM t ORDER BY id")]

    def in_lake(self) -> list[tuple[object, ...]]:
        with persist.open(f"file:{self.lake}/shop", hold=False) as client:
            found = client.collection("shop.public.t")
            rows = found.snapshot(found.upper - 1).arrow().select(["id", "n"]).to_pylist()
            return sorted((row["id"], row["n"]) for row in rows)

    def downstream(self) -> list[tuple[object, ...]]:
        with contextlib.closing(sqlite3.connect(self.folder / "desk.db")) as there:
            return there.execute("SELECT id, n FROM t ORDER BY id").fetchall()


@pytest.fixture
def shop(tmp_path: Path, database: Database) -> Shop:
    """Return a lake restored from a copy that is older than its slot and its endpoint."""
    made = Shop(tmp_path, database)
    made.ingest()
    made.materialize()
    shutil.copytree(made.lake, tmp_path / "copy")
    database.sql("UPDATE t SET n = 1 WHERE id <= 5; DELETE FROM t WHERE id = 7")
    made.ingest()
    made.materialize()
    assert made.downstream() == made.upstream()
    # Rows equal to the copy, and different at the endpoint.
    database.sql("UPDATE t SET n = 0 WHERE id = 1; INSERT INTO t VALUES (7, 0), (99, 9)")
    shutil.rmtree(made.lake)
    (tmp_path / "copy").rename(made.lake)
    return made


def test_restored_lake_with_newer_slot_compares_all_tables(shop: Shop) -> None:
    shop.ingest()
    assert shop.in_lake() == shop.upstream()


def test_restored_lake_with_newer_endpoint_is_rejected_until_backfill(shop: Shop) -> None:
    shop.materialize()  # The copy has no changes to materialize.
    shop.ingest()
    for _ in range(2):
        with pytest.raises(UsageError, match="is ahead of its recovery log") as refused:
            shop.materialize()
        assert "restored from an earlier copy" in refused.value.detail
    shop.write(backfill=1)
    shop.materialize()
    assert shop.downstream() == shop.upstream()
    shop.database.sql("UPDATE t SET n = n + 1")
    shop.ingest()
    shop.materialize()
    assert shop.downstream() == shop.upstream()


def test_moved_lake_resumes(tmp_path: Path, database: Database) -> None:
    shop = Shop(tmp_path, database)
    shop.ingest()
    shop.materialize()
    moved = tmp_path / "elsewhere" / "lake"
    moved.parent.mkdir()
    shop.lake.rename(moved)
    shop.write(backfill=0, lake=moved)
    database.sql("UPDATE t SET n = 3 WHERE id = 3")
    shop.ingest()
    shop.materialize()
    assert shop.downstream() == shop.upstream()
