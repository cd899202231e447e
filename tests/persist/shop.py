"""Clients for tests: no background work, no notifier, manual clock."""

import random
from typing import Any

import pyarrow as pa

from penstock.durable.memory import MemoryBlob, Shelf
from penstock.durable.retrying_blob import RetryingBlob
from penstock.persist import Changes, Client, Listener, Settings
from penstock.testing.clocks import ManualClock

SCHEMA = pa.schema([("k", pa.string()), ("n", pa.int32())])


def by_hand(**changed: Any) -> Settings:
    """Return settings that do background work only when a test requests it."""
    chosen: dict[str, Any] = {
        "background": False,
        "notify": "",
        "young_ms": 0,
        "proof_ms": 0,
        "upkeep_ms": 0,
        "settle_ms": 0,
        "clock": ManualClock(),
        "chance": random.Random(7),
    }
    return Settings(**(chosen | changed))


def opened(
    shelf: Shelf,
    *,
    writer: str | None = "w",
    hold: bool = True,
    wrap: Any = lambda blob: blob,
    **changed: Any,
) -> Client:
    """Open a client on the objects of `shelf`; `wrap` can insert a store between the two."""
    settings = by_hand(**changed)
    blob = wrap(MemoryBlob(shelf, name="memory:shop", clock=settings.clock))
    steady = RetryingBlob(blob, settings.clock, settings.chance, patience_ms=settings.patience_ms)
    return Client(steady, settings, writer=writer, hold=hold)


def next_changes(listener: Listener, *, timeout_ms: int = 0) -> Changes:
    """Return the next changes of a listener that has some and owes no snapshot."""
    changes = listener.next_changes(timeout_ms=timeout_ms)
    assert isinstance(changes, Changes)
    return changes


def rows(*updates: tuple[str, int, int, int], schema: pa.Schema = SCHEMA) -> pa.Table:
    """Return a table of (k, n, time, diff), as `write` accepts it."""
    names = [*schema.names[:2], "mz_timestamp", "mz_diff"]
    types = [schema.field(0).type, schema.field(1).type, pa.int64(), pa.int64()]
    columns = list(zip(*updates, strict=True)) or [(), (), (), ()]
    arrays = [pa.array(list(c), t) for c, t in zip(columns, types, strict=True)]
    return pa.table(arrays, names=names)
