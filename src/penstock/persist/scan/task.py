"""Reads of collections by Spark tasks, in Python workers. Imports no Spark.

A worker is a process that may be forked, reused for another job and killed at any time.
Therefore the process that uses a store opens it, and keeps it for its next Spark task. A
Spark task keeps nothing else. Every object that it writes has a unique name. A failed or
superseded attempt leaves only garbage under its staging id.
"""

import os
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Final

import pyarrow as pa

from penstock.durable import CachedBlob, RetryingBlob
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
"""Settings of Spark tasks: without access to the store, a task fails after a minute for a retry."""

ROWS_AT_ONCE: Final = 1 << 16
"""Number of rows in one Arrow batch for Spark."""


def store_of(url: str) -> RetryingBlob:
    """Return the store of a storage location, opened by this process."""
    return _store(url, os.getpid())


@lru_cache(maxsize=16)
def _store(url: str, _pid: int) -> RetryingBlob:
    return open_store(url, SETTINGS)


def batches_of(url: str) -> Batches:
    """Return the batches of a storage location, through a store opened by this process."""
    return _batches(url, os.getpid())


@lru_cache(maxsize=16)
def _batches(url: str, _pid: int) -> Batches:
    blob = store_of(url)
    return Batches(blob, CachedBlob(blob, bound_bytes=0), SETTINGS)


def read_parts(
    url: str, collection: CollectionState, part_scans: Iterable[PartScan], schema: SchemaVersion
) -> Iterator[pa.Table]:
    """Yield the updates of each part scan as rows of `schema`, with every byte verified."""
    batches = batches_of(url)
    for each in part_scans:
        yield batches.part_rows(collection, each, schema)


def stored_rows_of(url: str, collection: CollectionState, keys: pa.Table) -> pa.Table:
    """Return the rows with `keys` among all written updates, consolidated, with `mz_diff`."""
    return written_rows(batches_of(url), collection, keys)
