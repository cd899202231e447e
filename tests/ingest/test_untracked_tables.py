"""A table that cannot be tracked is one errored table; the source continues."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.servers.postgres import Database
from tests.ingest.pump import until
from tests.ingest.story import Story

TIMED = "CREATE TABLE timed (id int PRIMARY KEY, mz_timestamp int);"
RESERVED = "CREATE TABLE reserved (id int PRIMARY KEY, mz_diff int);"


@pytest.fixture
def story(database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Story]:
    told = Story(database, tmp_path, monkeypatch)
    yield told
    told.close()


def tables(story: Story) -> dict[str, dict[str, Any]]:
    """The tables of the source that the stored status reports, by name."""
    assert story.pump is not None
    return {each["name"]: each for each in story.pump.notes()["status"]["tables"]}


def in_error(story: Story) -> set[str]:
    return {name for name, each in tables(story).items() if each["phase"] == "errored"}


def restart(story: Story) -> None:
    assert story.pump is not None
    story.pump.stop()
    story.pump.start()
    story.told()


def test_untrackable_tables_created_upstream_are_errored_until_they_are_dropped(
    story: Story, database: Database
) -> None:
    database.sql(
        "CREATE TABLE sound (id int PRIMARY KEY); CREATE PUBLICATION penstock FOR ALL TABLES"
    )
    story.follow()
    database.sql(f"{TIMED} {RESERVED} INSERT INTO sound VALUES (1)")
    until(lambda: len(in_error(story)) == 2, "two errored tables")
    errors = {name: each["error"] for name, each in tables(story).items() if each["error"]}
    assert all("cannot be tracked" in error for error in errors.values())
    assert all(error.isprintable() for error in errors.values())
    restart(story)
    assert len(in_error(story)) == 2
    database.sql("DROP TABLE timed; INSERT INTO sound VALUES (2)")
    until(lambda: in_error(story) == {"public.reserved"}, "the dropped table to be forgotten")
    assert story.pump is not None
    story.pump.stop()
    database.sql("DROP TABLE reserved; INSERT INTO sound VALUES (3)")
    story.pump.start()
    story.told()
    until(lambda: [*tables(story)] == ["public.sound"], "the other table to be forgotten")
    assert story.pump.collections() == ["shop.public.sound"]


def test_untrackable_table_is_tracked_after_it_is_altered(story: Story, database: Database) -> None:
    database.sql(f"{TIMED} {RESERVED} CREATE PUBLICATION penstock FOR ALL TABLES")
    story.follow()
    until(lambda: len(in_error(story)) == 2, "two errored tables")
    database.sql(
        "ALTER TABLE timed RENAME mz_timestamp TO time; INSERT INTO timed VALUES (1, 2);"
        "ALTER TABLE reserved RENAME mz_diff TO difference; INSERT INTO reserved VALUES (1, 2)"
    )
    until(lambda: not in_error(story), "no errored table")
    told = story.told()
    assert "public.timed is equal (id, time)" in told
    assert "public.reserved is equal (id, difference)" in told
