"""First copies, and tables read again: each piece straight into files of a collection.

What is small is read by threads of this process, what is large by Spark's tasks;
which of the two is decided here, by size. Either way a piece writes Parquet
objects under a staging id, and nothing is seen of them until they are linked.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Final, Protocol

import pyarrow as pa

from penstock import persist
from penstock.errors import InternalError, TransientError, UsageError
from penstock.ingest.scanning import Scanned, ScanTask
from penstock.persist.append.shared_storage_check import proof_left
from penstock.persist.append.task import Share, Written, all_of, gathered
from penstock.persist.collection_change import Grow, with_growth
from penstock.persist.merge.merger import BigMerges
from penstock.persist.schema_check import check_name, schema_version
from penstock.persist.state import Batch, CollectionState, SchemaVersion
from penstock.sources.source import Piece, Scan

__all__ = ["Copy", "Loader", "ManyTasks"]

SPARK_BYTES: Final = 256 << 20
"""More bytes than this are worth a Spark job."""


class Watch(Protocol):
    """Whoever waits for pieces to be read."""

    def counts(self, rows: Callable[[], int]) -> None:
        """Take what tells, while it lasts, how many rows are written about."""
        ...

    def wanted(self) -> bool:
        """Whether what is being read is still wanted."""
        ...


class ManyTasks(Protocol):
    """Does what is too much for one process by tasks of a cluster; `ingest/spark.py` makes one."""

    def read(self, share: Share, pieces: Sequence[Piece], watch: Watch) -> list[Written]:
        """Read all pieces and write what they hold, as long as it is wanted.

        Raises:
            TransientError: what runs the tasks failed. What a task found is in what it wrote.
        """
        ...

    def scan(self, task: ScanTask, watch: Watch) -> list[Scanned]:
        """Read a range by a format of Spark's, and have tasks make of it what the scan says.

        Raises:
            TransientError: what runs the tasks failed. What a task found is in what it told.
        """
        ...

    def merges(self, url: str) -> BigMerges:
        """What merges and compares collections of a storage location."""
        ...


class Copy:
    """Pieces on their way into files."""

    def __init__(self, pool: ThreadPoolExecutor | None, stop: threading.Event) -> None:
        """Reading is given up when `stop` is set."""
        self._pool = pool
        self._stop = stop
        self._abandoned = False
        self._rows = 0
        self._elsewhere: Callable[[], int] | None = None
        self._ids = ExitStack()
        self._outcome: Future[persist.Staged] = Future()

    def done(self) -> bool:
        """Whether all is read, or has failed."""
        return self._outcome.done()

    def rows(self) -> int:
        """How many rows there were in the pieces that are read to the end, about."""
        if self._elsewhere is not None and not self.done():
            return self._elsewhere()
        return self._rows

    def abandon(self) -> None:
        """It is not wanted any more: nothing more is read, and its files go."""
        self._abandoned = True
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
        self,
        client: persist.Client,
        share: Callable[[str], Share],
        pieces: Sequence[Piece],
        many: ManyTasks | None,
    ) -> None:
        """Start reading; without a pool, read to the end."""
        staging = self._ids.enter_context(client.staging())
        if self._pool is None:
            self._read(share(staging), pieces, many)
        else:
            self._pool.submit(self._read, share(staging), pieces, many)

    def _read(self, share: Share, pieces: Sequence[Piece], many: ManyTasks | None) -> None:
        try:
            if many is not None:
                with proof_left(share.url, share.staging) as proof:
                    written = many.read(replace(share, proof=proof), pieces, self)
                batch = gathered(written)
            else:
                batch = all_of([self._staged(share, piece) for piece in pieces])
        except BaseException as error:  # noqa: BLE001 - the thread's door: whoever waits must hear
            self._outcome.set_exception(error)
        else:
            if batch is not None:
                self._rows = batch.rows
            self._outcome.set_result(persist.Staged(batch))

    def _staged(self, share: Share, piece: Piece) -> Batch | None:
        # What goes wrong is kept, and with it all that it was amid: a connection would stay open.
        with closing(piece.read(self._stop)) as rows:
            batch = share.stage(self._wanted(rows))
        self._rows += 0 if batch is None else batch.rows
        return batch

    def _wanted(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if not self.wanted():
                raise TransientError("reading was given up")
            yield batch

    def counts(self, rows: Callable[[], int]) -> None:
        """Take what tells how many rows are written about."""
        self._elsewhere = rows

    def wanted(self) -> bool:
        """Whether what is being read is still wanted."""
        return not (self._abandoned or self._stop.is_set())


class Loader:
    """Starts first copies."""

    def __init__(
        self,
        client: persist.Client,
        source: str,
        *,
        many: ManyTasks | None,
        spark_bytes: int = SPARK_BYTES,
        stop: threading.Event | None = None,
    ) -> None:
        """What is being read is given up when `stop` is set."""
        self._client = client
        self._source = source
        self._many = many
        self._spark_bytes = spark_bytes
        self._stop = stop or threading.Event()
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="copy")

    def check(self, collection: str, schema: pa.Schema, key: Sequence[str]) -> None:
        """Check that `make` can create the collection.

        Raises:
            UsageError: its name or its schema cannot be stored.
        """
        check_name(collection, self._source)
        schema_version(collection, None, None, schema, key)

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
        return self._load(collection, pieces, size, (), self._pool)

    def read_again(
        self, collection: str, pieces: Sequence[Piece], *, size: int, growing: Sequence[Grow]
    ) -> Copy:
        """Read all pieces to the end, in the schema that `growing` will bring.

        Not by the threads for first copies, which may be at it for hours.
        """
        return self._load(collection, pieces, size, growing, None)

    def scan(
        self, scan: Scan, into: Mapping[str, str], staging: str, *, time: int
    ) -> list[Scanned]:
        """Read a range by Spark's tasks into files under `staging`, to the end.

        `into` tells by output for which collection they are.

        Raises:
            PenstockError: what a task said was wrong.
            TransientError: Spark failed.
            UsageError: there is no Spark.
        """
        if self._many is None:
            raise UsageError(
                f'source "{self._source}" is read by Spark, and there is none',
                hint="Give one: run it with penstock up or penstock ingest, which start it.",
            )
        watch = Copy(None, self._stop)
        with ExitStack() as stack:
            found = {
                output: stack.enter_context(self._client.collection(name).kept_files())
                for output, name in into.items()
            }
            proof = stack.enter_context(proof_left(self._client.url, staging))
            shares = {
                output: replace(
                    # What is put aside is not seen, and its times need not be the tick's.
                    self._share(state, state.schemas, staging, max(time, state.upper)),
                    proof=proof,
                )
                for output, state in found.items()
            }
            told = self._many.scan(ScanTask(scan, shares, found), watch)
        for each in told:
            if each.error is not None:
                raise each.error
        return told

    def _share(
        self, collection: CollectionState, schemas: Sequence[SchemaVersion], staging: str, time: int
    ) -> Share:
        return Share(
            url=self._client.url,
            staging=staging,
            collection=collection.name,
            schema=len(schemas) - 1,
            columns=schemas[-1].columns,
            time=time,
            part_bytes=persist.Settings().part_bytes,
        )

    def _load(
        self,
        collection: str,
        pieces: Sequence[Piece],
        size: int,
        growing: Sequence[Grow],
        pool: ThreadPoolExecutor | None,
    ) -> Copy:
        found = self._client.collection(collection)
        schemas = with_growth(found.state, growing).schemas

        copy = Copy(pool, self._stop)
        copy.begin(
            self._client,
            lambda staging: self._share(found.state, schemas, staging, time=0),
            pieces,
            self._many if size > self._spark_bytes else None,
        )
        return copy

    def close(self) -> None:
        """Wait for what is being read."""
        self._pool.shutdown(cancel_futures=True)
