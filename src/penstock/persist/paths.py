"""What the objects of a storage location are called.

log/<number>                    entries, see durable/log.py
mark/floor-<n>  mark/head-<n>   the log's two ends
rollup/<number>                 the state after that many entries
batch/<staging id>/<name>.parquet
hold/<hold id>/<version>
probe/…                         what was learned about the store
"""

from typing import Final

__all__ = ["BATCHES", "HOLDS", "ROLLUPS", "batch_key", "hold_key", "number_of", "rollup_key"]

ROLLUPS: Final = "rollup/"
BATCHES: Final = "batch/"
HOLDS: Final = "hold/"


def rollup_key(seqno: int) -> str:
    """The rollup of the state after `seqno` entries."""
    return f"{ROLLUPS}{seqno:020d}"


def batch_key(staging: str, name: str) -> str:
    """A Parquet file written under a staging id."""
    return f"{BATCHES}{staging}/{name}.parquet"


def hold_key(hold: str, version: int) -> str:
    """One version of a hold; the newest counts."""
    return f"{HOLDS}{hold}/{version:020d}"


def number_of(key: str) -> int:
    """The number a key ends with."""
    return int(key.rpartition("/")[2])
