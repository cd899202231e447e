"""Reader written from docs/reference/format.md alone.

It imports no module of Penstock: everything it can read is specified by that page. It
reads a complete location in a folder, without a hold, and prefers simplicity to speed:
rows become JSON texts, and a dictionary consolidates them.
"""

import base64
import json
import os
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

END = 2**63 - 1

Decode = Callable[[Any, int], Any]
"""Function from a stored value and its codec version to the value."""

BUILT_IN: dict[str, Decode] = {
    "text": lambda stored, _: stored,
    "bytes": lambda stored, _: stored,
    "int64": lambda stored, _: stored,
    "bigint": lambda stored, _: int(stored),
    "json": lambda stored, _: msgspec.json.decode(stored),
    "unit": lambda _stored, _version: None,
}


def render(data: Any) -> str:
    """Return one JSON text per value: 1, 1.0 and true differ, and bytes are base64."""

    def plain(value: Any) -> Any:
        if isinstance(value, bytes):
            return {"base64": base64.b64encode(value).decode()}
        return str(value)

    return json.dumps(data, default=plain, sort_keys=True)


class Damaged(Exception):
    """Location that violates the format page."""


class Errored(Exception):
    """Error span of a collection: its contents are not known as of that time."""


class Location:
    """Storage location in a folder, as of its opening."""

    def __init__(self, folder: Path, codecs: dict[str, Decode] | None = None) -> None:
        self.folder = folder
        self.codecs = BUILT_IN | (codecs or {})
        self.void: list[int] = []
        self._open()

    def collection(self, name: str) -> dict[str, Any]:
        return next(
            c
            for c in self.state["collections"].values()
            if c["name"] == name and not c.get("successor", 0)
        )

    def collection_as_of(self, name: str, time: int) -> dict[str, Any]:
        current = self.collection(name)
        if current.get("begins", 0) <= time:
            return current
        there = self.state["collections"]
        older = (there[id] for id in current.get("predecessors", []) if id in there)
        return next((c for c in older if time < c.get("upper", 0)), current)

    def names(self) -> list[str]:
        return sorted({c["name"] for c in self.state["collections"].values()})

    def as_of(self, name: str, time: int) -> Counter[str]:
        """Return each row of the contents with its multiplicity."""
        collection = self.collection_as_of(name, time)
        if not collection.get("since", 0) <= time < collection.get("upper", 0):
            raise LookupError(f"{name} cannot be read as of {time}")
        for span in collection.get("errors", []):
            if span["lower"] <= time < span.get("upper", END):
                raise Errored(span["error"]["message"])
        updates = self._updates(collection, 0, time + 1, self._schema_as_of(collection, time))
        return _added_up((row, diff) for row, _, diff in updates)

    def changes(self, name: str, lower: int, upper: int) -> Counter[Any]:
        """Return each row and time in [lower, upper), with its consolidated diff."""
        collection = self.collection(name)
        schema = self._schema_as_of(collection, upper - 1)
        updates = self._updates(collection, lower, upper, schema)
        return _added_up(((row, time), diff) for row, time, diff in updates)

    # Open.

    def _open(self) -> None:
        floor, _ = self.marks()
        rollups = self._numbers("rollup")
        self.state = _empty()
        if rollups:
            self.state = self._rollup(rollups[-1])
        if self.state["seqno"] < floor:
            raise Damaged(f"the log begins at {floor} and no rollup reaches that far")
        while (entry := self._entry(self.state["seqno"])) is not None:
            self._apply(entry)
        _, head = self.marks()
        if self.state["seqno"] < head:
            raise Damaged(f"entry {self.state['seqno']} is missing below the head mark {head}")
        if any(number > self.state["seqno"] for number in self._entries()):
            raise Damaged(f"entry {self.state['seqno']} is missing")

    def marks(self) -> tuple[int, int]:
        found = {"floor": 0, "head": 0}
        for mark in self._names("mark"):
            kind, _, number = mark.partition("-")
            found[kind] = max(found[kind], int(number))
        return found["floor"], max(found.values())

    def _rollup(self, number: int) -> dict[str, Any]:
        body = self._frame(f"rollup/{number:020d}", b"R")
        if body["seqno"] != number:
            raise Damaged(f"rollup {number} covers {body['seqno']} entries")
        body["collections"] = {c["id"]: c for c in body["collections"]}
        return body

    def _entry(self, number: int) -> dict[str, Any] | None:
        key = f"log/{number // 1000:017d}/{number % 1000:03d}"
        path = self.folder / key
        if not path.exists():
            return None
        _sync(path)
        _sync(path.parent)
        return self._frame(key, b"E")

    def _frame(self, key: str, kind: bytes) -> dict[str, Any]:
        data = (self.folder / key).read_bytes()
        if len(data) < 24 or data[:4] != b"PNST" or data[4:5] != kind or data[5] not in (1, 2):
            raise Damaged(f"{key} is not a frame of kind {kind!r} and version 1 or 2")
        (length,) = struct.unpack_from("<Q", data, 8)
        (told,) = struct.unpack_from("<Q", data, len(data) - 8)
        if len(data) != 24 + length or xxhash.xxh64_intdigest(data[:-8]) != told:
            raise Damaged(f"{key} has another length or checksum")
        body: dict[str, Any] = msgspec.msgpack.decode(data[16:-8], strict=False)
        return body

    def _names(self, folder: str) -> list[str]:
        path = self.folder / folder
        return sorted(each.name for each in path.iterdir()) if path.is_dir() else []

    def _numbers(self, folder: str) -> list[int]:
        return [int(name) for name in self._names(folder)]

    def _entries(self) -> list[int]:
        return [
            int(thousands + rest)
            for thousands in self._names("log")
            for rest in self._names(f"log/{thousands}")
        ]

    # Replay.

    def _apply(self, entry: dict[str, Any]) -> None:
        state = self.state
        number = state["seqno"]
        state["seqno"] += 1
        if self._void(entry):
            self.void.append(number)
            return
        for operation in entry["operations"]:
            self._operate(operation, entry["epoch"], number)

    def _void(self, entry: dict[str, Any]) -> bool:
        state, operations = self.state, entry["operations"]
        if state["location"] and entry["location"] != state["location"]:
            return True
        if operations and operations[0]["type"] == "take_epoch":
            return bool(entry["epoch"] != state["epoch"] + 1)
        if entry["epoch"] > state["epoch"]:
            raise Damaged(f"an entry is of epoch {entry['epoch']}, which no writer began")
        if entry["epoch"] < state["epoch"] or state["writer"] is None:
            return True
        for operation in operations:
            batches = operation.get("batches", [])
            if operation["type"] == "merge" and operation["output"] is not None:
                batches = [operation["output"]]
            for key in (key for batch in batches for key in _keys(batch)):
                if key.split("/")[1] not in state["staging"]:
                    return True
        return False

    def _operate(self, operation: dict[str, Any], epoch: int, number: int) -> None:
        state, collections = self.state, self.state["collections"]
        collection = collections.get(operation.get("collection"), {})
        match operation:
            case {"type": "take_epoch", "writer": writer, "location": location}:
                state |= {"epoch": epoch, "writer": writer, "staging": {}, "collecting": None}
                state["location"] = state["location"] or location
                for each in collections.values():
                    each["intended"] = None
            case {"type": "release"}:
                state |= {"writer": None, "staging": {}}
            case {"type": "create", "name": name, "schema": schema}:
                id = self._next_id()
                collections[id] = {"id": id, "name": name, "schemas": [schema]}
            case {"type": "alter", "schema": schema}:
                collection["schemas"] = [*collection["schemas"], schema]
            case {"type": "destroy", "collection": id}:
                older = [] if collection.get("successor") else collection.get("predecessors", [])
                for gone in {*older, id} & collections.keys():
                    self._unlink(collections[gone].get("batches", []), number)
                    del collections[gone]
            case {"type": "link", "batches": batches}:
                given = [batch | {"id": self._next_id()} for batch in batches]
                collection["batches"] = [*collection.get("batches", []), *given]
            case {"type": "seal", "upper": upper}:
                collection["upper"] = upper
            case {"type": "discard"}:
                self._discard(collection, number)
            case {"type": "allow", "since": since}:
                collection["allowed"] = max(collection.get("allowed", 0), since)
            case {"type": "begin", "since": since}:
                allowed = max(collection.get("allowed", 0), since)
                collection |= {"begins": since, "since": since, "allowed": allowed}
            case {"type": "fail", "time": time, "error": error}:
                span = {"lower": time, "error": error}
                collection["errors"] = [*collection.get("errors", []), span]
            case {"type": "recover", "time": time}:
                *over, last = collection["errors"]
                ended = [last | {"upper": time}] if last["lower"] < time else []
                collection["errors"] = over + ended
            case {"type": "replace", "by": by, "time": time}:
                older = [*collection.get("predecessors", []), collection["id"]]
                collections[by] |= {"name": collection["name"], "predecessors": older}
                collection |= {"upper": time, "successor": by}
            case {"type": "intend", "sinces": sinces, "collect": collect}:
                for id in sinces.keys() & collections.keys():
                    collections[id]["intended"] = sinces[id]
                state["collecting"] = collect
            case {"type": "settle", "sinces": sinces, "collected": collected}:
                for id in sinces.keys() & collections.keys():
                    since = max(collections[id].get("since", 0), sinces[id])
                    errors = collections[id].get("errors", [])
                    kept = [span for span in errors if span.get("upper", END) > since]
                    collections[id] |= {"since": since, "intended": None, "errors": kept}
                state["collecting"] = None
                state["collected"] = max(state["collected"], collected)
            case {"type": "merge", "inputs": inputs, "output": output}:
                self._merge(collection, inputs, output, number)
            case {"type": "open_staging", "id": staging}:
                state["staging"][staging] = epoch
            case {"type": "close_staging", "id": staging}:
                del state["staging"][staging]
            case {"type": "forget", "keys": keys}:
                for key in keys:
                    state["garbage"].pop(key, None)
            case {"type": "rolled_up", "number": rolled}:
                state["rollups"] = [*state["rollups"][-1:], rolled]
            case {"type": "expire_hold", "hold": hold}:
                state["expired"][hold] = number
            case {"type": "forget_hold", "hold": hold}:
                del state["expired"][hold]
            case _:
                raise Damaged(f"entry {number} has an operation of type {operation['type']}")

    def _next_id(self) -> int:
        self.state["next_id"] += 1
        return int(self.state["next_id"] - 1)

    def _unlink(self, batches: list[dict[str, Any]], number: int) -> None:
        for batch in batches:
            self.state["garbage"] |= dict.fromkeys(_keys(batch), number)

    def _discard(self, collection: dict[str, Any], number: int) -> None:
        upper = collection.get("upper", 0)
        kept = []
        for batch in collection.get("batches", []):
            if batch["upper"] <= upper:
                kept.append(batch)
            elif batch["lower"] < upper:
                kept.append(batch | {"until": upper, "upper": upper})
            else:
                self._unlink([batch], number)
        collection["batches"] = kept

    def _merge(
        self,
        collection: dict[str, Any],
        inputs: list[int],
        output: dict[str, Any] | None,
        number: int,
    ) -> None:
        batches = collection["batches"]
        first = next(at for at, batch in enumerate(batches) if batch["id"] in inputs)
        replaced = [batch for batch in batches if batch["id"] in inputs]
        rest = [batch for batch in batches if batch["id"] not in inputs]
        if len(replaced) != len(inputs):
            raise Damaged(f"entry {number} merges batches that are not there")
        self._unlink(replaced, number)
        if output is not None:
            rest.insert(first, output | {"id": self._next_id()})
        collection["batches"] = rest

    # Read.

    def _schema_as_of(self, collection: dict[str, Any], time: int) -> dict[str, Any]:
        schemas: list[dict[str, Any]] = collection["schemas"]
        if schemas[-1].get("codecs"):
            return schemas[-1]
        return [schema for schema in schemas if schema["since"] <= time][-1]

    def _updates(
        self, collection: dict[str, Any], lower: int, upper: int, schema: dict[str, Any]
    ) -> Iterator[tuple[str, int, int]]:
        for batch in collection.get("batches", []):
            if batch["lower"] >= upper or batch["upper"] <= lower:
                continue
            written = collection["schemas"][batch["schema"]]
            below = min(upper, batch.get("until", END))
            for part in batch["parts"]:
                table = self._part(part, written)
                for row in table.to_pylist():
                    time, diff = row.pop("mz_timestamp"), row.pop("mz_diff")
                    if lower <= time < below:
                        yield self._conformed(row, collection, written, schema), time, diff

    def _part(self, part: dict[str, Any], written: dict[str, Any]) -> pa.Table:
        schema = _columns(written)
        for name in ("mz_timestamp", "mz_diff"):
            schema = schema.append(pa.field(name, pa.int64(), nullable=False))
        if part["type"] == "inline":
            batch = pa.ipc.read_record_batch(pa.py_buffer(part["rows"]), schema)
            return pa.Table.from_batches([batch])
        data = (self.folder / part["key"]).read_bytes()
        if len(data) != part["size"] or xxhash.xxh64_intdigest(data) != part["checksum"]:
            raise Damaged(f"{part['key']} has another size or checksum")
        footer = data[len(data) - part["footer"] :]
        if footer[-4:] != b"PAR1" or int.from_bytes(footer[-8:-4], "little") != len(footer) - 8:
            raise Damaged(f"{part['key']} has a footer of another length")
        if xxhash.xxh64_intdigest(footer) != part["footer_checksum"]:
            raise Damaged(f"{part['key']} has another checksum of its footer")
        return pq.read_table(pa.BufferReader(data), page_checksum_verification=True).cast(schema)

    def _conformed(
        self,
        row: dict[str, Any],
        collection: dict[str, Any],
        written: dict[str, Any],
        schema: dict[str, Any],
    ) -> str:
        """Return a row in the requested schema, decoded by the codec version that wrote it."""
        if schema.get("codecs"):
            values = zip((row["key"], row["value"]), written["codecs"], strict=True)
            return render(
                [self.codecs[name](stored, version) for stored, (name, version) in values]
            )
        defaults = _defaults(collection["schemas"])
        return render({name: row.get(name, defaults.get(name)) for name in _columns(schema).names})


def _empty() -> dict[str, Any]:
    return {
        "seqno": 0,
        "location": "",
        "epoch": 0,
        "writer": None,
        "next_id": 1,
        "collections": {},
        "staging": {},
        "garbage": {},
        "collecting": None,
        "collected": 0,
        "rollups": [],
        "expired": {},
    }


def _keys(batch: dict[str, Any]) -> list[str]:
    return [part["key"] for part in batch["parts"] if part["type"] == "stored"]


def _columns(schema: dict[str, Any]) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(schema["columns"]))


def _defaults(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for schema in schemas:
        if schema.get("defaults"):
            found |= pa.ipc.open_stream(schema["defaults"]).read_all().to_pylist()[0]
    return found


def _added_up(counted: Iterator[tuple[Any, int]]) -> Counter[Any]:
    total: Counter[Any] = Counter()
    for row, diff in counted:
        total[row] += diff
    return Counter({row: count for row, count in total.items() if count})


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
