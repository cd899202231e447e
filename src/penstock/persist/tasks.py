"""What Spark's tasks do with collections, in Python workers. Knows nothing of Spark.

A worker is a process that may be forked, reused for another job and killed at
any moment. So a store is opened by the process that uses it and kept for its
next task, a task keeps nothing else, and whatever it writes has a name of its
own: an attempt that fails, or that another attempt overtook, leaves garbage
under its staging id and nothing more.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from penstock.data import TIME, advance, from_ipc, negate, to_ipc
from penstock.durable import SteadyBlob
from penstock.durable.cache import CachedBlob
from penstock.persist.batch import Batches, Slice, together
from penstock.persist.compact import distinct, summed
from penstock.persist.lake import open_store
from penstock.persist.lookup import written_rows
from penstock.persist.ranges import cut, sample
from penstock.persist.settings import Settings
from penstock.persist.state import Batch, CollectionState, SchemaVersion, stored_columns_of

__all__ = [
    "batches_of",
    "cut_slices",
    "merge_range",
    "read_slices",
    "sample_slices",
    "store_of",
    "stored_rows_of",
    "write_staged",
]

SETTINGS: Final = Settings(patience_ms=60_000, cache_bytes=0)
"""A task that cannot reach the store fails after a minute, and Spark tries it elsewhere."""

ROWS_AT_ONCE: Final = 1 << 16
"""How many rows are handed to Spark in one Arrow batch."""

CHUNK_BYTES: Final = 16 << 20
"""How much of a range travels through Spark as one value."""


def store_of(url: str) -> SteadyBlob:
    """The store of a storage location that this process opened."""
    return _store(url, os.getpid())


@lru_cache(maxsize=16)
def _store(url: str, _pid: int) -> SteadyBlob:
    return open_store(url, SETTINGS)


def batches_of(url: str) -> Batches:
    """The batches of a storage location, through a store that this process opened."""
    return _batches(url, os.getpid())


@lru_cache(maxsize=16)
def _batches(url: str, _pid: int) -> Batches:
    blob = store_of(url)
    return Batches(blob, CachedBlob(blob, bound_bytes=0), SETTINGS)


def read_slices(
    url: str, collection: CollectionState, slices: Iterable[Slice], schema: SchemaVersion
) -> Iterator[pa.Table]:
    """The updates of each slice as rows of `schema`, every byte checked."""
    batches = batches_of(url)
    for each in slices:
        yield batches.slice_rows(collection, each, schema)


def stored_rows_of(url: str, collection: CollectionState, keys: pa.Table) -> pa.Table:
    """The rows with `keys` of all that was written to a collection, added up, with `mz_diff`."""
    return written_rows(batches_of(url), collection, keys)


def write_staged(
    url: str, staging: str, updates: Iterable[pa.Table], schema: int, *, part_bytes: int
) -> Batch | None:
    """Write updates, in stored form, as objects of about `part_bytes`; None if there are none."""
    batches = batches_of(url)
    return batches.build_as_they_come(updates, schema, staging, part_bytes=part_bytes)


# A merge by ranges (`ranges.py`): sample, then cut every input, then merge each range.


def sample_slices(
    url: str,
    collection: CollectionState,
    slices: Sequence[Slice],
    *,
    since: int,
    rows: int,
) -> tuple[int, pa.Table]:
    """How many updates there are in the slices, and a sample of what ranges are cut by."""
    updates = _advanced(url, collection, slices, since=since)
    return updates.num_rows, sample(updates, collection.schemas[-1].key, rows)


def cut_slices(
    url: str,
    collection: CollectionState,
    slices: Sequence[Slice],
    *,
    since: int,
    splitters: pa.Table,
    negated: bool = False,
) -> Iterator[tuple[int, bytes]]:
    """The updates of the slices, or what takes them back, as chunks with the number of a range."""
    updates = _advanced(url, collection, slices, since=since)
    if negated:
        updates = negate(updates)
    for number, rows in enumerate(cut(updates, splitters, collection.schemas[-1].key)):
        for chunk in _chunks(rows):
            yield number, to_ipc(chunk)


def merge_range(
    url: str,
    collection: CollectionState,
    chunks: Iterable[bytes],
    staging: str,
    *,
    since: int,
    part_bytes: int,
) -> tuple[Batch, bool | None] | None:
    """What all chunks of one range come to, written; None if they come to nothing.

    Also whether its rows at `since` are distinct; None if it has none there.
    """
    schema = collection.schemas[-1]
    stored = stored_columns_of(schema)
    tables = [from_ipc(chunk, stored) for chunk in chunks]
    updates = summed(pa.concat_tables(tables), schema.key, since=since)
    if updates.num_rows == 0:
        return None
    rows = max(1, int(updates.num_rows * part_bytes / max(updates.nbytes, 1)))
    batches, version = batches_of(url), len(collection.schemas) - 1
    written = together(
        [
            batches.build_stored(updates.slice(start, rows), version, staging)
            for start in range(0, updates.num_rows, rows)
        ]
    )
    settled = pc.any(pc.equal(updates.column(TIME), since)).as_py()
    return written, distinct(updates, schema.key, since=since) if settled else None


def _advanced(
    url: str, collection: CollectionState, slices: Sequence[Slice], *, since: int
) -> pa.Table:
    """The updates of the slices in the newest schema, their times brought up to `since`."""
    return advance(
        pa.concat_tables(read_slices(url, collection, slices, collection.schemas[-1])), since
    )


def _chunks(rows: pa.Table) -> Iterator[pa.Table]:
    """The rows in pieces of at most `CHUNK_BYTES`, or of one row."""
    if rows.num_rows > 1 and rows.nbytes > CHUNK_BYTES:
        half = rows.num_rows // 2
        yield from _chunks(rows.slice(0, half))
        yield from _chunks(rows.slice(half))
    elif rows.num_rows:
        yield rows
