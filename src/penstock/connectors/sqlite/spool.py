"""Buffer for the documents of one transaction.

Documents beyond a limit go to an unnamed file in the folder of the database. The file disappears
when the process ends.
"""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
from pyarrow import ipc

from penstock.sdk.batches import Documents
from penstock.sdk.bindings import Binding

__all__ = ["Spool"]

SCHEMA = pa.schema(
    [
        ("binding", pa.int32()),
        ("packed_keys", pa.binary()),
        ("packed_values", pa.binary()),
        ("docs_json", pa.binary()),
        ("exists", pa.bool_()),
        ("deletes", pa.bool_()),
    ]
)


class Spool:
    """Documents in the order of their stores."""

    def __init__(self, folder: Path, bindings: Sequence[Binding[Any]], memory_bytes: int) -> None:
        """Create a buffer of `memory_bytes` that spills to `folder`."""
        self._folder = folder
        self._bindings = bindings
        self._limit = memory_bytes
        self._buffered: list[Documents] = []
        self._buffered_bytes = 0
        self._file: IO[bytes] | None = None
        self._writer: ipc.RecordBatchStreamWriter | None = None

    def add(self, batch: Documents) -> None:
        """Add a batch."""
        self._buffered.append(batch)
        self._buffered_bytes += batch.nbytes
        if self._buffered_bytes > self._limit:
            self._spill()

    def _spill(self) -> None:
        writer = self._writer
        if writer is None:
            self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 - see `clear`
            self._writer = writer = ipc.new_stream(self._file, SCHEMA)
        for batch in self._buffered:
            writer.write_batch(_packed(batch))
        self._buffered, self._buffered_bytes = [], 0

    def __iter__(self) -> Iterator[Documents]:
        """Yield all batches. None can be added before `clear`."""
        if self._writer is not None and self._file is not None:
            self._writer.close()
            self._file.seek(0)
            with ipc.open_stream(self._file) as reader:
                for batch in reader:
                    yield self._unpacked(batch)
        yield from self._buffered

    def _unpacked(self, batch: pa.RecordBatch) -> Documents:
        index, *columns = batch.columns
        return Documents(self._bindings[index[0].as_py()], *columns)

    def clear(self) -> None:
        """Remove all batches."""
        self._buffered, self._buffered_bytes, self._writer = [], 0, None
        if self._file is not None:
            self._file.close()
            self._file = None


def _packed(batch: Documents) -> pa.RecordBatch:
    deletes = batch.deletes
    if deletes is None:
        deletes = pa.repeat(pa.scalar(False), len(batch))
    return pa.record_batch(
        [
            pa.repeat(pa.scalar(batch.binding.index, pa.int32()), len(batch)),
            batch.packed_keys,
            batch.packed_values,
            batch.docs_json,
            batch.exists,
            deletes,
        ],
        schema=SCHEMA,
    )
