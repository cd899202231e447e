"""One task's share of a write: rows in, objects under a staging id out.

It runs in a Python worker and knows nothing of Spark. What is wrong with the
rows is told, not raised: Spark would try a raised task again, in vain, and
hand its error on as text.
"""

import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa
from msgspec import msgpack

from penstock.errors import PenstockError, UsageError
from penstock.persist.batch import together
from penstock.persist.state import Batch
from penstock.persist.tasks import write_staged
from penstock.persist.writing.fit import stored_rows
from penstock.persist.writing.proof import check_proof

__all__ = ["Share", "Written", "gathered"]


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
    proof: str = ""
    """The key of what the driver left for the task to find; empty if it is the same process."""

    def write(self, rows: Iterable[pa.RecordBatch], *, to_the_end: bool = True) -> Written:
        """Write all rows, or say why not.

        Spark loses a worker that leaves some of the rows it sent, so they are
        taken `to_the_end` even in vain; rows that are read here need not be.
        """
        remaining = iter(rows)
        try:
            if self.proof:
                check_proof(self.url, self.proof)
            batch = write_staged(
                self.url,
                self.staging,
                self._stored(remaining),
                self.schema,
                part_bytes=self.part_bytes,
            )
        except UsageError as error:
            for _ in remaining if to_the_end else ():
                pass
            return Written(error=pickle.dumps(error))
        return Written() if batch is None else Written(msgpack.encode(batch), rows=batch.rows)

    def _stored(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
        columns = pa.ipc.read_schema(pa.py_buffer(self.columns))
        for each in rows:
            table = pa.Table.from_batches([each])
            yield stored_rows(table, columns, time=self.time, collection=self.collection)


def gathered(written: Iterable[Written]) -> Batch | None:
    """All tasks' batches as one.

    Raises:
        PenstockError: what a task said was wrong with its rows.
    """
    batches: list[Batch] = []
    for each in written:
        if each.error:
            error: PenstockError = pickle.loads(each.error)
            raise error
        if each.batch:
            batches.append(msgpack.decode(each.batch, type=Batch))
    return together(batches) if batches else None
