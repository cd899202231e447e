"""Initial snapshots, and tables read again: each split directly into files of a collection.

Threads of this process read small tables, Spark tasks large ones; `SPARK_BYTES` decides.
Both write Parquet objects under a staging id, which are invisible until they are linked.
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
from penstock.ingest.scan_task import Scanned, ScanTask
from penstock.persist.append.shared_storage_check import marker_placed
from penstock.persist.append.task import Share, Written, all_of, gathered
from penstock.persist.collection_change import Grow, with_growth
from penstock.persist.merge.merger import BigMerges
from penstock.persist.schema_check import check_name, schema_version
from penstock.persist.state import Batch, CollectionState, SchemaVersion
from penstock.sources.context import Scan
from penstock.sources.source import Split

__all__ = ["IngestJobs", "SnapshotLoad", "SnapshotLoader"]

SPARK_BYTES: Final = 256 << 20
"""Tables beyond this size are read by a Spark job."""


class LoadWatch(Protocol):
    """Observer of a running read."""

    def set_row_count(self, rows: Callable[[], int]) -> None:
        """Set the function that returns the approximate number of rows written so far."""
        ...

    def is_active(self) -> bool:
        """Return whether the read should continue."""
        ...


class IngestJobs(Protocol):
    """Jobs for work that is too large for one process; `ingest/spark.py` implements them."""

    def read(self, share: Share, splits: Sequence[Split], watch: LoadWatch) -> list[Written]:
        """Read all splits and write their rows, until `watch` is not active any more.

        Raises:
            TransientError: the engine failed. Errors of the data are in the results.
        """
        ...

    def scan(self, task: ScanTask, watch: LoadWatch) -> list[Scanned]:
        """Read a range with a Spark format and process it as the scan defines.

        Raises:
            TransientError: the engine failed. Errors of the data are in the results.
        """
        ...

    def merges(self, url: str) -> BigMerges:
        """Return the jobs that merge and compare collections of a storage location."""
        ...


class SnapshotLoad:
    """Splits that are being read into files."""

    def __init__(self, pool: ThreadPoolExecutor | None, stop: threading.Event) -> None:
        """Create a load that is cancelled when `stop` is set."""
        self._pool = pool
        self._stop = stop
        self._abandoned = False
        self._rows = 0
        self._remote_rows: Callable[[], int] | None = None
        self._ids = ExitStack()
        self._outcome: Future[persist.Staged] = Future()

    def done(self) -> bool:
        """Return whether all splits are read, or one has failed."""
        return self._outcome.done()

    def rows(self) -> int:
        """Return the approximate number of rows in the splits that are complete."""
        if self._remote_rows is not None and not self.done():
            return self._remote_rows()
        return self._rows

    def abandon(self) -> None:
        """Cancel the load and delete its files."""
        self._abandoned = True
        self._outcome.add_done_callback(lambda _: self.release())

    def result(self) -> "SnapshotLoad":
        """Wait for completion and return this load; raise its error."""
        self._outcome.result()
        return self

    @property
    def files(self) -> persist.Staged:
        """Return the files to link."""
        return self._outcome.result()

    def release(self) -> None:
        """Close the staging id, after the files are linked or given up."""
        self._ids.close()

    def begin(
        self,
        client: persist.Client,
        share: Callable[[str], Share],
        splits: Sequence[Split],
        jobs: IngestJobs | None,
    ) -> None:
        """Start reading; without a pool, read everything now."""
        staging = self._ids.enter_context(client.staging())
        if self._pool is None:
            self._read(share(staging), splits, jobs)
        else:
            self._pool.submit(self._read, share(staging), splits, jobs)

    def _read(self, share: Share, splits: Sequence[Split], jobs: IngestJobs | None) -> None:
        try:
            if jobs is not None:
                with marker_placed(share.url, share.staging) as marker:
                    written = jobs.read(replace(share, marker=marker), splits, self)
                batch = gathered(written)
            else:
                batch = all_of([self._staged(share, split) for split in splits])
        except BaseException as error:  # noqa: BLE001 - thread boundary: `result` raises it
            self._outcome.set_exception(error)
        else:
            if batch is not None:
                self._rows = batch.rows
            self._outcome.set_result(persist.Staged(batch))

    def _staged(self, share: Share, split: Split) -> Batch | None:
        # An error that is stored references its frames: without closing, the connection stays open.
        with closing(split.read(self._stop)) as rows:
            batch = share.stage(self._while_active(rows))
        self._rows += 0 if batch is None else batch.rows
        return batch

    def _while_active(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if not self.is_active():
                raise TransientError("snapshot load was cancelled")
            yield batch

    def set_row_count(self, rows: Callable[[], int]) -> None:
        """Set the function that returns the approximate number of rows written so far."""
        self._remote_rows = rows

    def is_active(self) -> bool:
        """Return whether the read should continue."""
        return not (self._abandoned or self._stop.is_set())


class SnapshotLoader:
    """Starts initial snapshots; see `penstock.sources.context.SnapshotLoader`."""

    def __init__(
        self,
        client: persist.Client,
        source: str,
        *,
        jobs: IngestJobs | None,
        spark_bytes: int = SPARK_BYTES,
        stop: threading.Event | None = None,
    ) -> None:
        """Create a loader that cancels its loads when `stop` is set."""
        self._client = client
        self._source = source
        self._jobs = jobs
        self._spark_bytes = spark_bytes
        self._stop = stop or threading.Event()
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="copy")

    def check(self, collection: str, schema: pa.Schema, key: Sequence[str]) -> None:
        """Check that `make` can create the collection.

        Raises:
            UsageError: the name or the schema cannot be stored.
        """
        check_name(collection, self._source)
        schema_version(collection, None, None, schema, key)

    def create(self, collection: str, schema: pa.Schema, key: Sequence[str]) -> None:
        """Create a collection. It is not visible before a tick begins it."""
        self._client.create_or_load(collection, schema=schema, key_columns=key, owner=self._source)

    def drop_collection(self, collection: str) -> None:
        """Drop a collection that has never been visible."""
        state = self._client.state.named(collection)
        if state is not None and state.upper:
            raise InternalError(f'could not drop collection "{collection}": it is visible')
        self._client.destroy(collection)

    def load(self, collection: str, splits: Sequence[Split], *, size: int) -> SnapshotLoad:
        """Start reading all splits, about `size` bytes in total."""
        return self._load(collection, splits, size, (), self._pool)

    def read_again(
        self, collection: str, splits: Sequence[Split], *, size: int, growing: Sequence[Grow]
    ) -> SnapshotLoad:
        """Read all splits now, in the schema after `growing`.

        The threads for initial snapshots are not used: they may be busy for hours.
        """
        return self._load(collection, splits, size, growing, None)

    def scan(
        self, scan: Scan, into: Mapping[str, str], staging: str, *, time: int
    ) -> list[Scanned]:
        """Read a range with Spark tasks into files under `staging`.

        `into` maps each output to its collection.

        Raises:
            PenstockError: a task reported an error of the data.
            TransientError: Spark failed.
            UsageError: there is no Spark session.
        """
        if self._jobs is None:
            raise UsageError(
                f'source "{self._source}" needs a Spark session',
                hint="Run the source with penstock up or penstock ingest, which start Spark.",
            )
        watch = SnapshotLoad(None, self._stop)
        with ExitStack() as stack:
            states = {
                output: stack.enter_context(self._client.collection(name).retained_files())
                for output, name in into.items()
            }
            marker = stack.enter_context(marker_placed(self._client.url, staging))
            shares = {
                output: replace(
                    # Side rows are hidden, so their times may differ from the tick's.
                    self._share(state, state.schemas, staging, max(time, state.upper)),
                    marker=marker,
                )
                for output, state in states.items()
            }
            scanned = self._jobs.scan(ScanTask(scan, shares, states), watch)
        for task in scanned:
            if task.error is not None:
                raise task.error
        return scanned

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
        splits: Sequence[Split],
        size: int,
        growing: Sequence[Grow],
        pool: ThreadPoolExecutor | None,
    ) -> SnapshotLoad:
        state = self._client.collection(collection).state
        schemas = with_growth(state, growing).schemas

        copy = SnapshotLoad(pool, self._stop)
        copy.begin(
            self._client,
            lambda staging: self._share(state, schemas, staging, time=0),
            splits,
            self._jobs if size > self._spark_bytes else None,
        )
        return copy

    def close(self) -> None:
        """Wait for running reads."""
        self._pool.shutdown(cancel_futures=True)
