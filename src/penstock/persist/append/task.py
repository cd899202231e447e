"""Spark task of a write: rows in, objects under a staging id out.

The code runs in a Python worker and imports no Spark. Errors about the rows, or about the
system that they are read from, are returned, not raised: Spark would retry the Spark task
in vain, and return its error as text.
"""

import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa
from msgspec import msgpack

from penstock.errors import (
    DeterminateError,
    DurabilityLost,
    IndeterminateError,
    PenstockError,
    StoreRefused,
)
from penstock.persist.append.conform import stored_rows
from penstock.persist.append.shared_storage_check import check_shared_storage
from penstock.persist.batch import together
from penstock.persist.scan.task import batches_of
from penstock.persist.state import Batch

__all__ = ["Share", "Written", "all_of", "gathered", "is_reported", "write_staged"]


def is_reported(error: PenstockError) -> bool:
    """Return whether a Spark task returns an error as a result instead of raising it.

    A raised error makes Spark retry the Spark task on another executor. That helps if a
    store operation failed. Spark must not retry an error about a source, even a transient
    one.
    """
    passing = isinstance(error, DeterminateError | IndeterminateError)
    return not passing or isinstance(error, StoreRefused | DurabilityLost)


@dataclass(frozen=True, slots=True)
class Written:
    """Result of a Spark task: a batch, or the error that prevented it."""

    batch: bytes = b""
    """Batch as MessagePack; empty if there were no rows."""

    error: bytes = b""
    rows: int = 0


@dataclass(frozen=True, slots=True)
class Share:
    """Instructions for every Spark task of a write."""

    url: str
    staging: str
    collection: str
    schema: int
    """Index of the collection's schema version to write."""

    columns: bytes
    """Columns of that version, as an Arrow IPC schema message."""

    time: int | None
    part_bytes: int
    marker: str = ""
    """Key of the driver's marker object; empty if the writer runs in the driver's process."""

    def write(self, rows: Iterable[pa.RecordBatch], *, to_the_end: bool = True) -> Written:
        """Write all rows, and return the batch or the error.

        Spark loses a worker that does not consume all of its rows. Therefore the rows are
        read `to_the_end` even after an error. A caller that reads the rows itself need not
        do that.
        """
        remaining = iter(rows)
        try:
            batch = self.stage(remaining)
        except PenstockError as error:
            if not is_reported(error):
                raise
            for _ in remaining if to_the_end else ():
                pass
            return Written(error=pickle.dumps(error))
        return Written() if batch is None else Written(msgpack.encode(batch), rows=batch.rows)

    def stage(self, rows: Iterable[pa.RecordBatch]) -> Batch | None:
        """Write all rows, and return their batch, or None without any row; raise every error."""
        if self.marker:
            check_shared_storage(self.url, self.marker)
        return write_staged(
            self.url,
            self.staging,
            self._stored(rows),
            self.schema,
            part_bytes=self.part_bytes,
        )

    def _stored(self, rows: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
        columns = pa.ipc.read_schema(pa.py_buffer(self.columns))
        for each in rows:
            table = pa.Table.from_batches([each])
            yield stored_rows(table, columns, time=self.time, collection=self.collection)


def gathered(written: Iterable[Written]) -> Batch | None:
    """Combine the batches of all Spark tasks.

    Raises:
        PenstockError: the error that a Spark task returned.
    """
    batches: list[Batch | None] = []
    for each in written:
        if each.error:
            error: PenstockError = pickle.loads(each.error)
            raise error
        if each.batch:
            batches.append(msgpack.decode(each.batch, type=Batch))
    return all_of(batches)


def all_of(batches: Iterable[Batch | None]) -> Batch | None:
    """Combine batches into one; return None without any batch."""
    found = [batch for batch in batches if batch is not None]
    return together(found) if found else None


def write_staged(
    url: str, staging: str, updates: Iterable[pa.Table], schema: int, *, part_bytes: int
) -> Batch | None:
    """Write updates in stored form as objects of about `part_bytes`; None without any row."""
    batches = batches_of(url)
    return batches.build_streamed(updates, schema, staging, part_bytes=part_bytes)
