"""First copies: pieces read in parallel, each straight into files of a collection.

A small copy is read by threads of this process, a large one by Spark's tasks;
which of the two is decided here, by size. Either way a piece writes Parquet
objects under a staging id, and nothing is seen of them until they are linked.
"""

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Final, Protocol

import pyarrow as pa

from penstock import persist
from penstock.errors import InternalError
from penstock.persist.writing.proof import proof_left
from penstock.persist.writing.task import Share, Written, gathered
from penstock.sources.source import Piece

__all__ = ["Copy", "Loader", "ManyTasks"]

SPARK_BYTES: Final = 256 << 20
"""Copies of more bytes than this are worth a Spark job."""


class ManyTasks(Protocol):
    """Reads pieces by tasks of a cluster; `ingest/spark.py` makes one."""

    def __call__(self, share: Share, pieces: Sequence[Piece]) -> list[Written]:
        """Read all pieces and write what they hold."""
        ...


class Copy:
    """A first copy on its way into files."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._rows = 0
        self._ids = ExitStack()
        self._outcome: Future[persist.Staged] = Future()

    def done(self) -> bool:
        """Whether all is read, or has failed."""
        return self._outcome.done()

    def rows(self) -> int:
        """How many rows are read so far."""
        return self._rows

    def abandon(self) -> None:
        """It is not wanted any more: its files go when they are all written."""
        self._outcome.add_done_callback(lambda _: self.let_go())

    def result(self) -> "Copy":
        """Itself, once it is complete; raises what went wrong."""
        self._outcome.result()
        return self

    @property
    def files(self) -> persist.Staged:
        """What is to be linked."""
        return self._outcome.result()

    def let_go(self) -> None:
        """Its files are linked, or never will be."""
        self._ids.close()

    def begin(
        self, client: persist.Client, share: Any, pieces: Sequence[Piece], many: ManyTasks | None
    ) -> None:
        """Start reading."""
        staging = self._ids.enter_context(client.staging())
        self._pool.submit(self._read, share(staging), pieces, many)

    def _read(self, share: Share, pieces: Sequence[Piece], many: ManyTasks | None) -> None:
        try:
            if many is not None:
                with proof_left(share.url, share.staging) as proof:
                    written = many(replace(share, proof=proof), pieces)
            else:
                written = [share.write(self._counted(piece.read())) for piece in pieces]
            batch = gathered(written)
        except BaseException as error:  # noqa: BLE001 - the thread's door: whoever waits must hear
            self._outcome.set_exception(error)
        else:
            if batch is not None:
                self._rows = batch.rows
            self._outcome.set_result(persist.Staged(batch))

    def _counted(self, batches: Iterable[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
        for batch in batches:
            with self._lock:
                self._rows += batch.num_rows
            yield batch


class Loader:
    """Starts first copies."""

    def __init__(
        self,
        client: persist.Client,
        source: str,
        *,
        many: ManyTasks | None,
        spark_bytes: int = SPARK_BYTES,
    ) -> None:
        self._client = client
        self._source = source
        self._many = many
        self._spark_bytes = spark_bytes
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="copy")

    def make(self, collection: str, schema: pa.Schema, key: Sequence[str]) -> None:
        """Let there be a collection; it is not seen before it begins."""
        self._client.create_or_load(collection, schema=schema, key_columns=key, owner=self._source)

    def unmake(self, collection: str) -> None:
        """Let there not be a collection that has not been seen yet."""
        found = self._client.state.named(collection)
        if found is not None and found.upper:
            raise InternalError(f'collection "{collection}" has been seen, and is not unmade')
        self._client.destroy(collection)

    def load(self, collection: str, pieces: Sequence[Piece], *, size: int) -> Copy:
        """Begin to read all pieces, about `size` bytes in total."""
        found = self._client.collection(collection)
        schemas = found.state.schemas

        def share(staging: str) -> Share:
            return Share(
                url=self._client.url,
                staging=staging,
                collection=collection,
                schema=len(schemas) - 1,
                columns=schemas[-1].columns,
                time=0,
                part_bytes=persist.Settings().part_bytes,
            )

        copy = Copy(self._pool)
        copy.begin(self._client, share, pieces, self._many if size > self._spark_bytes else None)
        return copy

    def close(self) -> None:
        """Wait for what is being read."""
        self._pool.shutdown(cancel_futures=True)
