"""Damage to each object of a location: verify names the object, and reads fail."""

import random
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

import penstock.persist as persist
from penstock.durable import open_blob
from penstock.durable.log import entry_number
from penstock.errors import Corruption, StoreRefused
from penstock.persist.checksum_walk import verify
from penstock.persist.encoding import ENCODING_VERSIONS, checksum

SETTINGS = persist.Settings(
    background=False, notify="", inline_bytes=512, rollup_every=8, fan_in=4, young_ms=0
)
ROWS = pa.schema([("id", pa.int64()), ("note", pa.string())])


def create_rows(client: persist.Client) -> persist.Collection:
    return client.create_or_load("rows", schema=ROWS, key_columns=["id"])


def build(folder: Path) -> str:
    """Create a location with entries, two rollups, inline and stored batches, and a hold."""
    url = f"file:{folder}"
    with persist.open(url, writer="w", settings=SETTINGS) as client:
        rows = create_rows(client)
        for time in range(30):
            count = 100 if time % 10 == 0 else 1
            table = pa.table(
                {"id": [time] * count, "note": [f"{time}-{i}" for i in range(count)]}, schema=ROWS
            )
            rows.compare_and_append(table, time, time + 1, time=time)
            if time % 10 == 9:
                client.run_maintenance()
        client.hold("owner").move({"rows": 3})
    return url


def objects(folder: Path, room: str) -> list[Path]:
    return sorted(path for path in (folder / room).rglob("*") if path.is_file())


def damaged(url: str) -> list[str]:
    blob = open_blob(url)
    try:
        return [each.key for each in verify(blob).damage]
    finally:
        blob.close()


def key_of(path: Path, folder: Path) -> str:
    return str(path.relative_to(folder))


@pytest.fixture
def location(tmp_path: Path) -> tuple[Path, str]:
    folder = tmp_path / "data"
    return folder, build(folder)


def test_verify_of_undamaged_location_reports_no_damage(location):
    folder, url = location
    assert damaged(url) == []
    for room in ("log", "rollup", "batch", "hold"):
        assert objects(folder, room), room


@pytest.mark.parametrize("room", ["log", "rollup", "batch"])
def test_verify_reports_every_missing_object(location, room):
    folder, url = location
    for path in objects(folder, room):
        contents = path.read_bytes()
        path.unlink()
        assert key_of(path, folder) in damaged(url)
        path.write_bytes(contents)
    assert damaged(url) == []


@pytest.mark.parametrize("room", ["log", "rollup", "batch", "hold"])
def test_verify_reports_every_flipped_truncated_or_extended_object(location, room):
    folder, url = location
    chance = random.Random(11)
    for path in objects(folder, room):
        contents = path.read_bytes()
        at = chance.randrange(len(contents))
        flipped = (
            contents[:at] + bytes([contents[at] ^ (1 << chance.randrange(8))]) + contents[at + 1 :]
        )
        for harm in (flipped, contents[:at], contents + b"\0"):
            path.write_bytes(harm)
            assert key_of(path, folder) in damaged(url)
        path.write_bytes(contents)


def read_all(url: str) -> None:
    with persist.open(url, hold=False, settings=SETTINGS) as client:
        rows = client.collection("rows")
        for as_of in range(rows.since, rows.upper):
            rows.snapshot(as_of)


def test_read_of_damaged_location_raises_corruption_with_object_key(location):
    folder, url = location
    newest_rollup = objects(folder, "rollup")[-1]
    rolled = int(newest_rollup.name)
    needed = [newest_rollup, *objects(folder, "batch")]
    for path in objects(folder, "log"):
        number = entry_number(key_of(path, folder))
        assert number is not None
        needed += [path] if number >= rolled else []
    assert len(needed) > 3
    for path in needed:
        contents = path.read_bytes()
        for harm in (contents[:-1], contents[:50] + b"\xff" + contents[51:], None):
            if harm == contents:
                continue
            if harm is None:
                path.unlink()
                if path == newest_rollup:
                    read_all(url)  # An older rollup and the log entries give the same state.
                    path.write_bytes(contents)
                    continue
            else:
                path.write_bytes(harm)
            with pytest.raises(Corruption) as caught:
                read_all(url)
            assert caught.value.key == key_of(path, folder)
            path.write_bytes(contents)
    read_all(url)


def test_open_with_unknown_encoding_version_is_rejected_and_writes_nothing(location):
    folder, url = location
    newest = objects(folder, "rollup")[-1]
    contents = bytearray(newest.read_bytes()[:-8])
    contents[5] = max(ENCODING_VERSIONS) + 1
    newest.write_bytes(bytes(contents) + checksum(bytes(contents)).to_bytes(8, "little"))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for writer in (None, "w"):
        with pytest.raises(StoreRefused, match="encoding version 3"):
            persist.open(url, writer=writer, settings=SETTINGS)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_verify_command_with_truncated_batch_exits_1_and_names_object(location):
    folder, url = location
    command = [sys.executable, "-m", "penstock.cli.main", "verify", url]
    assert subprocess.run(command, capture_output=True, check=False, timeout=60).returncode == 0
    victim = objects(folder, "batch")[0]
    victim.write_bytes(victim.read_bytes()[:-3])
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 1
    assert key_of(victim, folder) in result.stdout


def test_verify_ignores_foreign_files(tmp_path):
    url = build(tmp_path)
    folder = objects(tmp_path, "log")[0].parent
    for path in (
        *(tmp_path / room / ".DS_Store" for room in ("hold", "rollup", "log", "batch", "mark")),
        *(tmp_path / room / "notes" for room in ("hold", "rollup", "log", "batch", "mark")),
        *(folder / name for name in (".nfs0001", "003.bak")),
        *(tmp_path / "mark" / "floor-x", tmp_path / "rollup" / "7"),
    ):
        path.write_bytes(b"Bud1")
    assert damaged(url) == []
