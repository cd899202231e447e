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

from penstock.durable import RetryingBlob
from penstock.durable.cache import CachedBlob
from penstock.persist.batch import Batches, PartScan
from penstock.persist.lookup import written_rows
from penstock.persist.settings import Settings
from penstock.persist.state import CollectionState, SchemaVersion
from penstock.persist.store import open_store

__all__ = [
    "batches_of",
    "read_parts",
    "store_of",
    "stored_rows_of",
]

SETTINGS: Final = Settings(patience_ms=60_000, cache_bytes=0)
"""A task that cannot reach the store fails after a minute, and Spark tries it elsewhere."""

ROWS_AT_ONCE: Final = 1 << 16
"""How many rows are handed to Spark in one Arrow batch."""


def store_of(url: str) -> RetryingBlob:
    """The store of a storage location that this process opened."""
    return _store(url, os.getpid())


@lru_cache(maxsize=16)
def _store(url: str, _pid: int) -> RetryingBlob:
    return open_store(url, SETTINGS)


def batches_of(url: str) -> Batches:
    """The batches of a storage location, through a store that this process opened."""
    return _batches(url, os.getpid())


@lru_cache(maxsize=16)
def _batches(url: str, _pid: int) -> Batches:
    blob = store_of(url)
    return Batches(blob, CachedBlob(blob, bound_bytes=0), SETTINGS)


def read_parts(
    url: str, collection: CollectionState, part_scans: Iterable[PartScan], schema: SchemaVersion
) -> Iterator[pa.Table]:
    """The updates of each slice as rows of `schema`, every byte checked."""
    batches = batches_of(url)
    for each in part_scans:
        yield batches.part_rows(collection, each, schema)


def stored_rows_of(url: str, collection: CollectionState, keys: pa.Table) -> pa.Table:
    """The rows with `keys` of all that was written to a collection, added up, with `mz_diff`."""
    return written_rows(batches_of(url), collection, keys)
