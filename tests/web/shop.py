"""Lake of a shop, written by persist, and tasks with a status that the test sets."""

from collections.abc import Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa

import penstock.persist as persist
from penstock.clock import Clock
from penstock.persist.state_store import StateStore
from penstock.supervisor.status import (
    ErrorStatus,
    LoopStatus,
    MaterializationStatus,
    SourceStatus,
    State,
    TaskStatus,
)
from penstock.web import LakeView

SECRET = "s3cret-of-the-shop"

SCHEMAS = {
    "shop.public.customers": pa.schema([("id", pa.int64()), ("name", pa.string())]),
    "shop.public.orders": pa.schema(
        [
            ("id", pa.int64()),
            ("customer", pa.int64()),
            ("state", pa.string()),
            ("total", pa.decimal128(12, 2)),
            ("placed", pa.timestamp("us", tz="UTC")),
        ]
    ),
    "shop.public.order_lines": pa.schema(
        [
            ("id", pa.int64()),
            ("order_id", pa.int64()),
            ("item", pa.string()),
            ("pieces", pa.int32()),
        ]
    ),
}
SUPERVISED = ("kind", "state", "restarts", "error")
NAMES = ("Ada", "Grace", "Edsger", "Barbara", "Tony", "Leslie", "Frances", "Donald")
ITEMS = ("flange", "gasket", "valve", "gauge", "elbow", "nozzle")


class Shop:
    """Three tables that change in one transaction, their source and a materialization."""

    def __init__(self, location: str, clock: Clock) -> None:
        self.location = location
        self.clock = clock
        self.settings = persist.Settings(background=False, patience_ms=0, notify="", clock=clock)
        self.client = persist.open(f"{self.location}/shop", writer="w", settings=self.settings)
        self.begun = clock.now_ms()
        for name, schema in SCHEMAS.items():
            self.client.create_or_load(name, schema=schema, key_columns=["id"], owner="shop")
        self.client.create_or_load("shop_remap", key=persist.TEXT, value=persist.UNIT, owner="shop")
        self.orders = 0
        self.upper = 0
        self.transactions = 0
        self.documents = 0
        self.waits_for = ""
        self.tasks: dict[str, dict[str, Any]] = {
            name: {"kind": kind, "state": "running", "restarts": 0, "error": None}
            for name, kind in (("shop", "source"), ("warehouse", "materialization"))
        }

    def view(self) -> LakeView:
        """Return the view that the status page serves."""
        return LakeView(self.location, self.settings, self.running, self.clock)

    def tick(self, orders: int = 1, *, time: int | None = None) -> int:
        """Insert orders, mark the previous last order as paid, and return the time."""
        time = self.clock.now_ms() if time is None else time
        updates: dict[str, list[Any]] = {name: [] for name in SCHEMAS}
        if self.orders == 0:
            updates["shop.public.customers"] = [
                ({"id": at, "name": name}, time, 1) for at, name in enumerate(NAMES)
            ]
        else:
            last = self.order(self.orders, "new")
            updates["shop.public.orders"] += [
                (last, time, -1),
                ({**last, "state": "paid"}, time, 1),
            ]
        for id in range(self.orders + 1, self.orders + orders + 1):
            updates["shop.public.orders"].append((self.order(id, "new"), time, 1))
            item = ITEMS[id % len(ITEMS)]
            line = {"id": id, "order_id": id, "item": item, "pieces": 1 + id % 7}
            updates["shop.public.order_lines"].append((line, time, 1))
        self.orders += orders
        for name, changed in updates.items():
            collection = self.client.collection(name)
            collection.compare_and_append(changed, collection.upper, time + 1)
        remap = self.client.collection("shop_remap")
        remap.compare_and_append([], remap.upper, time + 1)
        self.upper = time + 1
        return time

    def order(self, id: int, state: str) -> dict[str, Any]:
        return {
            "id": id,
            "customer": id % len(NAMES),
            "state": state,
            "total": Decimal(100 + 37 * id % 9_000) / 100,
            "placed": datetime.fromtimestamp((self.begun // 1000) - 86_400 + id, UTC),
        }

    def commit(self, documents: int, took: Mapping[str, int] | None = None) -> None:
        """Commit a transaction of the warehouse up to the current upper."""
        self.transactions += 1
        self.documents += documents
        self.tasks["warehouse"]["upper"] = self.upper
        self.tasks["warehouse"]["last_transaction"] = took or {
            "opened_ms": 0, "read_ms": 20, "stored_ms": 40, "committed_ms": 9, "acknowledged_ms": 5,
        }  # fmt: skip

    def running(self) -> dict[str, TaskStatus]:
        """Return the status as a supervisor reports it."""
        return {name: self._task(name, task) for name, task in self.tasks.items()}

    def _task(self, name: str, task: Mapping[str, Any]) -> TaskStatus:
        fields = {key: value for key, value in task.items() if key not in SUPERVISED}
        loop: LoopStatus = (
            SourceStatus.parse({**self.source(), **fields})
            if name == "shop"
            else MaterializationStatus.parse({**self.materialization(), **fields})
        )
        error = ErrorStatus.parse(task["error"])
        return TaskStatus(task["kind"], State(task["state"]), task["restarts"], error, loop)

    def source(self) -> dict[str, Any]:
        """Return the status as a Postgres source reports it."""
        return {
            "kind": "postgres",
            "server": "db.example:5432/shop",
            "phase": "following",
            "lsn": f"0/{0x1A2B000 + 512 * self.orders:X}",
            "lag_bytes": 0,
            "lag_ms": 0,
            "slot": "penstock_shop",
            "slot_bytes": 4_096 + 17 * self.orders,
            "slot_warning": "",
            "waits_for": self.waits_for,
            "tables": [
                {
                    "name": name.removeprefix("shop."),
                    "collection": name,
                    "phase": "live",
                    "rows": self.orders,
                    "estimated_rows": self.orders,
                    "bytes": 120 * self.orders,
                    "error": None,
                }
                for name in SCHEMAS
            ],
            "catching_up": False,
            "rows": 3 * self.orders,
            "bytes": 250 * self.orders,
            "as_of": self.upper - 1 if self.upper else None,
            "written_ms": self.clock.now_ms(),
        }

    def materialization(self) -> dict[str, Any]:
        """Return the status as a materialization reports it."""
        return {
            "phase": "following",
            "upper": 0,
            "lag_ms": 0,
            "waits_for": None,
            "left_behind": [],
            "documents": self.documents,
            "bytes": 180 * self.documents,
            "transactions": self.transactions,
            "last_transaction": {},
            "bindings": [
                {
                    "collection": name,
                    "resource": name.removeprefix("shop.public."),
                    "delta_updates": False,
                    "deletes": True,
                    "documents": self.documents // 3,
                    "bytes": 60 * self.documents,
                }
                for name in SCHEMAS
            ],
            "error": None,
        }

    def store_statuses(self) -> None:
        """Store the status of both tasks in the lake, with a stopped warehouse."""
        store = StateStore(self.client, "shop")
        store.put({"status": self.source()})
        # Compaction of the state is asynchronous: wait until since is stable.
        store.collection.allow_compaction(0).result()
        with persist.open(
            f"{self.location}/warehouse", writer="w", settings=self.settings
        ) as client:
            told = {**self.materialization(), "phase": "stopped", "upper": self.upper}
            StateStore(client, "warehouse").put({"status": told, "materialization": {}})

    def close(self) -> None:
        self.client.close()
