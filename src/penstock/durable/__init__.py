"""Bytes that survive: keys to bytes (`Blob`), and numbered entries on top (`Log`).

`open_blob` opens a location by its URL; `RetryingBlob` retries when a store
fails; `CachedBlob` reads what is written once and checks it every time. A
location is probed (`probe.py`) before it is first written to.
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
