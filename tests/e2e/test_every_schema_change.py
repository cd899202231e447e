"""Each schema change of a tracked table: equality in both endpoints, or an error with its remedy.

All changes run under one pipeline, with the tasks of `penstock up` as threads. Hazards B3, C14.
"""

import datetime
import json
import re
import shlex
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import yaml
from psycopg.rows import dict_row

from penstock import persist
from penstock.catalog.json_rows import encode_line, rows_of
from penstock.cli.main import app
from penstock.ingest import tasks as ingest
from penstock.materialize import tasks as materialize
from penstock.materialize.runner import LocalRunner
from penstock.persist.state import END
from penstock.pipeline import load
from penstock.servers.postgres import Database
from penstock.supervisor import Supervisor
from tests.e2e.process import until
from tests.ingest.equality import difference

TYPES = """
CREATE TYPE mood AS ENUM ('sad', 'ok');
CREATE TYPE tone AS ENUM ('low', 'high');
CREATE SCHEMA archive;
"""


@dataclass(frozen=True)
class Case:
    """One table, named by the case: `T` in the statements."""

    name: str
    columns: str
    values: str
    """Values of a row with the number g."""

    change: str
    error: str = ""
    """Pattern of the error's message; without one the table continues by itself."""

    undo: str = ""
    """Statements that the hint of the error asks for before the resync."""

    recreated: tuple[str, ...] = ()
    """Endpoints whose table cannot take the new rows and is created again with --allow-drop."""

    table: str = "CREATE TABLE T ({columns})"

    def sql(self, text: str) -> str:
        return re.sub(r"\bT(?![A-Za-z])", self.name, text)

    @property
    def setup(self) -> str:
        create = self.table.format(columns=self.columns)
        insert = f"INSERT INTO T SELECT {self.values} FROM generate_series(1, 9) g"
        return self.sql(f"{create}; {insert};")


ID = "id int PRIMARY KEY"

CASES = [
    Case(
        "int_to_bigint",
        f"{ID}, v int",
        "g, g",
        "ALTER TABLE T ALTER v TYPE bigint;INSERT INTO T VALUES (20, 1::bigint << 40)",
    ),
    Case(
        "real_to_double",
        f"{ID}, v real",
        "g, g / 10.0",
        "ALTER TABLE T ALTER v TYPE float8;INSERT INTO T VALUES (20, 0.1)",
    ),
    Case(
        "varchar_to_text",
        f"{ID}, v varchar(10)",
        "g, 'v' || g",
        "ALTER TABLE T ALTER v TYPE text; INSERT INTO T VALUES (20, repeat('long', 9))",
    ),
    Case(
        "more_digits",
        f"{ID}, v numeric(6,2)",
        "g, g / 7.0",
        "ALTER TABLE T ALTER v TYPE numeric(12,5); INSERT INTO T VALUES (20, 1234567.12345)",
    ),
    Case(
        "more_whole_digits",
        f"{ID}, v numeric(6,2)",
        "g, g / 7.0",
        "ALTER TABLE T ALTER v TYPE numeric(9,2); INSERT INTO T VALUES (20, 1234567.12)",
    ),
    Case(
        "fewer_digits",
        f"{ID}, v numeric(6,2)",
        "g, g / 7.0",
        "ALTER TABLE T ALTER v TYPE numeric(6,1); INSERT INTO T VALUES (20, 12345.1)",
    ),
    Case(
        "any_digits",
        f"{ID}, v numeric(6,2)",
        "g, g / 7.0",
        "ALTER TABLE T ALTER v TYPE numeric; INSERT INTO T VALUES (20, 1e50)",
        error=r'"v" was numeric\(6,2\) and is now numeric,',
    ),
    Case(
        "int_to_numeric",
        f"{ID}, v int",
        "g, g",
        "ALTER TABLE T ALTER v TYPE numeric(20,2)",
        error=r'"v" was integer and is now numeric\(20,2\),',
    ),
    Case(
        "zoned",
        f"{ID}, v timestamp",
        "g, '2020-01-01'::timestamp + g * interval '1 day'",
        "SET timezone TO 'Asia/Tokyo'; ALTER TABLE T ALTER v TYPE timestamptz",
        error='"v" was timestamp without time zone and is now timestamp with',
        recreated=("postgres",),
    ),
    Case(
        "key_to_bigint",
        f"{ID}, v int",
        "g, g",
        "ALTER TABLE T ALTER id TYPE bigint;INSERT INTO T VALUES (1::bigint << 40, 1)",
        error="its primary key was dropped and added",
    ),
    Case(
        "key_to_text",
        f"{ID}, v int",
        "g, g",
        "ALTER TABLE T ALTER id TYPE text;INSERT INTO T VALUES ('x', 1)",
        error="its primary key was dropped and added",
        recreated=("sqlite", "postgres"),
    ),
    Case(
        "key_renamed",
        f"{ID}, v int",
        "g, g",
        "ALTER TABLE T RENAME id TO key;INSERT INTO T VALUES (20, 1)",
        error='"id" is now "key"',
        recreated=("sqlite", "postgres"),
    ),
    Case(
        "drop_not_null",
        f"{ID}, v int NOT NULL",
        "g, g",
        "ALTER TABLE T ALTER v DROP NOT NULL; INSERT INTO T VALUES (20, NULL);"
        "UPDATE T SET v = NULL WHERE id = 3",
    ),
    Case(
        "set_not_null",
        f"{ID}, v int",
        "g, nullif(g, 3)",
        "UPDATE T SET v = 0 WHERE v IS NULL; ALTER TABLE T ALTER v SET NOT NULL;"
        "INSERT INTO T VALUES (20, 1)",
    ),
    Case(
        "drop_column",
        f"{ID}, v int, w int",
        "g, g, g",
        "ALTER TABLE T DROP w; INSERT INTO T VALUES (20, 1)",
        error='column "w" was dropped',
    ),
    Case(
        "drop_added_column",
        f"{ID}, v int",
        "g, g",
        "ALTER TABLE T ADD w int DEFAULT 3; INSERT INTO T VALUES (20, 1, 2);"
        "ALTER TABLE T DROP w; INSERT INTO T VALUES (21, 1)",
    ),
    Case(
        "add_nullable",
        f"{ID}, v int",
        "g, g",
        "ALTER TABLE T ADD w text; INSERT INTO T VALUES (20, 1, 'w')",
    ),
    Case(
        "add_default",
        f"{ID}, v int",
        "g, g",
        "ALTER TABLE T ADD w numeric(5,2) NOT NULL DEFAULT 1.5; INSERT INTO T VALUES (20, 1, 2)",
    ),
    Case(
        "add_random",
        f"{ID}, v int",
        "g, g",
        "ALTER TABLE T ADD w float8 DEFAULT random(); INSERT INTO T VALUES (20, 1)",
    ),
    Case(
        "add_now",
        f"{ID}, v int",
        "g, g",
        "ALTER TABLE T ADD w timestamptz DEFAULT now(),"
        " ADD x timestamptz DEFAULT clock_timestamp(); INSERT INTO T VALUES (20, 1)",
    ),
    Case(
        "add_identity",
        f"{ID}, v int",
        "g, g",
        "ALTER TABLE T ADD w int GENERATED ALWAYS AS IDENTITY; INSERT INTO T VALUES (20, 1)",
    ),
    Case(
        "add_generated",
        f"{ID}, v int",
        "g, g",
        "ALTER TABLE T ADD w int GENERATED ALWAYS AS (v * 2) STORED; INSERT INTO T VALUES (20, 1)",
    ),
    Case(
        "add_virtual",
        f"{ID}, v int",
        "g, g",
        "ALTER TABLE T ADD w int GENERATED ALWAYS AS (v * 2) VIRTUAL; INSERT INTO T VALUES (20, 1)",
    ),
    Case(
        "set_expression",
        f"{ID}, v int, w int GENERATED ALWAYS AS (v * 2) STORED",
        "g, g",
        "ALTER TABLE T ALTER w SET EXPRESSION AS (v * 3); INSERT INTO T VALUES (20, 1)",
    ),
    Case(
        "drop_expression",
        f"{ID}, v int, w int GENERATED ALWAYS AS (v * 2) STORED",
        "g, g",
        "ALTER TABLE T ALTER w DROP EXPRESSION; INSERT INTO T VALUES (20, 1, 7)",
    ),
    Case(
        "set_default",
        f"{ID}, v int",
        "g, g",
        "ALTER TABLE T ALTER v SET DEFAULT 7; INSERT INTO T VALUES (20)",
    ),
    Case(
        "new_values",
        f"{ID}, v int",
        "g, g",
        "ALTER TABLE T ALTER v TYPE int USING v * 100; UPDATE T SET v = 1 WHERE id = 1",
    ),
    Case(
        "swapped",
        f"{ID}, v int, w int",
        "g, g, -g",
        "ALTER TABLE T RENAME v TO x; ALTER TABLE T RENAME w TO v; ALTER TABLE T RENAME x TO w;"
        "UPDATE T SET v = 100 WHERE id = 1",
        error='column "v" is now "w"',
    ),
    Case(
        "column_renamed",
        f"{ID}, v int",
        "g, g",
        "ALTER TABLE T RENAME v TO w; INSERT INTO T VALUES (20, 1)",
        error='column "v" is now "w"',
    ),
    Case(
        "renamed",
        f"{ID}, v int",
        "g, g",
        "ALTER TABLE T RENAME TO other; INSERT INTO other VALUES (20, 1)",
        error="it is now public.other",
        undo="ALTER TABLE other RENAME TO T",
    ),
    Case(
        "moved",
        f"{ID}, v int",
        "g, g",
        "ALTER TABLE T SET SCHEMA archive; DELETE FROM archive.T WHERE id = 1",
        error="it is now archive.moved",
        undo="ALTER TABLE archive.T SET SCHEMA public",
    ),
    Case("truncated", f"{ID}, v int", "g, g", "TRUNCATE T; INSERT INTO T VALUES (20, 1)"),
    Case("emptied", f"{ID}, v int", "g, g", "TRUNCATE T"),
    Case(
        "identity_full",
        f"{ID}, v int",
        "g, g",
        "ALTER TABLE T REPLICA IDENTITY FULL; UPDATE T SET id = id + 100, v = 0 WHERE id < 3",
    ),
    Case(
        "identity_nothing",
        f"{ID}, v int",
        "g, g",
        "ALTER TABLE T REPLICA IDENTITY NOTHING; INSERT INTO T VALUES (20, 1)",
        error="it has no replica identity",
        undo="ALTER TABLE T REPLICA IDENTITY DEFAULT",
    ),
    Case(
        "key_changed",
        f"{ID}, v int NOT NULL",
        "g, g + 50",
        "ALTER TABLE T DROP CONSTRAINT T_pkey, ADD PRIMARY KEY (v); INSERT INTO T VALUES (1, 1)",
        error="its primary key was changed",
        recreated=("sqlite", "postgres"),
    ),
    Case(
        "key_longer",
        f"{ID}, v int NOT NULL",
        "g, g",
        "ALTER TABLE T DROP CONSTRAINT T_pkey, ADD PRIMARY KEY (id, v);INSERT INTO T VALUES (1, 2)",
        error="its primary key was changed",
        recreated=("sqlite", "postgres"),
    ),
    Case(
        "key_again",
        f"{ID}, v int",
        "g, g",
        "ALTER TABLE T DROP CONSTRAINT T_pkey; ALTER TABLE T ADD PRIMARY KEY (id);"
        "INSERT INTO T VALUES (20, 1)",
        error="its primary key was dropped and added",
    ),
    Case(
        "key_dropped",
        f"{ID}, v int",
        "g, g",
        "ALTER TABLE T DROP CONSTRAINT T_pkey; INSERT INTO T VALUES (20, 1)",
        error="it has no replica identity",
        undo="ALTER TABLE T ADD PRIMARY KEY (id)",
    ),
    Case(
        "attached",
        f"{ID}, v int",
        "g, g",
        "CREATE TABLE T_2 (v int, id int PRIMARY KEY); INSERT INTO T_2 VALUES (1, 101);"
        "ALTER TABLE T ATTACH PARTITION T_2 FOR VALUES FROM (100) TO (200);"
        "INSERT INTO T VALUES (102, 1)",
        table="CREATE TABLE T ({columns}) PARTITION BY RANGE (id);"
        "CREATE TABLE T_1 PARTITION OF T FOR VALUES FROM (0) TO (100)",
    ),
    Case(
        "detached",
        f"{ID}, v int",
        "g, g",
        "ALTER TABLE T DETACH PARTITION T_1",
        table="CREATE TABLE T ({columns}) PARTITION BY RANGE (id);"
        "CREATE TABLE T_1 PARTITION OF T FOR VALUES FROM (0) TO (5);"
        "CREATE TABLE T_2 PARTITION OF T FOR VALUES FROM (5) TO (100)",
    ),
    Case(
        "label_added",
        f"{ID}, v mood",
        "g, 'sad'",
        "ALTER TYPE mood ADD VALUE 'fine' BEFORE 'ok'; INSERT INTO T VALUES (20, 'fine')",
    ),
    Case(
        "label_renamed",
        f"{ID}, v tone",
        "g, 'low'",
        "ALTER TYPE tone RENAME VALUE 'low' TO 'deep'; INSERT INTO T VALUES (20, 'deep')",
    ),
    Case(
        "remade",
        f"{ID}, v int",
        "g, g",
        "DROP TABLE T; CREATE TABLE T (v int, id int PRIMARY KEY, w int);"
        "INSERT INTO T VALUES (1, 1, 1); ALTER PUBLICATION changed ADD TABLE T",
        error="was dropped",
    ),
    Case(
        "remade_unpublished",
        f"{ID}, v int",
        "g, g",
        "DROP TABLE T; CREATE TABLE T (v text, id int PRIMARY KEY);INSERT INTO T VALUES ('v', 1)",
        error="was dropped",
    ),
    Case(
        "unpublished",
        f"{ID}, v int",
        "g, g",
        "ALTER PUBLICATION changed DROP TABLE T; INSERT INTO T VALUES (20, 1)",
        error="was removed from publication",
    ),
    Case("vacuumed", f"{ID}, v int", "g, g", "DELETE FROM T WHERE id = 2; VACUUM FULL T"),
    Case("untouched", f"{ID}, v int", "g, g", "INSERT INTO T VALUES (20, 1)"),
]


class Pipeline:
    """A source, and a materialization for each endpoint, with a binding for each case."""

    def __init__(self, source: Database, endpoint: Database, folder: Path) -> None:
        self.source, self.endpoint, self.folder = source, endpoint, folder
        self.location = f"file:{folder}/lake"
        self.file = folder / "pipeline.yaml"
        self.status: Mapping[str, Mapping[str, Any]] = {}
        bindings = [
            {"collection": f"shop.public.{case.name}", "resource": {"table": case.name}}
            for case in CASES
        ]
        tables = [f"public.{case.name}" for case in CASES]
        postgres = {"url": source.url(), "tables": tables, "publication": "changed"}
        endpoints = {
            "sqlite": {"path": str(folder / "shop.db")},
            "postgres": {"url": endpoint.url()},
        }
        parsed = {
            "location": self.location,
            "writer": "up",
            "tick": "500ms",
            "sources": {"shop": {"postgres": postgres}},
            "materializations": {
                f"in_{name}": {"connector": name, "endpoint": config, "bindings": bindings}
                for name, config in endpoints.items()
            },
        }
        self.file.write_text(yaml.safe_dump(parsed))

    @contextmanager
    def run(self, *, allow_drop: bool = False) -> Iterator[Supervisor]:
        """Run all tasks during the block, as `penstock up` does."""
        pipeline, stop = load(self.file), threading.Event()
        tasks = [
            *ingest.tasks_of(pipeline, jobs=None),
            *materialize.tasks_of(pipeline, jobs=LocalRunner(), allow_drop=allow_drop, stop=stop),
        ]
        running = Supervisor(tasks, stop, restarts=True)
        thread = threading.Thread(target=running.run, kwargs={"once": False})
        thread.start()
        try:
            yield running
        finally:
            stop.set()
            thread.join()

    def await_marker(self, id: int) -> None:
        """Insert a row into a table that does not change, and wait for it at both endpoints.

        A transaction has all bindings that are not frozen: they then hold all changes, too.
        """
        self.source.sql(f"INSERT INTO untouched VALUES ({id}, 0)")
        for rows in (self.in_sqlite, self.in_postgres):
            until(partial(has_marker, rows, id), f"marker {id}")

    def errors(self) -> Mapping[str, persist.StoredError]:
        """Return the errors of the collections, by case."""
        with persist.open(f"{self.location}/shop") as client:
            return {
                case.name: errors[-1].error
                for case in CASES
                if (errors := client.collection(f"shop.public.{case.name}").state.errors)
                and errors[-1].upper == END
            }

    def mismatch(self, client: persist.Client, name: str) -> str:
        """Return a difference between the source, the collection and the endpoints, if any."""
        collection = client.collection(f"shop.public.{name}")
        as_of = collection.upper - 1
        if differs := difference(collection, as_of, self.source, f"public.{name}"):
            return f"collection: {differs}"
        contents = rows_of(collection.snapshot(as_of).arrow(), collection.state)
        expected = _sorted(
            [json.loads(encode_line(row)) for _, n, row in contents for _ in range(n)]
        )
        for endpoint, rows in (
            ("SQLite", self.in_sqlite(name)),
            ("Postgres", self.in_postgres(name)),
        ):
            documents = _sorted([row.pop("flow_document") for row in rows])
            columns = _sorted([_printed(row, expected) for row in rows])
            if documents != expected or columns != expected:
                return f"{endpoint} holds {documents} and {columns}, expected {expected}"
        return ""

    def in_sqlite(self, name: str) -> list[dict[str, Any]]:
        with closing(sqlite3.connect(self.folder / "shop.db", timeout=60)) as connection:
            connection.row_factory = sqlite3.Row
            try:
                rows = [dict(row) for row in connection.execute(f"SELECT * FROM {name}")]
            except sqlite3.OperationalError:
                return []  # The table does not exist yet.
        return [{**row, "flow_document": json.loads(row["flow_document"])} for row in rows]

    def in_postgres(self, name: str) -> list[dict[str, Any]]:
        if self.endpoint.sql(f"SELECT to_regclass('{name}')") == [(None,)]:
            return []  # The table does not exist yet.
        with (
            psycopg.connect(self.endpoint.url()) as connection,
            connection.cursor(row_factory=dict_row) as cursor,
        ):
            return cursor.execute(f"SELECT * FROM {name}".encode()).fetchall()


def has_marker(rows: Callable[[str], list[dict[str, Any]]], id: int) -> bool:
    return any(row["id"] == id for row in rows("untouched"))


def _sorted(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return sorted(rows, key=lambda row: json.dumps(row, default=str))


def _printed(row: Mapping[str, Any], expected: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return a row of an endpoint as the collection prints it.

    A column that the collection does not have must be null.
    """
    names = set(expected[0]) if expected else set(row)
    printed = {}
    for name, value in row.items():
        if isinstance(value, Decimal):
            value = str(value)
        elif isinstance(value, datetime.datetime):
            assert value.tzinfo is not None
            text = value.astimezone(datetime.UTC).isoformat(" ")
            # Postgres prints neither the minutes of the zone nor zeros at the end.
            value = re.sub(r"(\.\d+?)0+\+", r"\1+", text.removesuffix(":00"))
        if name in names or value is not None:
            printed[name] = value
    return printed


def _execute(database: Database, case: Case, statements: str) -> None:
    # One at a time: VACUUM runs outside a transaction.
    for statement in filter(str.strip, case.sql(statements).split(";")):
        database.sql(statement)


def _prepare_resync(database: Database, case: Case, hint: str) -> list[str]:
    """Carry out the first steps of a hint; return its `penstock resync` command."""
    assert bool(case.undo) == ("Undo the change" in hint), (case.name, hint)
    _execute(database, case, case.undo)
    if case.name != "remade":  # It is published already.
        for statement in re.findall(r"ALTER PUBLICATION [^;]*;", hint):
            database.sql(statement)
    command = re.search(r"run: penstock (resync .*)$", hint)
    assert command is not None, (case.name, hint)
    return shlex.split(command[1])


def test_every_schema_change_ends_equal_or_in_an_error_with_a_remedy(
    database18: Database, database: Database, tmp_path: Path
) -> None:
    source = database18
    source.sql(TYPES + "".join(case.setup for case in CASES))
    source.sql(
        f"CREATE PUBLICATION changed FOR TABLE {', '.join(case.name for case in CASES)}"
        " WITH (publish_via_partition_root = true, publish_generated_columns = stored)"
    )
    pipeline = Pipeline(source, database, tmp_path)
    with pipeline.run() as running:
        pipeline.await_marker(1_001)
        for case in CASES:
            _execute(source, case, case.change)
        pipeline.await_marker(1_002)
        errors = pipeline.errors()
        assert {case.name for case in CASES if case.error} == {*errors}
        tables = []
        for case in filter(lambda case: case.error, CASES):
            assert re.search(case.error, errors[case.name].message)
            command = _prepare_resync(source, case, errors[case.name].hint)
            assert command[:3] == ["resync", pipeline.location, "shop"]
            tables += command[3:]
        # One command for all tables takes one snapshot.
        app(["resync", pipeline.location, "shop", *tables], standalone_mode=False)
        # Bindings whose resource cannot take the new collection are frozen, the others continue.
        pipeline.await_marker(1_003)
        degraded = {
            name.removeprefix("in_"): {
                frozen.collection: frozen.hint for frozen in status.materialization.degraded
            }
            for name, status in running.status().items()
            if status.kind == "materialization"
        }
        assert {(case.name, endpoint) for case in CASES for endpoint in case.recreated} == {
            (name.removeprefix("shop.public."), endpoint)
            for endpoint, found in degraded.items()
            for name in found
        }
        assert all("--allow-drop" in hint for found in degraded.values() for hint in found.values())
    with pipeline.run(allow_drop=True):
        pipeline.await_marker(1_004)
    assert pipeline.errors() == {}
    with persist.open(f"{pipeline.location}/shop") as client:
        found = {case.name: pipeline.mismatch(client, case.name) for case in CASES}
    assert {name: differs for name, differs in found.items() if differs} == {}
