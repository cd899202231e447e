"""Durable, definite, named collections.

    import penstock.persist as persist

    with persist.open("file:./data", writer="laptop-1") as client:
        words = client.create_or_load("words", key=persist.TEXT, value=persist.UNIT)
        words.compare_and_append([(("hello", None), 1, +1)], 0, 2)
        words.snapshot(as_of=1)

A collection is described by `[since, upper)`: readable from `since`, complete
below `upper`, and the same at every reading in between.
"""

from penstock.data import BIGINT, BYTES, INT64, JSON, TEXT, UNIT, Codec, UserCodec
from penstock.persist.client import Client, Unsealed, attach, open
from penstock.persist.collection import AppendTo, Collection
from penstock.persist.collection_change import Begin, Fail, Grow, Recover, Replace, WriteTo
from penstock.persist.errors import (
    AlreadyFailed,
    Closed,
    CollectionErrored,
    CollectionMissing,
    CollectionReplaced,
    HoldLost,
    LockHeld,
    NotYetComplete,
    SinceError,
)
from penstock.persist.holds import DurableHold
from penstock.persist.input_validation import Staged
from penstock.persist.lock import LockHandoff, release
from penstock.persist.read import Changes, Listener, Snapshot
from penstock.persist.settings import Settings
from penstock.persist.state import END, StoredError
from penstock.persist.write import Allowed, Appended, UpperMismatch

__all__ = [
    "BIGINT",
    "BYTES",
    "END",
    "INT64",
    "JSON",
    "TEXT",
    "UNIT",
    "Allowed",
    "AlreadyFailed",
    "AppendTo",
    "Appended",
    "Begin",
    "Changes",
    "Client",
    "Closed",
    "Codec",
    "Collection",
    "CollectionErrored",
    "CollectionMissing",
    "CollectionReplaced",
    "DurableHold",
    "Fail",
    "Grow",
    "HoldLost",
    "Listener",
    "LockHandoff",
    "LockHeld",
    "NotYetComplete",
    "Recover",
    "Replace",
    "Settings",
    "SinceError",
    "Snapshot",
    "Staged",
    "StoredError",
    "Unsealed",
    "UpperMismatch",
    "UserCodec",
    "WriteTo",
    "attach",
    "open",
    "release",
]
