"""Initial snapshots: cancellation, progress and cleanup."""

import threading
from collections.abc import Callable, Generator
from pathlib import Path

import pyarrow as pa
import pytest

from penstock import persist
from penstock.errors import InternalError, TransientError
from penstock.ingest.snapshot_loader import SnapshotLoader
from tests.ingest.pump import until


class Watched:
    """Split that is cancelled between its rows and records that it was closed."""

    def __init__(self, stop: threading.Event) -> None:
        self.stop = stop
        self.left = False

    def read(self, stop: threading.Event | None = None) -> Generator[pa.RecordBatch, None, None]:
        try:
            self.stop.set()
            yield pa.record_batch({"a": pa.array([1], pa.int64())})
            yield pa.record_batch({"a": pa.array([2], pa.int64())})
        finally:
            self.left = True


def test_snapshot_cancelled_between_rows_closes_its_split(tmp_path):
    # The connection holds a lock on the table: it must close before the error is released.
    stop = threading.Event()
    split = Watched(stop)
    with persist.open(f"file:{tmp_path}/x", writer="w") as client:
        loader = SnapshotLoader(client, "src", jobs=None, stop=stop)
        loader.create("src.t", pa.schema([("a", pa.int64())]), ["a"])
        load = loader.load("src.t", [split], size=1)
        with pytest.raises(TransientError, match="was cancelled") as kept:
            load.result()
        assert split.left, kept.value
        load.abandon()
        loader.close()


class Waiting:
    """Split that waits for its server until the stop event is set."""

    def __init__(self) -> None:
        self.started = threading.Event()

    def read(self, stop: threading.Event | None = None) -> Generator[pa.RecordBatch, None, None]:
        self.started.set()
        assert stop is not None
        assert stop.wait(60)
        raise TransientError("wait for the server was cancelled")
        yield


def test_snapshot_cancelled_while_split_waits_for_server_ends_that_wait(
    tmp_path: Path,
) -> None:
    stop, split = threading.Event(), Waiting()
    with persist.open(f"file:{tmp_path}/x", writer="w") as client:
        loader = SnapshotLoader(client, "src", jobs=None, stop=stop)
        loader.create("src.t", pa.schema([("a", pa.int64())]), ["a"])
        load = loader.load("src.t", [split], size=1)
        until(lambda: split.started.is_set() or load.done(), "the split to be read")
        assert not load.done()
        stop.set()
        with pytest.raises(TransientError, match="wait for the server was cancelled"):
            load.result()
        load.abandon()
        loader.close()


class Counting:
    """Split that records how many rows the snapshot had reported before its read."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers
        self.count: Callable[[], int] = lambda: -1
        self.ready = threading.Event()
        self.before: int | None = None

    def read(self, stop: threading.Event | None = None) -> Generator[pa.RecordBatch, None, None]:
        assert self.ready.wait(60)
        self.before = self.count()
        for number in self.numbers:
            yield pa.record_batch({"a": pa.array([number], pa.int64())})


def test_snapshot_reports_rows_of_completed_splits(tmp_path: Path) -> None:
    splits = [Counting(1, 2), Counting(), Counting(3), Counting()]
    with persist.open(f"file:{tmp_path}/x", writer="w") as client:
        loader = SnapshotLoader(client, "src", jobs=None)
        loader.create("src.t", pa.schema([("a", pa.int64())]), ["a"])
        load = loader.load("src.t", splits, size=1)
        for split in splits:
            split.count = load.rows
            split.ready.set()
        assert load.result() is load
        assert [split.before for split in splits] == [0, 2, 2, 3]
        assert load.rows() == 3
        load.abandon()
        loader.close()


def test_drop_of_published_collection_raises_internal_error(tmp_path: Path) -> None:
    schema = pa.schema([("a", pa.int64())])
    with persist.open(f"file:{tmp_path}/x", writer="w") as client:
        loader = SnapshotLoader(client, "src", jobs=None)
        for name in ("src.hidden", "src.seen"):
            loader.create(name, schema, ["a"])
        client.collection("src.seen").seal(1).result()
        with pytest.raises(InternalError, match=r'could not drop collection "src\.seen"'):
            loader.drop_collection("src.seen")
        loader.drop_collection("src.hidden")
        assert client.collections(hidden=True) == ["src.seen"]
        loader.drop_collection("src.hidden")
        loader.close()
