"""In-process client of a connector: validate, apply, open, load, store, commit."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from penstock.data.packed import pack_row
from penstock.protocol.key_range import WHOLE, KeyRange
from penstock.protocol.messages import ValidatedBinding
from penstock.protocol.specs import CollectionSpec, MaterializationSpec, Projection
from penstock.sdk import (
    ApplyRequest,
    Connector,
    Documents,
    Keys,
    OpenRequest,
    RequestedBinding,
    Transactor,
    ValidateRequest,
)
from penstock.sdk.bindings import Binding, bind, projected
from penstock.sdk.config import parse
from penstock.sdk.sql import fence
from penstock.sdk.sql.connector import SqlConnector
from penstock.sdk.sql.session import Session
from penstock.testing import specs
from penstock.testing.specs import projection

__all__ = [
    "Driven",
    "Row",
    "Sql",
    "Wanted",
    "collection",
    "commit",
    "documents",
    "loaded",
    "projection",
]


def collection(
    *projections: Projection,
    key: Sequence[str] = ("/id",),
    schema: Mapping[str, Any] | None = None,
) -> CollectionSpec:
    """Return a collection with these fields and the root document."""
    return specs.collection("acme/things", *projections, key=key, schema=schema)


@dataclass(frozen=True)
class Wanted:
    """Requested binding of a collection to a table."""

    collection: CollectionSpec
    table: str = "things"
    fields: Sequence[str] | None = None
    """Fields next to the key; `None` selects all."""

    document: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of the resource config."""

    @property
    def resource(self) -> dict[str, Any]:
        return {"table": self.table, "document": self.document, **self.options}


@dataclass(frozen=True)
class Row:
    key: tuple[Any, ...]
    values: tuple[Any, ...] = ()
    document: Any = None
    exists: bool = False
    delete: bool = False


@dataclass(frozen=True)
class Driven:
    """Connector with an endpoint config and the name of a materialization."""

    connector: Connector[Any, Any]
    endpoint: Mapping[str, Any]
    name: str = "acme/materialization"

    def validate(self, *wanted: Wanted, replaces: bool = False) -> Sequence[ValidatedBinding]:
        return self.connector.validate(
            ValidateRequest(
                self.name,
                self._endpoint(),
                [
                    RequestedBinding(
                        self._resource(each),
                        each.collection,
                        projected(each.collection, {}),
                        replaces,
                    )
                    for each in wanted
                ],
            )
        )

    def apply(
        self, version: str, *wanted: Wanted, dry_run: bool = False, recreates: Iterable[int] = ()
    ) -> str:
        applying = self._applying(version, wanted, dry_run)
        return self.connector.apply(replace(applying, recreates=frozenset(recreates)))

    def delete(self, version: str, *wanted: Wanted, dry_run: bool = False) -> str:
        return self.connector.delete(self._applying(version, wanted, dry_run))

    @contextmanager
    def open(
        self, version: str, *wanted: Wanted, key_range: KeyRange = WHOLE
    ) -> Iterator[tuple[Transactor, list[Binding[Any]]]]:
        _, bindings = self._built(wanted)
        opening = OpenRequest(self.name, version, self._endpoint(), bindings, key_range, {})
        transactor = self.connector.open(opening)
        try:
            yield transactor, bindings
        finally:
            transactor.close()

    def _applying(
        self, version: str, wanted: Sequence[Wanted], dry_run: bool
    ) -> ApplyRequest[Any, Any]:
        spec, bindings = self._built(wanted)
        return ApplyRequest(self.name, version, self._endpoint(), bindings, dry_run, spec)

    def _built(self, wanted: Sequence[Wanted]) -> tuple[MaterializationSpec, list[Binding[Any]]]:
        bound = [
            specs.bound(
                each.collection,
                each.resource,
                self.connector.path(self._endpoint(), self._resource(each)),  # type: ignore[attr-defined]
                fields=each.fields,
                document=each.document,
                delta=bool(each.options.get("delta_updates")),
            )
            for each in wanted
        ]
        spec = specs.materialization(self.name, self.endpoint, *bound)
        bindings = [
            bind(index, built, self._resource(each))
            for index, (built, each) in enumerate(zip(bound, wanted, strict=True))
        ]
        return spec, bindings

    def _endpoint(self) -> Any:
        return parse(self.connector.endpoint, json.dumps(dict(self.endpoint)), "endpoint")

    def _resource(self, wanted: Wanted) -> Any:
        return parse(self.connector.resource, json.dumps(wanted.resource), "resource")


@dataclass(frozen=True)
class Sql:
    """SQL connector with access to its endpoint."""

    driven: Driven

    @property
    def connector(self) -> SqlConnector[Any, Any]:
        assert isinstance(self.driven.connector, SqlConnector)
        return self.driven.connector

    @property
    def checkpoints(self) -> tuple[str, ...]:
        return self.connector.own_table(self._endpoint, fence.TABLE)

    @property
    def _endpoint(self) -> Any:
        return self.connector.endpoint.model_validate(dict(self.driven.endpoint))

    @contextmanager
    def session(self) -> Iterator[Session]:
        with self.connector.session(self._endpoint, touch=True) as session:
            yield session

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        """Return the rows of a statement."""
        with self.session() as session:
            return session.query(statement)

    def table(self, name: str) -> str:
        """Return the quoted path of a table."""
        path = (*self.checkpoints[:-1], name)
        return self.connector.dialect.quoted_path(path)


def commit(
    transactor: Transactor,
    binding: Binding[Any],
    rows: Iterable[Row],
    checkpoint: bytes = b"checkpoint",
    batch: int = 3,
) -> None:
    """Store rows in batches of `batch`, then commit."""
    rows = [*rows]
    transactor.store(
        documents(binding, rows[begin : begin + batch]) for begin in range(0, len(rows), batch)
    )
    transactor.start_commit(checkpoint)


def documents(binding: Binding[Any], rows: Sequence[Row]) -> Documents:
    deletes = [row.delete for row in rows]
    return Documents(
        binding,
        pa.array([pack_row(row.key) for row in rows], pa.binary()),
        pa.array([pack_row(row.values) for row in rows], pa.binary()),
        pa.array([json.dumps(row.document).encode() for row in rows], pa.binary()),
        pa.array([row.exists for row in rows], pa.bool_()),
        pa.array(deletes, pa.bool_()) if any(deletes) else None,
    )


def loaded(
    transactor: Transactor, binding: Binding[Any], keys: Iterable[tuple[Any, ...]]
) -> list[Any]:
    """Return the documents of the keys that exist, sorted by their JSON."""
    packed = pa.array([pack_row(key) for key in keys], pa.binary())
    found = [
        *transactor.load(
            iter([Keys(binding, packed.slice(at, 2)) for at in range(0, len(packed), 2)])
        )
    ]
    docs = [json.loads(doc) for each in found for doc in each.docs_json.to_pylist()]
    return sorted(docs, key=json.dumps)
