"""What Spark's tasks do with collections, in Python workers. Knows nothing of Spark.

A worker is a process that may be forked, reused for another job and killed at
any moment. So a store is opened by the process that uses it and kept for its
next task, a task keeps nothing else, and whatever it writes has a name of its
own: an attempt that fails, or that another attempt overtook, leaves garbage
under its staging id and nothing more.
"""

import os
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Final

import pyarrow as pa

from penstock.durable.cache import CachedBlob
from penstock.persist.batch import Batches, Slice, together
from penstock.persist.lake import open_store
from penstock.persist.settings import Settings
from penstock.persist.state import Batch, CollectionState, SchemaVersion

__all__ = ["batches_of", "read_slices", "write_staged"]

SETTINGS: Final = Settings(patience_ms=60_000, cache_bytes=0)
"""A task that cannot reach the store fails after a minute, and Spark tries it elsewhere."""

ROWS_AT_ONCE: Final = 1 << 16
"""How many rows are handed to Spark in one Arrow batch."""


def batches_of(url: str) -> Batches:
    """The batches of a storage location, through a store that this process opened."""
    return _batches(url, os.getpid())


@lru_cache(maxsize=16)
def _batches(url: str, _pid: int) -> Batches:
    blob = open_store(url, SETTINGS)
    return Batches(blob, CachedBlob(blob, bound_bytes=0), SETTINGS)


def read_slices(
    url: str, collection: CollectionState, slices: Iterable[Slice], schema: SchemaVersion
) -> Iterator[pa.Table]:
    """The updates of each slice as rows of `schema`, every byte checked."""
    batches = batches_of(url)
    for each in slices:
        yield batches.slice_rows(collection, each, schema)


def write_staged(
    url: str, staging: str, updates: Iterable[pa.Table], schema: int, *, part_bytes: int
) -> Batch | None:
    """Write updates, in stored form, as objects of about `part_bytes`; None if there are none."""
    batches = batches_of(url)
    written: list[Batch] = []
    pending: list[pa.Table] = []
    for table in updates:
        if table.num_rows:
            pending.append(table)
        if sum(each.nbytes for each in pending) >= part_bytes:
            written.append(batches.build_stored(pa.concat_tables(pending), schema, staging))
            pending = []
    if pending:
        written.append(batches.build_stored(pa.concat_tables(pending), schema, staging))
    return together(written) if written else None
