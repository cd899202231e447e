"""What the objects of a storage location are called.

    log/<folder>/<number>           entries, see durable/log.py
    mark/floor-<n>  mark/head-<n>   the log's two ends
    rollup/<number>                 the state after that many entries
    batch/<staging id>/<name>.parquet
    batch/<staging id>/<name>.proof  see writing/proof.py
    hold/<hold id>=<version>
    probe/…                         what was learned about the store

What is called otherwise is not ours: somebody's file manager or backup put it
there, and it is neither read nor deleted.
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
    """The rollup of the state after `seqno` entries."""
    return f"{ROLLUPS}{seqno:020d}"


def batch_key(staging: str, name: str) -> str:
    """A Parquet file written under a staging id."""
    return f"{BATCHES}{staging}/{name}.parquet"


def marker_key(staging: str, name: str) -> str:
    """What shows tasks that files under a staging id will be found."""
    return f"{BATCHES}{staging}/{name}.proof"


def hold_key(hold: str, version: int) -> str:
    """One version of a hold; the newest counts."""
    return f"{hold_prefix(hold)}{version:020d}"


def hold_prefix(hold: str) -> str:
    """What the keys of all versions of a hold begin with."""
    return f"{HOLDS}{hold}="


def number_of(key: str) -> int | None:
    """The number of a rollup, or None if `key` is not that of one."""
    found = _ROLLUP.fullmatch(key)
    return None if found is None else int(found[1])


def hold_of(key: str) -> tuple[str, int] | None:
    """The id and version of a hold, or None if `key` is not that of one."""
    found = _HOLD.fullmatch(key)
    return None if found is None else (found[1], int(found[2]))


def staging_of(key: str) -> str | None:
    """The staging id a file or a proof was written under, or None if `key` is not that of one."""
    found = _BATCH.fullmatch(key)
    return None if found is None else found[1]


_ROLLUP: Final = re.compile(rf"{ROLLUPS}([0-9]{{20}})")
_HOLD: Final = re.compile(rf"{HOLDS}([^/=]+)=([0-9]{{20}})")
_BATCH: Final = re.compile(rf"{BATCHES}([0-9]+-[0-9]+)/[^/]+\.(?:parquet|proof)")
