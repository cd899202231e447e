"""A table that cannot be tracked is one errored table; the source continues."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.servers.postgres import Database
from tests.ingest.pump import until
from tests.ingest.scripted_ingest import ScriptedIngest

TIMED = "CREATE TABLE timed (id int PRIMARY KEY, mz_timestamp int);"
RESERVED = "CREATE TABLE reserved (id int PRIMARY KEY, mz_diff int);"


@pytest.fixture
def ingest(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ScriptedIngest]:
    ingest = ScriptedIngest(database, tmp_path, monkeypatch)
    yield ingest
    ingest.close()


def tables(ingest: ScriptedIngest) -> dict[str, dict[str, Any]]:
    """The tables of the source that the stored status reports, by name."""
    assert ingest.pump is not None
    return {each["name"]: each for each in ingest.pump.state()["status"]["tables"]}


def in_error(ingest: ScriptedIngest) -> set[str]:
    return {name for name, each in tables(ingest).items() if each["phase"] == "errored"}


def restart(ingest: ScriptedIngest) -> None:
    assert ingest.pump is not None
    ingest.pump.stop()
    ingest.pump.start()
    ingest.report()


def test_untrackable_tables_created_upstream_are_errored_until_they_are_dropped(
    ingest: ScriptedIngest, database: Database
) -> None:
    database.sql(
        "CREATE TABLE sound (id int PRIMARY KEY); CREATE PUBLICATION penstock FOR ALL TABLES"
    )
    ingest.start()
    database.sql(f"{TIMED} {RESERVED} INSERT INTO sound VALUES (1)")
    until(lambda: len(in_error(ingest)) == 2, "two errored tables")
    errors = {name: each["error"] for name, each in tables(ingest).items() if each["error"]}
    assert all("cannot be tracked" in error for error in errors.values())
    assert all(error.isprintable() for error in errors.values())
    restart(ingest)
    assert len(in_error(ingest)) == 2
    database.sql("DROP TABLE timed; INSERT INTO sound VALUES (2)")
    until(lambda: in_error(ingest) == {"public.reserved"}, "the dropped table to be forgotten")
    assert ingest.pump is not None
    ingest.pump.stop()
    database.sql("DROP TABLE reserved; INSERT INTO sound VALUES (3)")
    ingest.pump.start()
    ingest.report()
    until(lambda: [*tables(ingest)] == ["public.sound"], "the other table to be forgotten")
    assert ingest.pump.collections() == ["shop.public.sound"]


def test_untrackable_table_is_tracked_after_it_is_altered(
    ingest: ScriptedIngest, database: Database
) -> None:
    database.sql(f"{TIMED} {RESERVED} CREATE PUBLICATION penstock FOR ALL TABLES")
    ingest.start()
    until(lambda: len(in_error(ingest)) == 2, "two errored tables")
    database.sql(
        "ALTER TABLE timed RENAME mz_timestamp TO time; INSERT INTO timed VALUES (1, 2);"
        "ALTER TABLE reserved RENAME mz_diff TO difference; INSERT INTO reserved VALUES (1, 2)"
    )
    until(lambda: not in_error(ingest), "no errored table")
    report = ingest.report()
    assert "public.timed is equal (id, time)" in report
    assert "public.reserved is equal (id, difference)" in report
