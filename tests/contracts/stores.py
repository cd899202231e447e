"""Stores that run every contract test, and the vectors of those tests."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.durable.eager_clock import EagerClock

from penstock.durable.blob import Blob
from penstock.durable.files import FileBlob
from penstock.durable.location import open_blob
from penstock.durable.memory import MemoryBlob, Shelf
from penstock.durable.retrying_blob import RetryingBlob
from penstock.testing.stores import PowerCutDisk, UnreliableBlob

Opener = Callable[[], Blob]
"""Function that opens another handle on the store under test."""

KINDS = ["memory", "files", "power-cut", "objects", "steady", "steady-unreliable"]

VECTORS = Path(__file__).parents[1] / "vectors" / "materialize.json"


def opener_of(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Opener:
    shelf = Shelf()
    chance = random.Random(7)
    match kind:
        case "memory":
            return lambda: MemoryBlob(shelf)
        case "files":
            return lambda: open_blob(f"file:{tmp_path}/store", writing=True)
        case "power-cut":
            disk = PowerCutDisk()
            return lambda: FileBlob("/lake/store", disk=disk)
        case "objects":
            url = request.getfixturevalue("object_url")
            return lambda: open_blob(url, writing=True)
        case "steady":
            return lambda: RetryingBlob(MemoryBlob(shelf), EagerClock(), chance)
        case _:
            return lambda: RetryingBlob(
                UnreliableBlob(MemoryBlob(shelf), rng=chance), EagerClock(), chance
            )


def vector(name: str) -> Any:
    cases = json.loads(VECTORS.read_text())["cases"]
    return next(case for case in cases if case["id"] == name)
