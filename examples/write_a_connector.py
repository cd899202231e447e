"""A connector that keeps each table in a JSON file: `python write_a_connector.py ADDRESS`."""

import fcntl
import json
import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic import BaseModel, Field

from penstock import sdk


class Endpoint(BaseModel, extra="forbid"):
    folder: Path = Field(description="the folder of the tables; it is made if it is not there")


class Resource(BaseModel, extra="forbid"):
    table: str = Field(pattern="^[a-z0-9_]+$", description="the name of the file, without .json")


class JsonTables(sdk.Connector[Endpoint, Resource]):
    """Documents in JSON files, a file for each table."""

    name = "json-tables"
    documentation_url = "docs/tutorial/write-a-connector.md"
    endpoint = Endpoint
    resource = Resource

    def validate(
        self, request: sdk.ValidateRequest[Endpoint, Resource]
    ) -> Sequence[sdk.ValidatedBinding]:
        return [
            sdk.ValidatedBinding(
                constraints={field.name: constraint(field) for field in each.fields},
                resource_path=(each.resource.table,),
                delta_updates=False,
                accepts_delete=True,
            )
            for each in request.bindings
        ]

    def apply(self, request: sdk.ApplyRequest[Endpoint, Resource]) -> str:
        paths = [table_path(request.endpoint, each) for each in request.bindings]
        missing = [path for path in paths if not path.exists()]
        if not request.dry_run:
            (request.endpoint.folder / "staged").mkdir(parents=True, exist_ok=True)
            for path in missing:
                write(path, {})
        return "".join(f"make {path}\n" for path in missing)

    def delete(self, request: sdk.ApplyRequest[Endpoint, Resource]) -> str:
        paths = [table_path(request.endpoint, each) for each in request.bindings]
        found = [path for path in paths if path.exists()]
        if not request.dry_run:
            for path in found:
                remove(path)
        return "".join(f"remove {path}\n" for path in found)

    def open(self, request: sdk.OpenRequest[Endpoint, Resource]) -> "Writer":
        for each in request.bindings:
            if not table_path(request.endpoint, each).exists():
                raise sdk.Refused(f'table "{each}" is not there', hint="Apply it first.")
        return Writer(request.endpoint, str(request.key_range), request.state)


def constraint(field: sdk.Field) -> sdk.Constraint:
    if field.is_key or field.ptr == "":
        return sdk.Constraint(sdk.ConstraintType.LOCATION_REQUIRED, "key and document are kept")
    return sdk.Constraint(sdk.ConstraintType.FIELD_FORBIDDEN, "it is in the document")


def table_path(endpoint: Endpoint, binding: sdk.Binding[Resource]) -> Path:
    return endpoint.folder / f"{binding.resource.table}.json"


class Writer(sdk.Transactor):
    """Stages a transaction in a file, and applies it once the recovery log has committed."""

    def __init__(self, endpoint: Endpoint, key_range: str, state: dict[str, str]) -> None:
        self._endpoint = endpoint
        self._range = key_range
        self._committed = state
        self._changes: dict[str, dict[str, str | None]] = {}

    def load(self, keys: Iterator[sdk.Keys]) -> Iterator[sdk.LoadedDocuments]:
        tables: dict[Path, dict[str, str]] = {}
        for batch in keys:
            path = table_path(self._endpoint, batch.binding)
            if path not in tables:
                tables[path] = read(path)
            texts = [tables[path].get(key.hex()) for key in batch.packed.to_pylist()]
            documents = pa.array(texts, pa.string()).drop_null().cast("binary")
            yield sdk.LoadedDocuments(batch.binding, documents)

    def store(self, documents: Iterator[sdk.Documents]) -> None:
        self._changes = {}
        for batch in documents:
            changes = self._changes.setdefault(batch.binding.resource.table, {})
            keys = [key.hex() for key in batch.packed_keys.to_pylist()]
            kept = [document.decode() for document in batch.docs_json.to_pylist()]
            changes.update(zip(keys, kept, strict=True))
            if batch.deletes is not None:
                gone = batch.packed_keys.filter(batch.deletes)
                changes.update({key.hex(): None for key in gone.to_pylist()})

    def start_commit(self, checkpoint: bytes) -> sdk.StateUpdate:
        name = f"{self._range}.{secrets.token_hex(8)}.json"
        write(self._endpoint.folder / "staged" / name, self._changes)
        self._committed = {self._range: name}
        return sdk.StateUpdate(json.dumps(self._committed).encode(), patch=True)

    def acknowledge(self) -> None:
        for name in self._committed.values():
            apply_once(self._endpoint.folder, name)
        self._committed = {}


def apply_once(folder: Path, name: str) -> None:
    staged = folder / "staged" / name
    with (folder / "staged" / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # Until it is closed. Other ranges have the same tables.
        if not staged.exists():
            return  # It was applied before.
        for table, changes in read(staged).items():
            path = folder / f"{table}.json"
            documents = {**read(path), **changes}
            write(path, {key: each for key, each in documents.items() if each is not None})
        remove(staged)


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def write(path: Path, value: Any) -> None:
    new = path.with_suffix(".new")
    with new.open("w") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)  # The whole of the new one, or the whole of the old.
    sync(path.parent)


def remove(path: Path) -> None:
    path.unlink()
    sync(path.parent)


def sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    os.fsync(handle)  # Names, too, have to survive a power cut.
    os.close(handle)


if __name__ == "__main__":
    with sdk.serve(JsonTables(), sys.argv[1]) as server:
        print(f"listening on {server.address}", flush=True)
        server.wait()
