"""First copies, and what they leave behind."""

import threading
from collections.abc import Generator

import pyarrow as pa
import pytest

from penstock import persist
from penstock.errors import TransientError
from penstock.ingest.loading import Loader


class Watched:
    """A piece that is given up amid its rows, and notices."""

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


def test_a_copy_that_is_given_up_leaves_upstream(tmp_path):
    """Its connection holds a lock on the table, and must not live as long as the error does."""
    stop = threading.Event()
    piece = Watched(stop)
    with persist.open(f"file:{tmp_path}/x", writer="w") as client:
        loader = Loader(client, "src", many=None, stop=stop)
        loader.make("src.t", pa.schema([("a", pa.int64())]), ["a"])
        load = loader.load("src.t", [piece], size=1)
        with pytest.raises(TransientError, match="given up") as kept:
            load.result()
        assert piece.left, kept.value
        load.abandon()
        loader.close()
