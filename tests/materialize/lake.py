"""A lake with one table that changes, and endpoints that are compared with it."""

import json
import random
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from penstock import persist
from penstock.clock import SYSTEM_CLOCK
from penstock.connectors import built_in
from penstock.connectors.files.__main__ import documents
from penstock.data import DIFF, TIME
from penstock.materialize.loop import MaterializationLoop
from penstock.materialize.runner import LocalRunner, Runner
from penstock.materialize.shard import close_sessions
from penstock.pipeline.file import CollectionSection, MaterializationSection
from penstock.sdk import Connector, serve
from penstock.supervisor import Loop, run_loop

SCHEMA = pa.schema(
    [pa.field("id", pa.int64(), nullable=False), ("name", pa.string()), ("amount", pa.int64())]
)
KEYED: Mapping[str, Any] = {"schema": SCHEMA, "key_columns": ["id"]}
TU: Sequence[Mapping[str, Any]] = [
    {"collection": "shop.t", "resource": {"table": "t"}},
    {"collection": "shop.u", "resource": {"table": "u"}},
]
"""Bindings of the table and of another collection."""


def row(id: int) -> Mapping[str, Any]:
    """Return a row of the columns in `SCHEMA`."""
    return {"id": id, "name": "n", "amount": 1}


class Table:
    """A table upstream, and the collection of its changes."""

    def __init__(self, url: str, rng: random.Random) -> None:
        self.client = persist.open(url, writer="upstream")
        self.collection = self.client.create_or_load("shop.t", schema=SCHEMA, key_columns=["id"])
        self.rows: dict[int, tuple[str, int]] = {}
        self._rng = rng

    def change(self, count: int = 20) -> None:
        """Insert, update and delete at random, at several times."""
        lower = self.collection.upper
        updates = []
        for step in range(count):
            time = lower + step // 5
            id = self._rng.randrange(12)
            before = self.rows.pop(id, None)
            if before is not None:
                updates.append((id, *before, time, -1))
            if before is None or self._rng.random() < 0.7:
                self.rows[id] = (f"name {self._rng.randrange(100)}", step)
                updates.append((id, *self.rows[id], time, +1))
        columns = list(zip(*updates, strict=True))
        rows = pa.table(columns, names=[*SCHEMA.names, TIME, DIFF])
        self.collection.compare_and_append(rows, lower, lower + count)

    def contents(self) -> list[dict[str, Any]]:
        """Return the expected rows of an endpoint, by key."""
        return [
            {"id": id, "name": name, "amount": amount}
            for id, (name, amount) in sorted(self.rows.items())
        ]


class Endpoint:
    """An endpoint of one of the built-in connectors, in a folder."""

    def __init__(self, connector: str, folder: Path) -> None:
        self.connector = connector
        self.folder = folder

    @property
    def config(self) -> Mapping[str, Any]:
        if self.connector == "sqlite":
            return {"path": str(self.folder / "t.db")}
        return {"folder": str(self.folder / "files")}

    @property
    def resource(self) -> Mapping[str, Any]:
        return {"table": "t"} if self.connector == "sqlite" else {"name": "t"}

    def rows(self, name: str = "t") -> list[dict[str, Any]]:
        """Return the rows of a resource, by key."""
        if self.connector == "sqlite":
            found = sqlite3.connect(self.folder / "t.db").execute(
                f"SELECT flow_document FROM {name}"
            )
            rows = [json.loads(row[0]) for row in found]
        else:
            rows = list(documents(self.folder / "files" / name))
        return sorted(rows, key=lambda row: row["id"])


@contextmanager
def materializing(
    lake: str,
    endpoint: Endpoint,
    folder: Path,
    *,
    shards: int = 1,
    jobs: Runner | None = None,
    bindings: Sequence[Mapping[str, Any]] | None = None,
    collections: Mapping[str, Any] | None = None,
    connector: Connector[Any, Any] | None = None,
    section: Mapping[str, Any] | None = None,
    name: str = "local",
    sources: Sequence[str] = (),
    allow_drop: bool = False,
    **binding: Any,
) -> Iterator[MaterializationLoop]:
    """Yield a materialization of the table, with its own connector and no open stream."""
    address = f"unix:{folder / 'connector.socket'}"
    bound = {"collection": "shop.t", "resource": dict(endpoint.resource), **binding}
    said = MaterializationSection.model_validate(
        {
            "connector": {"grpc": {"address": address}},
            "endpoint": dict(endpoint.config),
            "bindings": [bound] if bindings is None else bindings,
            "shards": shards,
            "consistency": "per-shard" if shards > 1 else None,
            **(section or {}),
        }
    )
    with (
        serve(connector or built_in(endpoint.connector), address),
        persist.open(f"{lake}/{name}", writer="runtime") as client,
    ):
        try:
            yield MaterializationLoop(
                name,
                said,
                client,
                location=lake,
                jobs=jobs or LocalRunner(),
                tick_ms=1,
                clock=SYSTEM_CLOCK,
                rng=random.Random(),
                collections={
                    name: CollectionSection.model_validate(each)
                    for name, each in (collections or {}).items()
                },
                sources=tuple(sources),
                allow_drop=allow_drop,
            )
        finally:
            close_sessions()


def stored_state(lake: str, name: str = "local") -> Mapping[str, Any]:
    """Return the stored state of a materialization."""
    with persist.open(f"{lake}/{name}") as client:
        found = client.collection(f"{name}/state")
        return dict(each.data for each in found.snapshot(found.upper - 1))


def once(materialization: MaterializationLoop) -> None:
    """Bring the endpoint to the upper of its collections."""
    run_loop(materialization, threading.Event(), once=True, clock=SYSTEM_CLOCK, name="local")


def bring(lake: str, endpoint: Endpoint, folder: Path, **given: Any) -> None:
    """Bring the endpoint to the upper of its collections by a new materialization."""
    with materializing(lake, endpoint, folder, **given) as materialization:
        once(materialization)


@contextmanager
def following(loop: Loop) -> Iterator[Callable[[Callable[[], bool]], None]]:
    """Run the loop during the block. Yield a function that waits until a condition holds."""
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(run_loop, loop, stop, once=False, clock=SYSTEM_CLOCK, name="local")

        def until(condition: Callable[[], bool]) -> None:
            while not condition():
                assert not run.done(), loop.status()
                SYSTEM_CLOCK.wait(stop, 5)

        try:
            yield until
        finally:
            stop.set()
    run.result()
