"""`ALTER TABLE` under a running `penstock up`: source, collection and both endpoints agree."""

import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from penstock.servers.postgres import Database
from tests.e2e.process import Up, lines, penstock, until, well

PIPELINE = """\
location: file:./lake
tick: 250ms
sources:
  shop:
    postgres: {{url: "{source}", tables: [public.d, public.other], publication: altered}}
materializations:
  local:
    connector: sqlite
    endpoint: {{path: ./shop.db}}
    bindings: &both
      - {{collection: shop.public.d, resource: {{table: d}}}}
      - {{collection: shop.public.other, resource: {{table: other}}}}
  remote:
    connector: postgres
    endpoint: {{url: "{endpoint}"}}
    bindings: *both
"""

Rows = Sequence[tuple[Any, ...]]


def test_schema_changes_under_up_reach_both_endpoints(
    database: Database, database18: Database, tmp_path: Path
) -> None:
    def upstream(columns: str) -> Rows:
        return database.sql(f"SELECT {columns} FROM d ORDER BY id")

    def in_sqlite(columns: str) -> Rows:
        try:
            with closing(sqlite3.connect(tmp_path / "shop.db", timeout=60)) as connection:
                return connection.execute(f"SELECT {columns} FROM d ORDER BY id").fetchall()
        except sqlite3.OperationalError:
            return []  # The table or the column does not exist yet.

    def in_postgres(columns: str, table: str = "d") -> Rows:
        names = {
            name
            for (name,) in database18.sql(
                f"SELECT attname FROM pg_attribute WHERE attrelid = to_regclass('{table}')"
            )
        }
        if not {*columns.split(", ")} <= names:
            return []
        return database18.sql(f"SELECT {columns} FROM {table} ORDER BY id")

    def await_equal(columns: str) -> None:
        expected = upstream(columns)
        assert len(expected) > 100
        until(lambda: in_sqlite(columns) == expected, f"{columns} in SQLite")
        until(lambda: in_postgres(columns) == expected, f"{columns} in Postgres")

    database.sql("CREATE TABLE d (id int PRIMARY KEY, amount int)")
    database.sql("CREATE TABLE other (id int PRIMARY KEY)")
    database.sql("INSERT INTO d SELECT g, g * 10 FROM generate_series(1, 101) g")
    file = tmp_path / "pipeline.yaml"
    file.write_text(PIPELINE.format(source=database.url(), endpoint=database18.url()))
    with Up(tmp_path, "up", file.name, "--http", "127.0.0.1:0") as up:
        await_equal("id, amount")

        database.sql("ALTER TABLE d ADD COLUMN n int NOT NULL DEFAULT 7")
        database.sql("INSERT INTO d VALUES (102, 1020, 8)")
        await_equal("id, amount, n")
        before = lines(well(tmp_path, "read", "file:./lake", "shop.public.d"))
        status = json.loads(well(tmp_path, "status", "file:./lake", "--json"))
        (upper,) = {
            collection["upper"]
            for location in status["storage_locations"]
            for collection in location["collections"]
            if collection["name"] == "shop.public.d"
        }

        database.sql("ALTER TABLE d ALTER COLUMN amount TYPE text USING 'number ' || amount")
        database.sql("INSERT INTO other VALUES (1)")
        until(lambda: in_postgres("id", "other"), "the other table while one is in error")
        until(
            lambda: penstock(tmp_path, "read", "file:./lake", "shop.public.d").returncode == 1,
            "the error of the table",
        )
        up.check()
        well(tmp_path, "resync", "file:./lake", "shop", "public.d")
        await_equal("id, amount, n")

        read = well(tmp_path, "read", "file:./lake", "shop.public.d", "--as-of", str(upper - 1))
        assert lines(read) == before
        assert up.terminate() == 0
