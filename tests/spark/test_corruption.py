"""Damaged and missing files: the query fails with our error in every session.

The session of these tests skips missing and corrupt files, as a session of a user may.
A flipped byte either raises an error or is not read: rows are never wrong.
"""

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.persist.shop import by_hand

import penstock.spark as ps
from penstock import persist
from penstock.errors import Corruption
from penstock.persist.scan import spark as door
from penstock.persist.state import files_of

SEED = int(os.environ.get("PENSTOCK_TEST_SEED") or 2_026)
FLIPS = int(os.environ.get("PENSTOCK_MODEL_EXAMPLES") or 12)

LENIENT = ("spark.sql.files.ignoreMissingFiles", "spark.sql.files.ignoreCorruptFiles")

SCHEMA = pa.schema([("k", pa.string()), ("n", pa.int64())])


@pytest.fixture
def lenient(spark: Any) -> Iterator[Any]:
    """Yield a session that ignores missing and corrupt files."""
    before = {name: spark.conf.get(name) for name in LENIENT}
    for name in LENIENT:
        spark.conf.set(name, "true")
    yield spark
    for name, value in before.items():
        spark.conf.set(name, value)


class Kept:
    """Collection in one file that a test can damage and restore."""

    def __init__(self, folder: Path) -> None:
        self.url = f"file:{folder}"
        settings = by_hand(inline_bytes=0, young_ms=3_600_000)
        with persist.open(self.url, writer="w", settings=settings) as client:
            table = client.create_or_load("rows", schema=SCHEMA, key_columns=["k"])
            table.write([({"k": f"k{n}", "n": n % 7}, 0, 1) for n in range(400)]).result()
            table.seal(1).result()
            (self.key,) = (key for batch in table.state.batches for key in files_of(batch))
        self.file = folder / self.key
        self.sound = self.file.read_bytes()

    def flip(self, at: int) -> None:
        data = bytearray(self.sound)
        data[at] ^= 1 << (at % 8)
        self.file.write_bytes(data)

    def restore(self) -> None:
        self.file.write_bytes(self.sound)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    return Kept(tmp_path_factory.mktemp("kept") / "data")


@pytest.fixture(scope="module")
def kept_by_tasks(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    """Return a collection in a folder whose name is a glob for Spark, so tasks read it."""
    return Kept(tmp_path_factory.mktemp("kept") / "da[t]a")


ROWS = sorted((f"k{n}", n % 7) for n in range(400))


def collected(spark: Any, url: str) -> list[tuple[str, int]]:
    return sorted(tuple(row) for row in ps.read(spark, url, "rows", hold=False).collect())


def regions(file: bytes) -> dict[str, range]:
    """Return the byte ranges of a Parquet file by content."""
    footer = int.from_bytes(file[-8:-4], "little")
    found = {
        "magic at the front": range(4),
        "footer": range(len(file) - 8 - footer, len(file) - 8),
        "length of the footer": range(len(file) - 8, len(file) - 4),
        "magic at the end": range(len(file) - 4, len(file)),
    }
    meta = pq.ParquetFile(pa.BufferReader(file)).metadata.row_group(0)
    for i in range(meta.num_columns):
        column = meta.column(i)
        data, end = column.data_page_offset, column.data_page_offset
        start = column.dictionary_page_offset
        if start is not None:
            found[f"dictionary of {column.path_in_schema}"] = range(start, data)
            end = start
        end += column.total_compressed_size
        # The page header has no fixed length; the last bytes are always page contents.
        found[f"head of the page of {column.path_in_schema}"] = range(data, end - 8)
        found[f"page of {column.path_in_schema}"] = range(end - 8, end)
    return found


def check_flip(spark: Any, kept: Kept, at: int) -> bool:
    """Flip a byte, read everything, and return whether the read raised Corruption."""
    kept.flip(at)
    found: list[Corruption] = []
    try:
        assert collected(spark, kept.url) == ROWS, f"byte {at} of {kept.file} gives other rows"
    except Corruption as error:
        found.append(error)
    finally:
        kept.restore()
    assert all(error.key == kept.key and kept.key in str(error) for error in found)
    return bool(found)


def test_flipped_byte_raises_corruption_or_leaves_rows_unchanged(lenient, kept):
    chance = random.Random(SEED)
    where = regions(kept.sound)
    assert sum(map(len, where.values())) <= len(kept.sound)
    every = [chance.choice(region) for region in where.values()]
    more = [chance.randrange(len(kept.sound)) for _ in range(FLIPS - len(every))]
    found = {at: check_flip(lenient, kept, at) for at in [*every, *more]}
    for name in ("page of k", "page of n", "footer", "length of the footer", "magic at the end"):
        assert any(found[at] for at in found if at in where[name]), name


@pytest.mark.parametrize("name", ["footer", "page of k"])
def test_flipped_byte_read_by_tasks_raises_corruption(lenient, kept_by_tasks, name):
    kept = kept_by_tasks
    kept.flip(regions(kept.sound)[name][-1])
    try:
        with pytest.raises(Exception, match=kept.key) as raised:
            collected(lenient, kept.url)
    finally:
        kept.restore()
    assert "Corruption" in repr(raised.value) + str(raised.value)
    assert collected(lenient, kept.url) == ROWS


def joined(frame: Any) -> Any:
    return frame.alias("a").join(frame.alias("b"), "k").count()


ACTIONS: dict[str, Callable[[Any], Any]] = {
    "collect": lambda frame: frame.collect(),
    "count a column": lambda frame: frame.where("n > 3").count(),
    "toArrow": lambda frame: frame.toArrow(),
    "write": lambda frame: frame.write.format("noop").mode("overwrite").save(),
    "join": joined,
    "toLocalIterator": lambda frame: list(frame.toLocalIterator()),
}


@pytest.mark.parametrize("action", ACTIONS)
def test_every_spark_action_raises_corruption_for_damaged_or_missing_file(lenient, kept, action):
    # Make a new plan from the same scan for each action: a plan caches its failure.
    frame = ps.read(lenient, kept.url, "rows", hold=False)
    try:
        kept.flip(regions(kept.sound)["page of n"][-1])
        with pytest.raises(Corruption, match=kept.key):
            ACTIONS[action](frame.select("*"))
        kept.file.unlink()
        with pytest.raises(Corruption, match=kept.key):
            ACTIONS[action](frame.select("*"))
    finally:
        kept.restore()
    ACTIONS[action](frame.select("*"))


def test_file_deleted_before_planning_is_named_in_error(lenient, kept, kept_by_tasks):
    for each in (kept, kept_by_tasks):
        each.file.unlink()
        try:
            with pytest.raises(Exception, match=each.key):
                collected(lenient, each.url)
        finally:
            each.restore()


def test_file_deleted_after_planning_is_named_in_error_of_tasks(lenient, kept_by_tasks):
    frame = ps.read(lenient, kept_by_tasks.url, "rows", hold=False)
    kept_by_tasks.file.unlink()
    try:
        with pytest.raises(Exception, match=kept_by_tasks.key):
            frame.collect()
    finally:
        kept_by_tasks.restore()


def test_planted_read_with_session_options_returns_wrong_rows(lenient, kept):
    """Invariant 30: each read sets the options that hide damage; the session does not."""
    at = regions(kept.sound)["page of n"][-1]
    assert check_flip(lenient, kept, at)
    with mock.patch.dict(door.PER_READ, clear=True), pytest.raises(AssertionError):
        check_flip(lenient, kept, at)
