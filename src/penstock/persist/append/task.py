"""One task's share of a write: rows in, objects under a staging id out.

It runs in a Python worker and knows nothing of Spark. What is wrong with the
rows, or with where they are read, is told, not raised: Spark would try a raised
task again, in vain, and hand its error on as text.
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
    """Whether a task tells an error; if not, it raises it, and Spark tries again elsewhere.

    That helps where the store did not do as asked. What is about a source is
    not Spark's to try again, even if it is about the moment.
    """
    passing = isinstance(error, DeterminateError | IndeterminateError)
    return not passing or isinstance(error, StoreRefused | DurabilityLost)


@dataclass(frozen=True, slots=True)
class Written:
    """What a task has to tell: a batch, or why there is none."""

    batch: bytes = b""
    """Empty if there were no rows."""

    error: bytes = b""
    rows: int = 0


@dataclass(frozen=True, slots=True)
class Share:
    """What every task of a write is told."""

    url: str
    staging: str
    collection: str
    schema: int
    """Which of the collection's schema versions is written."""

    columns: bytes
    """That version's columns, as an Arrow IPC schema message."""

    time: int | None
    part_bytes: int
    marker: str = ""
    """The key of what the driver left for the task to find; empty if it is the same process."""

    def write(self, rows: Iterable[pa.RecordBatch], *, to_the_end: bool = True) -> Written:
        """Write all rows, or say why not.

        Spark loses a worker that leaves some of the rows it sent, so they are
        taken `to_the_end` even in vain; rows that are read here need not be.
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
        """Write all rows; None if there are none. What is wrong is raised."""
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
    """All tasks' batches as one.

    Raises:
        PenstockError: what a task said was wrong.
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
    """All batches as one, if there is any."""
    found = [batch for batch in batches if batch is not None]
    return together(found) if found else None


def write_staged(
    url: str, staging: str, updates: Iterable[pa.Table], schema: int, *, part_bytes: int
) -> Batch | None:
    """Write updates, in stored form, as objects of about `part_bytes`; None if there are none."""
    batches = batches_of(url)
    return batches.build_streamed(updates, schema, staging, part_bytes=part_bytes)
