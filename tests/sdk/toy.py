"""Connector with a dictionary as endpoint, which tests can make misbehave."""

import json
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, SecretStr
from pydantic import Field as Setting

from penstock.data.packed import pack_row
from penstock.protocol.key_range import WHOLE, KeyRange
from penstock.protocol.messages import Validate, ValidateBinding
from penstock.protocol.specs import (
    CollectionSpec,
    Exists,
    FieldSelection,
    Inference,
    MaterializationBinding,
    MaterializationSpec,
    Projection,
)
from penstock.sdk import (
    ApplyRequest,
    Connector,
    Constraint,
    ConstraintType,
    Documents,
    Keys,
    LoadedDocuments,
    OpenRequest,
    StateUpdate,
    Transactor,
    ValidatedBinding,
    ValidateRequest,
)


class Endpoint(BaseModel):
    model_config = ConfigDict(extra="forbid")
    place: str
    password: SecretStr = SecretStr("")


class Resource(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str
    delta_updates: bool = False
    key: SecretStr = SecretStr("")
    pin: str = Setting(default="", json_schema_extra={"secret": True})


class Toy(Connector[Endpoint, Resource]):
    """Stores documents in memory."""

    name = "toy"
    documentation_url = "docs/toy"
    endpoint, resource = Endpoint, Resource

    def __init__(self) -> None:
        self.rows: dict[str, dict[bytes, bytes]] = {}
        self.checkpoint = b""
        self.events: list[str] = []
        self.transactor: type[ToyTransactor] = ToyTransactor
        self.fails: Exception | None = None
        self.opened = 0

    def validate(self, request: ValidateRequest[Endpoint, Resource]) -> Sequence[ValidatedBinding]:
        if self.fails is not None:
            raise self.fails
        return [
            ValidatedBinding(
                {
                    field.name: Constraint(ConstraintType.LOCATION_REQUIRED)
                    for field in binding.fields
                },
                (binding.resource.name,),
                binding.resource.delta_updates,
            )
            for binding in request.bindings
        ]

    def apply(self, request: ApplyRequest[Endpoint, Resource]) -> str:
        return "" if request.dry_run else "applied"

    def open(self, request: OpenRequest[Endpoint, Resource]) -> "Transactor":
        self.opened += 1
        number = self.opened
        self.events.append(f"open {number}")
        return self.transactor(self, number)


class ToyTransactor(Transactor):
    """Stages documents, and stores them in start_commit."""

    def __init__(self, toy: Toy, number: int) -> None:
        self.toy = toy
        self.number = number
        self.checkpoint = toy.checkpoint
        self.cancelled = threading.Event()
        self.staged: list[tuple[str, bytes, bytes]] = []

    def record(self, event: str) -> None:
        self.toy.events.append(f"{event} {self.number}")

    def acknowledge(self) -> None:
        self.record("acknowledge")

    def load(self, keys: Iterator[Keys]) -> Iterator[LoadedDocuments]:
        self.record("load")
        for batch in keys:
            rows = self.toy.rows.get(str(batch.binding), {})
            docs = [rows[key] for key in batch.packed.to_pylist() if key in rows]
            yield LoadedDocuments(batch.binding, pa.array(docs, pa.binary()))

    def store(self, documents: Iterator[Documents]) -> None:
        self.record("store")
        for batch in documents:
            for key, doc in zip(batch.packed_keys, batch.docs_json, strict=True):
                self.staged.append((str(batch.binding), key.as_py(), doc.as_py()))

    def start_commit(self, checkpoint: bytes) -> StateUpdate | None:
        self.record("commit")
        for binding, key, doc in self.staged:
            self.toy.rows.setdefault(binding, {})[key] = doc
        self.staged = []
        self.toy.checkpoint = checkpoint
        return StateUpdate(json.dumps({"commits": self.number}).encode())

    def cancel(self) -> None:
        self.record("cancel")
        self.cancelled.set()

    def close(self) -> None:
        self.record("close")


COLLECTION = CollectionSpec(
    "a/things",
    ("/id",),
    (
        Projection("", "flow_document", inference=Inference(("object",), exists=Exists.MUST)),
        Projection("/id", "id", inference=Inference(("integer",), exists=Exists.MUST)),
    ),
)
ENDPOINT = '{"place":"here","password":"hunter2"}'


def spec(*names: str, delta: bool = False, materialization: str = "m") -> MaterializationSpec:
    return MaterializationSpec(
        materialization,
        ENDPOINT,
        tuple(
            MaterializationBinding(
                json.dumps({"name": name}),
                (name,),
                COLLECTION,
                FieldSelection(("id",), (), "flow_document"),
                delta_updates=delta,
            )
            for name in names or ("things",)
        ),
    )


def question(endpoint: str = ENDPOINT, resource: str = '{"name":"things"}') -> Validate:
    return Validate("m", endpoint, (ValidateBinding(resource, COLLECTION),))


def keys(*ids: int) -> pa.BinaryArray:
    return pa.array([pack_row((each,)) for each in ids], pa.binary())


def docs(*values: Any) -> pa.BinaryArray:
    return pa.array([json.dumps(each).encode() for each in values], pa.binary())


LOWER, UPPER = WHOLE.split()
__all__ = [
    "COLLECTION",
    "ENDPOINT",
    "LOWER",
    "UPPER",
    "KeyRange",
    "Toy",
    "ToyTransactor",
    "docs",
    "keys",
    "question",
    "spec",
]
