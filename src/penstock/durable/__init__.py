"""Durable storage: objects by key (`Blob`), and numbered entries (`Log`).

`open_blob` opens a location by its URL. `RetryingBlob` retries transient errors. `CachedBlob`
caches write-once objects and verifies them at every read. `probe_location` checks a location
before the first write.
"""

from penstock.durable.blob import Blob, GetBlob, Listed
from penstock.durable.cache import CachedBlob, CacheStatistics, checksum_of
from penstock.durable.disk import Disk, FolderEntry
from penstock.durable.location import children, disk_error, join, normal, open_blob
from penstock.durable.log import Log, Marks, entry_key
from penstock.durable.probe import PASSED, probe_location
from penstock.durable.process import ProcessIdentity, identify, is_alive, is_dead, start_ticks
from penstock.durable.retrying_blob import Failing, RetryingBlob, StoreStatistics

__all__ = [
    "PASSED",
    "Blob",
    "CacheStatistics",
    "CachedBlob",
    "Disk",
    "Failing",
    "FolderEntry",
    "GetBlob",
    "Listed",
    "Log",
    "Marks",
    "ProcessIdentity",
    "RetryingBlob",
    "StoreStatistics",
    "checksum_of",
    "children",
    "disk_error",
    "entry_key",
    "identify",
    "is_alive",
    "is_dead",
    "join",
    "normal",
    "open_blob",
    "probe_location",
    "start_ticks",
]
