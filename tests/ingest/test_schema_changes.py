"""Upstream changes without a stream message end in equality or an error (invariant 13)."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.persist import SinceError
from penstock.progress.time import describe_time
from penstock.servers.postgres import Database
from penstock.sources.postgres import drift_actions, table_set
from penstock.sources.postgres.server import SourceServer
from penstock.sources.postgres.snapshot_export import SnapshotExport
from penstock.sources.postgres.table_schema import evolve_table
from tests.datadriven import Directive
from tests.fix_scripts import Script, stories
from tests.ingest.scripted_ingest import ScriptedIngest


@pytest.fixture
def ingest(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ScriptedIngest]:
    ingest = ScriptedIngest(database, tmp_path, monkeypatch)
    yield ingest
    ingest.close()


@pytest.mark.parametrize("path", stories("ingest"), ids=lambda path: path.stem)
def test_story(path: Path, ingest: ScriptedIngest, script: Script) -> None:
    script(path, ingest.execute)


def test_a_table_that_joins_begins_later(ingest: ScriptedIngest, database: Database) -> None:
    database.sql(
        "CREATE TABLE first (id int PRIMARY KEY); CREATE PUBLICATION penstock FOR ALL TABLES"
    )
    ingest.start()
    assert ingest.pump is not None
    before = ingest.pump.settle()
    database.sql("CREATE TABLE second (id int PRIMARY KEY); INSERT INTO second VALUES (1)")
    assert ingest.report() == "public.second is equal (id)"
    with ingest.pump.reader() as client:
        first, second = (client.collection(f"shop.public.{name}") for name in ("first", "second"))
        first.snapshot(before)
        begins = second.since
        assert begins > before
        with pytest.raises(SinceError) as caught:
            second.snapshot(before)
        assert len(second.snapshot(begins).arrow()) == 1
    assert caught.value.detail == (
        f"It begins at {describe_time(begins)}: there was nothing to read before that time."
    )


def test_careless_ways_to_follow_are_caught(
    ingest: ScriptedIngest, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bugs that invariant 13 is about, planted: each table ends in silence, and differs."""
    database.sql(
        """
        CREATE TABLE by_name (id int PRIMARY KEY, a int, b int);
        CREATE TABLE remade (id int PRIMARY KEY);
        CREATE TABLE scaled (id int PRIMARY KEY, amt int);
        INSERT INTO by_name VALUES (1, 1, 2);
        INSERT INTO remade VALUES (1);
        INSERT INTO scaled VALUES (1, 1);
        CREATE PUBLICATION penstock FOR TABLE by_name, remade, scaled;
        """
    )
    of_table = drift_actions._actions_of_table_change
    monkeypatch.setattr(
        table_set,
        "evolve_table",
        lambda before, described, accepted: evolve_table(before, described, accepted=True),
    )
    monkeypatch.setattr(
        drift_actions,
        "_actions_of_table_change",
        lambda change, table, situation: (
            []
            if isinstance(change, drift_actions.TableDropped)
            else of_table(change, table, situation)
        ),
    )
    monkeypatch.setattr(drift_actions, "is_explained", lambda *_, **__: True)
    ingest.start()
    report = ingest.execute(
        Directive(
            "do",
            {},
            (
                "ALTER TABLE by_name RENAME a TO x",
                "ALTER TABLE by_name RENAME b TO a",
                "ALTER TABLE by_name RENAME x TO b",
                "DROP TABLE remade",
                "CREATE TABLE remade (id int PRIMARY KEY)",
                "ALTER PUBLICATION penstock ADD TABLE remade",
                "ALTER TABLE scaled ALTER amt TYPE bigint USING amt * 100",
            ),
        )
    )
    for table in ("by_name", "remade", "scaled"):
        assert f"public.{table} differs" in report


@pytest.mark.parametrize(
    "statements",
    [
        "DELETE FROM t WHERE id = 1; TRUNCATE t; INSERT INTO t VALUES (7, 'v')",
        "UPDATE t SET v = 'x' WHERE id = 1; TRUNCATE t",
        "ALTER TABLE t ALTER v TYPE varchar(9) USING v || 'x'; UPDATE t SET v = 'y' WHERE id = 1",
    ],
    ids=["delete", "truncate-last", "rewrite"],
)
def test_table_rewritten_between_slot_and_first_fingerprint_ends_equal(
    ingest: ScriptedIngest, database: Database, monkeypatch: pytest.MonkeyPatch, statements: str
) -> None:
    database.sql(
        "CREATE TABLE t (id int PRIMARY KEY, v text);"
        "INSERT INTO t SELECT g, 'v' FROM generate_series(1, 5) g;"
        "CREATE PUBLICATION penstock FOR TABLE t"
    )
    create_slot = SourceServer.create_slot

    def create_slot_and_rewrite(upstream: SourceServer) -> SnapshotExport:
        export = create_slot(upstream)
        for statement in statements.split(";"):
            database.sql(statement)
        return export

    monkeypatch.setattr(SourceServer, "create_slot", create_slot_and_rewrite)
    assert "public.t is equal (id, v)" in ingest.start()
