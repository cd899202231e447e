"""Keys of the objects of a storage location.

    log/<folder>/<number>           entries, see durable/log.py
    mark/floor-<n>  mark/head-<n>   both ends of the log
    rollup/<number>                 the state after that many entries
    batch/<staging id>/<name>.parquet
    batch/<staging id>/<name>.proof  see append/shared_storage_check.py
    hold/<hold id>=<version>
    probe/…                         results of the create-once probe

Objects with other keys belong to file managers or backups. They are neither read nor
deleted.
"""

import re
from typing import Final

__all__ = [
    "BATCHES",
    "HOLDS",
    "ROLLUPS",
    "batch_key",
    "hold_key",
    "hold_of",
    "hold_prefix",
    "marker_key",
    "number_of",
    "rollup_key",
    "staging_of",
]

ROLLUPS: Final = "rollup/"
BATCHES: Final = "batch/"
HOLDS: Final = "hold/"


def rollup_key(seqno: int) -> str:
    """Return the key of the rollup of the state after `seqno` entries."""
    return f"{ROLLUPS}{seqno:020d}"


def batch_key(staging: str, name: str) -> str:
    """Return the key of a Parquet file under a staging id."""
    return f"{BATCHES}{staging}/{name}.parquet"


def marker_key(staging: str, name: str) -> str:
    """Return the key of a shared-storage marker under a staging id."""
    return f"{BATCHES}{staging}/{name}.proof"


def hold_key(hold: str, version: int) -> str:
    """Return the key of one version of a hold; the newest version counts."""
    return f"{hold_prefix(hold)}{version:020d}"


def hold_prefix(hold: str) -> str:
    """Return the common prefix of the keys of all versions of a hold."""
    return f"{HOLDS}{hold}="


def number_of(key: str) -> int | None:
    """Return the number of a rollup, or None for any other key."""
    found = _ROLLUP.fullmatch(key)
    return None if found is None else int(found[1])


def hold_of(key: str) -> tuple[str, int] | None:
    """Return id and version of a hold, or None for any other key."""
    found = _HOLD.fullmatch(key)
    return None if found is None else (found[1], int(found[2]))


def staging_of(key: str) -> str | None:
    """Return the staging id of a file or marker, or None for any other key."""
    found = _BATCH.fullmatch(key)
    return None if found is None else found[1]


_ROLLUP: Final = re.compile(rf"{ROLLUPS}([0-9]{{20}})")
_HOLD: Final = re.compile(rf"{HOLDS}([^/=]+)=([0-9]{{20}})")
_BATCH: Final = re.compile(rf"{BATCHES}([0-9]+-[0-9]+)/[^/]+\.(?:parquet|proof)")
