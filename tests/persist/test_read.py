"""Remote readers: behind the log, without write permission, without a hold."""

import os
import shutil
import subprocess
import sys
import tempfile
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from tests.persist.shop import SCHEMA, by_hand, next_changes, opened, rows

import penstock.persist as persist
from penstock.durable.memory import Shelf
from penstock.errors import Corruption, UsageError
from penstock.persist import TEXT, UNIT, SinceError


@pytest.fixture
def shelf():
    return Shelf()


def grown(client, entries):
    """Return a collection after many entries, all but the last few truncated."""
    table = client.create_or_load("rows", schema=SCHEMA)
    for time in range(table.upper, table.upper + entries):
        table.compare_and_append(rows(("a", time, time, 1), ("b", 1, time, 1)), time, time + 1)
    for _ in range(3):
        client.compact()
    return table


@pytest.mark.parametrize("hold", [True, False])
def test_reader_overtaken_by_truncation_reads_current_contents(shelf, hold):
    with opened(shelf, inline_bytes=8) as client:
        grown(client, 2)
        with opened(shelf, writer=None, hold=hold) as reader:
            behind = reader.collection("rows")
            assert behind.upper == 2
            grown(client, 20)
            assert len([key for key in shelf.objects if key.startswith("log/")]) < 5
            assert behind.upper == 22
            assert len(behind.snapshot(21)) == 23


def test_listener_overtaken_by_truncation_receives_all_changes(shelf):
    with opened(shelf) as client, opened(shelf, writer=None) as reader:
        grown(client, 2)
        with reader.collection("rows").listen(1) as listener:
            grown(client, 20)
            changes = next_changes(listener)
            assert (changes.lower, changes.upper, len(changes)) == (2, 22, 40)


def test_reader_without_hold_raises_usage_error_after_compaction(shelf):
    with opened(shelf, inline_bytes=8) as client:
        table = grown(client, 3)
        with opened(shelf, writer=None, hold=False) as reader:
            state = reader.collection("rows").state
            table.compare_and_append(rows(("c", 1, 3, 1)), 3, 4)
            client.compact()
            with pytest.raises(UsageError, match="was compacted while it was being read") as told:
                reader.reader.rows(state, state.schemas[-1], lower=0, upper=9)
            assert "hold=True" in told.value.hint
            table.allow_compaction(3).result()
            with pytest.raises(SinceError):
                reader.collection("rows").snapshot(2)


def test_snapshot_with_missing_linked_object_raises_corruption(shelf):
    with opened(shelf, inline_bytes=8, cache_bytes=0) as client:
        table = grown(client, 3)
        (key,) = client.state.linked()
        del shelf.objects[key]
        with pytest.raises(Corruption, match=key):
            table.snapshot(2)
        with opened(shelf, writer=None) as reader, pytest.raises(Corruption, match=key):
            reader.collection("rows").snapshot(2)


def test_reader_writes_only_holds(shelf):
    with opened(shelf) as client:
        grown(client, 3)
        before = set(shelf.objects)
        with opened(shelf, writer=None, hold=False) as reader:
            with reader.collection("rows").listen(0) as listener:
                assert listener.next_changes(timeout_ms=0) is not None
            reader.collection("rows").snapshot(2)
            assert set(shelf.objects) == before
        with opened(shelf, writer=None) as reader:
            reader.collection("rows").snapshot(2)
            assert {key.split("/")[0] for key in set(shelf.objects) - before} == {"hold"}
        assert set(shelf.objects) == before


READS = """
import os, sys
folder, uid = sys.argv[1], int(sys.argv[2])
import penstock.persist as persist
import pyarrow.parquet, pyarrow.ipc  # found before the uid is given up
if uid:
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
try:
    open(folder + "/log/mine", "w")
except PermissionError:
    pass
else:
    sys.exit("the folder can be written to, so this shows nothing")
with persist.open("file:" + folder, hold=False, settings=persist.Settings(notify="")) as client:
    words = client.collection("words")
    print(sorted(update.data[0] for update in words.snapshot(as_of=1)))
    with words.listen(0) as listener:
        print(listener.next_changes(timeout_ms=0).upper)
try:
    persist.open("file:" + folder, writer="me")
except persist.errors.PenstockError as error:
    print(type(error).__name__)
"""


@pytest.fixture
def seen_by_all():
    """Yield a folder that every user can enter; the folders of pytest are private."""
    folder = Path(tempfile.mkdtemp(prefix="penstock-"))
    folder.chmod(0o755)
    yield folder
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    shutil.rmtree(folder)


def test_reader_without_write_permission_reads_location(seen_by_all):
    folder = seen_by_all / "location"
    with persist.open(f"file:{folder}", writer="w", settings=by_hand()) as client:
        words = client.create_or_load("words", key=TEXT, value=UNIT)
        words.compare_and_append([(("a", None), 0, 1), (("b", None), 1, 1)], 0, 2)
        client.compact()
    found = sorted(folder.rglob("*"))
    for path in (*found, folder):
        path.chmod(0o555 if path.is_dir() else 0o444)
    child = subprocess.run(
        # Root may write everywhere: the child changes to an unprivileged user.
        [sys.executable, "-c", READS, str(folder), "65534" if os.getuid() == 0 else "0"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.splitlines() == ["['a', 'b']", "2", "StoreRefused"]
    assert sorted(folder.rglob("*")) == found


def test_listen_from_minus_one_with_snapshot_starts_with_empty_snapshot(shelf):
    with opened(shelf) as client:
        table = grown(client, 2)
        with table.listen(-1, snapshot=True) as listener:
            assert len(listener.next_changes(timeout_ms=0)) == 0


def test_snapshot_and_listen_as_of_datetime_use_its_milliseconds(shelf):
    moment = datetime(2026, 11, 16, 12, 0, 0, 5_900, tzinfo=UTC)
    time_ms = 1_794_830_400_005
    with opened(shelf) as client:
        table = client.create_or_load("rows", schema=SCHEMA)
        table.compare_and_append(
            rows(("a", 1, time_ms, 1), ("b", 1, time_ms + 1, 1)), 0, time_ms + 2
        )
        for as_of in (moment, moment.astimezone(timezone(timedelta(hours=2)))):
            snapshot = table.snapshot(as_of)
            assert snapshot.as_of == time_ms
            assert len(snapshot) == 1
            with table.listen(as_of) as listener:
                assert listener.frontier == time_ms + 1
        for read in (table.snapshot, table.listen):
            with pytest.raises(UsageError, match="has no time zone"):
                read(moment.replace(tzinfo=None))
