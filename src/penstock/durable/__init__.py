"""Durable storage: objects by key (`Blob`), and numbered entries (`Log`).

`open_blob` opens a location by its URL. `RetryingBlob` retries transient errors. `CachedBlob`
caches write-once objects and verifies them at every read. `probe` checks a location before the
first write.
"""

from penstock.durable.blob import Blob, GetBlob, Listed
from penstock.durable.cache import CachedBlob, CacheStatistics, checksum_of
from penstock.durable.location import children, disk_error, join, normal, open_blob
from penstock.durable.log import Log, Marks
from penstock.durable.retrying_blob import Failing, RetryingBlob, StoreStatistics

__all__ = [
    "Blob",
    "CacheStatistics",
    "CachedBlob",
    "Failing",
    "GetBlob",
    "Listed",
    "Log",
    "Marks",
    "RetryingBlob",
    "StoreStatistics",
    "checksum_of",
    "children",
    "disk_error",
    "join",
    "normal",
    "open_blob",
]
