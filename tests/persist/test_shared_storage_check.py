"""Spark tasks write only to storage that the driver shares, even if folder names are equal.

A symbolic link represents a path that exists on every host: its target depends on
the host.
"""

import socket
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from tests.faults.inspect import litter
from tests.persist.shop import SCHEMA, by_hand

from penstock import persist
from penstock.durable import open_blob
from penstock.errors import UsageError
from penstock.ingest.scan_task import Scanned
from penstock.ingest.snapshot_loader import SnapshotLoader
from penstock.persist.append.shared_storage_check import marker_placed, place_marker
from penstock.persist.append.task import Share, Written, gathered
from penstock.persist.checksum_walk import verify
from penstock.persist.merge.merger import BigMerges
from penstock.persist.scan import task


class Hosts:
    """Path that leads to the driver's folder, or in its blocks to a folder of another host."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "data"
        self.url = f"file:{self.path}"
        self._driver, self.other = folder / "driver", folder / "other"
        self._driver.mkdir()
        self.other.mkdir()
        self.path.symlink_to(self._driver)

    @contextmanager
    def on_other_host(self) -> Iterator[None]:
        """Run the block on the other host."""
        self._lead_to(self.other)
        try:
            yield
        finally:
            self._lead_to(self._driver)

    def _lead_to(self, folder: Path) -> None:
        self.path.unlink()
        self.path.symlink_to(folder)
        # Another host runs another process, which has no open stores yet.
        task._store.cache_clear()
        task._batches.cache_clear()


@pytest.fixture
def hosts(tmp_path: Path) -> Hosts:
    return Hosts(tmp_path)


@pytest.fixture
def client(hosts: Hosts) -> Iterator[persist.Client]:
    with persist.open(hosts.url, writer="w", settings=by_hand()) as client:
        yield client


def share_for(target: persist.Collection, staging: str, marker: str) -> Share:
    return Share(
        url=target.client.url,
        staging=staging,
        collection=target.name,
        schema=0,
        columns=target.state.schemas[0].columns,
        time=1,
        part_bytes=1 << 20,
        marker=marker,
    )


def some_rows() -> Generator[pa.RecordBatch, None, None]:
    yield pa.record_batch({"k": ["a"], "n": pa.array([1], pa.int32())})
    yield pa.record_batch({"k": ["b"], "n": pa.array([2], pa.int32())})


def proofs(folder: Path) -> list[Path]:
    return list(folder.resolve().rglob("*.proof"))


def test_spark_task_that_sees_the_marker_writes(hosts, client):
    target = client.create_or_load("c", schema=SCHEMA)
    with client.staging() as staging:
        with marker_placed(client.url, staging) as marker:
            assert len(proofs(hosts.path)) == 1
            batch = gathered([share_for(target, staging, marker).write(some_rows())])
            assert verify(open_blob(hosts.url)).sound
        target.compare_and_append(persist.Staged(batch), 0, 2)
    assert [u.data["k"] for u in target.snapshot(1)] == ["a", "b"]
    assert proofs(hosts.path) == []


@pytest.mark.parametrize("exists", [True, False], ids=["another folder", "no folder"])
def test_spark_task_without_shared_storage_raises_and_writes_nothing(hosts, client, exists):
    target = client.create_or_load("c", schema=SCHEMA)
    if not exists:
        hosts.other.rmdir()
    with client.staging() as staging, marker_placed(client.url, staging) as marker:
        share = share_for(target, staging, marker)
        first = share.write(some_rows())
        sent, read = some_rows(), some_rows()
        with hosts.on_other_host():  # An executor that started later.
            second = share.write(sent)
            third = share.write(read, to_the_end=False)
        for each in ([first, second], [third]):
            with pytest.raises(UsageError, match="is not shared between the driver") as told:
                gathered(each)
            assert f'host "{socket.gethostname()}"' in str(told.value)
            assert hosts.url in str(told.value)
            assert "s3://" in told.value.hint
        # Rows from Spark are read to the end, other rows are not.
        assert next(sent, None) is None
        assert next(read, None) is not None
    assert not hosts.other.exists() or list(hosts.other.rglob("*")) == []
    assert target.state.batches == ()
    client.compact()
    assert litter(hosts.url) == []


def test_write_in_driver_process_needs_no_marker(hosts, client):
    target = client.create_or_load("c", schema=SCHEMA)
    with client.staging() as staging:
        batch = gathered([share_for(target, staging, "").write(some_rows())])
        target.compare_and_append(persist.Staged(batch), 0, 2)
    assert target.upper == 2
    assert proofs(hosts.path) == []


def test_compact_sweeps_marker_of_closed_staging_id(hosts, client):
    client.create_or_load("c", schema=SCHEMA)
    with client.staging() as staging:
        key = place_marker(client.url, staging)
        client.compact()  # Keeps the marker while the staging id is open.
        assert litter(hosts.url) == [key]
        assert verify(open_blob(hosts.url)).sound
    client.compact()
    assert litter(hosts.url) == []
    with client.staging() as staging:
        key = place_marker(client.url, staging)
        client.hand_over(staging)
    with persist.open(hosts.url, writer="w", settings=by_hand()) as successor:
        assert litter(hosts.url) == [key]
        successor.compact()
        assert litter(hosts.url) == []


def test_marker_in_memory_location_is_visible_in_same_process():
    with persist.open("memory:proofs", writer="w", settings=by_hand()) as client:
        target = client.create_or_load("c", schema=SCHEMA)
        with client.staging() as staging, marker_placed(client.url, staging) as marker:
            share = share_for(target, staging, marker)
            assert gathered([share.write(some_rows())]) is not None
            with pytest.raises(UsageError, match="is not shared"):
                gathered([replace(share, marker=f"{marker}x").write(some_rows())])


class Rows:
    """Split of an initial snapshot."""

    def read(self, stop: threading.Event | None = None) -> Generator[pa.RecordBatch, None, None]:
        return some_rows()


def test_initial_snapshot_by_remote_tasks_is_rejected_and_local_one_accepted(hosts, client):
    class LocalTasks:
        def read(self, share, splits, watch) -> list[Written]:
            return [share.write(split.read()) for split in splits]

        def scan(self, task, watch) -> list[Scanned]:
            raise AssertionError("a scan was delegated")

        def merges(self, url) -> BigMerges:
            raise AssertionError("a merge was delegated")

    class RemoteTasks(LocalTasks):
        def read(self, share, splits, watch) -> list[Written]:
            with hosts.on_other_host():
                return super().read(share, splits, watch)

    for jobs, sound in ((RemoteTasks(), False), (LocalTasks(), True)):
        loader = SnapshotLoader(client, "src", jobs=jobs, spark_bytes=0)
        loader.create("src.t", SCHEMA, ["k"])
        copy = loader.load("src.t", [Rows(), Rows()], size=1)
        if sound:
            assert copy.result().rows() == 4
        else:
            with pytest.raises(UsageError, match="is not shared"):
                copy.result()
        copy.abandon()
        loader.close()
        assert proofs(hosts.path) == []
    assert list(hosts.other.rglob("*")) == []
