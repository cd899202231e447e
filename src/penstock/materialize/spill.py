"""Documents of one transaction, spilled to disk if they exceed memory.

Documents are added in order of key, and combined at once. The stored documents of the same keys
are loaded and arrive in any order. Then each combined document is reduced into its stored one:

    add*, finish ──► keys to load          combined, in order of keys
    loaded*      ◄── stored documents      runs, each in order of keys
    reduced      ──► documents to store    merge of both

Documents that exceed memory are spilled to unnamed temporary files. The kernel deletes the files
when the process ends, also after a crash. Combined documents are read back once and in order, so
their file is compressed. Runs are read in small parts from every run at once, so their file is
memory-mapped. Only the documents being reduced are copied, for any number of runs and any size.
"""

import mmap
import tempfile
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from operator import methodcaller
from pathlib import Path
from typing import IO, Final, Self

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import ipc

from penstock.data.packed import unpack_row
from penstock.errors import InternalError
from penstock.materialize.errors import ConnectorRefused
from penstock.reduce import COMBINED, Combiner, Reducer, reduce_rows

__all__ = ["SpillingCombiner"]

_STEP_BYTES: Final = 1 << 20
_VALUE: Final = methodcaller("as_py")


class SpillingCombiner:
    """Documents of one binding: combined, then reduced into the loaded documents.

    The caller must close it, also after an error. Returned arrays and batches stay valid.

    Args:
        reducer: reducer of the collection.
        memory_bytes: memory limit. An added table, a run during its sort, and the documents of
            one key that do not combine are not included.
        folder: folder of the spill files; by default, the folder of temporary files.
    """

    def __init__(
        self, reducer: Reducer, *, memory_bytes: int = 64 << 20, folder: Path | None = None
    ) -> None:
        self._reducer = reducer
        self._half = memory_bytes // 2
        self._step = min(_STEP_BYTES, memory_bytes // 8)
        self._open = Combiner(reducer)
        self._open_bytes = 0
        self._enough = self._step
        self._last: bytes | None = None
        self._combined: list[pa.RecordBatch] = []
        self._combined_bytes = 0
        self._combined_file = _SpillFile(folder, compression="lz4")
        self._loaded: list[tuple[pa.BinaryArray, pa.BinaryArray]] = []
        self._loaded_bytes = 0
        self._runs_file = _SpillFile(folder, compression=None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release all memory and disk space."""
        self._open = Combiner(self._reducer)
        self._combined, self._loaded = [], []
        self._open_bytes = self._combined_bytes = self._loaded_bytes = 0
        self._combined_file.close()
        self._runs_file.close()

    @property
    def held_bytes(self) -> int:
        """Size of the documents in memory between calls."""
        return self._open_bytes + self._combined_bytes + self._loaded_bytes

    @property
    def spilled_bytes(self) -> int:
        """Size of the spill files."""
        return self._combined_file.bytes + self._runs_file.bytes

    def add(self, rows: pa.Table) -> list[pa.BinaryArray]:
        """Add rows of `COMBINED`, in order of keys and, within a key, in source order.

        Returns:
            Keys that are now complete, each once. A later call may return the keys of `rows`.
        """
        self._open.add(rows)
        self._open_bytes += rows.nbytes
        return self._combine(complete=False) if self._open_bytes >= self._enough else []

    def finish(self) -> list[pa.BinaryArray]:
        """End the input, and return the remaining keys."""
        return self._combine(complete=True)

    def _combine(self, *, complete: bool) -> list[pa.BinaryArray]:
        rows = self._open.compact()
        # The last key may continue in the next table.
        end = len(rows) if complete or not len(rows) else _first(rows["key"], len(rows) - 1)
        self._open = Combiner(self._reducer)
        self._open.add(rows[end:])
        self._open_bytes = rows[end:].nbytes
        # Rows that do not combine wait until their size has doubled: the cost stays linear.
        self._enough = max(self._step, 2 * self._open_bytes)
        keys = [self._keep(batch) for batch in rows[:end].combine_chunks().to_batches()]
        if self._combined_bytes + self._open_bytes > self._half:
            for batch in self._combined:
                self._combined_file.write(batch)
            self._combined, self._combined_bytes = [], 0
        return keys

    def _keep(self, batch: pa.RecordBatch) -> pa.BinaryArray:
        keys = batch.column("key")
        if self._last is not None and keys[0].as_py() <= self._last:
            raise InternalError(f"{self._reducer.what} arrived after a later key")
        self._last = keys[-1].as_py()
        self._combined.append(batch)
        self._combined_bytes += batch.nbytes
        return keys.unique()

    def loaded(self, keys: pa.BinaryArray, documents: pa.BinaryArray) -> None:
        """Add loaded documents, in any order."""
        self._loaded.append((keys, documents))
        self._loaded_bytes += keys.nbytes + documents.nbytes
        if self._loaded_bytes > self._half:
            for run in self._sorted():
                self._runs_file.write(run)
            self._loaded, self._loaded_bytes = [], 0

    def _sorted(self) -> list[pa.RecordBatch]:
        parts = [pa.table(arrays, names=COMBINED.names).cast(COMBINED) for arrays in self._loaded]
        rows = pa.concat_tables([COMBINED.empty_table(), *parts])
        batches: list[pa.RecordBatch] = (
            rows.take(pc.sort_indices(rows["key"])).combine_chunks().to_batches()
        )
        return batches

    def combined(self) -> Iterator[pa.RecordBatch]:
        """Yield batches of `COMBINED` in order of keys. All rows of a key are in one batch."""
        if self._open_bytes:
            raise InternalError(f"{self._reducer.what} was requested before all were added")
        yield from self._combined_file
        yield from self._combined

    def reduced(self, *, keep_deleted: bool = False) -> Iterator[pa.RecordBatch]:
        """Yield batches of `REDUCED` in order of keys.

        Args:
            keep_deleted: see `Reducer.reduce`.

        Raises:
            ConnectorRefused: a document was loaded twice, or without a request.
            DefiniteError: a document does not match the schema, or cannot be reduced.
        """
        last = self._sorted()
        self._loaded = [(batch.column("key"), batch.column("document")) for batch in last]
        runs = [_SortedRun(batch) for batch in (*self._runs_file, *last)]
        for batch in self.combined():
            for rows, loaded in _aligned(batch, runs, self._step):
                self._check(rows["key"], loaded["key"])
                yield from reduce_rows(
                    self._reducer, rows, loaded=loaded, keep_deleted=keep_deleted
                )
        for run in runs:
            self._check(pa.chunked_array([], pa.binary()), run.rest["key"])

    def _check(self, requested: pa.ChunkedArray, loaded: pa.ChunkedArray) -> None:
        """Check that each loaded key was requested, and was loaded once."""
        unknown = loaded.filter(pc.invert(pc.is_in(loaded, value_set=requested)))
        if len(unknown):
            raise self._refused(unknown[0], "without a request")
        if pc.count_distinct(loaded).as_py() < len(loaded):
            counts = pc.value_counts(loaded)
            often = counts.field("values").filter(pc.greater(counts.field("counts"), 1))
            raise self._refused(often[0], "twice")

    def _refused(self, key: pa.Scalar, how: str) -> ConnectorRefused:
        return ConnectorRefused(
            f"connector loaded a document of key {unpack_row(key.as_py())!r} {how}",
            detail=f"The loaded document is a {self._reducer.what}.",
            hint="This is a defect of the connector. The transaction was not committed.",
        )


class _SpillFile:
    """Spill file of batches, in write order."""

    def __init__(self, folder: Path | None, *, compression: str | None) -> None:
        self._folder = folder
        self._options = ipc.IpcWriteOptions(compression=compression)
        self._file: IO[bytes] | None = None
        self._writer: ipc.RecordBatchStreamWriter | None = None

    @property
    def bytes(self) -> int:
        return 0 if self._file is None else self._file.tell()

    def write(self, batch: pa.RecordBatch) -> None:
        """Append a batch of `COMBINED`."""
        if self._writer is None:
            self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 - see `close`
            self._writer = ipc.new_stream(self._file, COMBINED, options=self._options)
        writer: ipc.RecordBatchStreamWriter = self._writer
        writer.write_batch(batch)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """Yield all batches, and end writing. Uncompressed batches are not copied."""
        if self._writer is not None and self._file is not None:
            self._writer.close()
            self._file.flush()
            mapped = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
            yield from ipc.open_stream(pa.py_buffer(mapped))

    def close(self) -> None:
        """Release the disk space as soon as no uncopied batch refers to it."""
        self._writer = None
        if self._file is not None:
            self._file.close()
            self._file = None


class _SortedRun:
    """Unread remainder of a sorted run of loaded documents."""

    def __init__(self, rows: pa.RecordBatch) -> None:
        self.rest = rows

    def until(self, key: bytes) -> pa.RecordBatch:
        """Return the unread documents with keys up to and including `key`."""
        return self.rest[: _after(self.rest.column("key"), key)]


def _aligned(
    batch: pa.RecordBatch, runs: Iterable[_SortedRun], most: int
) -> Iterator[tuple[pa.Table, pa.Table]]:
    """Yield `batch` and the loaded documents of its keys, in parts of about `most` bytes.

    A part ends between two keys.
    """
    keys = batch.column("key")
    loaded_parts = [run.until(keys[-1].as_py()) for run in runs]
    middle = len(keys) // 2
    cut = _first(keys, middle) or _after(keys, keys[middle].as_py())
    if cut < len(keys) and batch.nbytes + sum(part.nbytes for part in loaded_parts) > most:
        yield from _aligned(batch[:cut], runs, most)
        yield from _aligned(batch[cut:], runs, most)
        return
    for run, part in zip(runs, loaded_parts, strict=True):
        run.rest = run.rest[len(part) :]
    yield pa.Table.from_batches([batch]), pa.Table.from_batches(loaded_parts, COMBINED)


def _first(keys: pa.Array, row: int) -> int:
    """Return the first row with the key of `row`."""
    return bisect_left(keys, keys[row].as_py(), hi=row, key=_VALUE)


def _after(keys: pa.Array, key: bytes) -> int:
    """Return the first row with a key above `key`."""
    return bisect_right(keys, key, hi=len(keys), key=_VALUE)
