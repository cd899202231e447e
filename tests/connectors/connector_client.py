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
    "ConnectorClient",
    "Row",
    "Sql",
    "TableBinding",
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
class TableBinding:
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
class ConnectorClient:
    """Client of one connector, with an endpoint config and the name of a materialization."""

    connector: Connector[Any, Any]
    endpoint: Mapping[str, Any]
    name: str = "acme/materialization"

    def validate(
        self, *table_bindings: TableBinding, replaces: bool = False
    ) -> Sequence[ValidatedBinding]:
        return self.connector.validate(
            ValidateRequest(
                self.name,
                self._endpoint(),
                [
                    RequestedBinding(
                        self._resource(table_binding),
                        table_binding.collection,
                        projected(table_binding.collection, {}),
                        replaces,
                    )
                    for table_binding in table_bindings
                ],
            )
        )

    def apply(
        self,
        version: str,
        *table_bindings: TableBinding,
        dry_run: bool = False,
        recreates: Iterable[int] = (),
    ) -> str:
        request = self._apply_request(version, table_bindings, dry_run)
        return self.connector.apply(replace(request, recreates=frozenset(recreates)))

    def delete(self, version: str, *table_bindings: TableBinding, dry_run: bool = False) -> str:
        return self.connector.delete(self._apply_request(version, table_bindings, dry_run))

    @contextmanager
    def open(
        self, version: str, *table_bindings: TableBinding, key_range: KeyRange = WHOLE
    ) -> Iterator[tuple[Transactor, list[Binding[Any]]]]:
        _, bindings = self._build(table_bindings)
        request = OpenRequest(self.name, version, self._endpoint(), bindings, key_range, {})
        transactor = self.connector.open(request)
        try:
            yield transactor, bindings
        finally:
            transactor.close()

    def _apply_request(
        self, version: str, table_bindings: Sequence[TableBinding], dry_run: bool
    ) -> ApplyRequest[Any, Any]:
        spec, bindings = self._build(table_bindings)
        return ApplyRequest(self.name, version, self._endpoint(), bindings, dry_run, spec)

    def _build(
        self, table_bindings: Sequence[TableBinding]
    ) -> tuple[MaterializationSpec, list[Binding[Any]]]:
        binding_specs = [
            specs.bound(
                table_binding.collection,
                table_binding.resource,
                self.connector.path(self._endpoint(), self._resource(table_binding)),  # type: ignore[attr-defined]
                fields=table_binding.fields,
                document=table_binding.document,
                delta=bool(table_binding.options.get("delta_updates")),
            )
            for table_binding in table_bindings
        ]
        spec = specs.materialization(self.name, self.endpoint, *binding_specs)
        bindings = [
            bind(index, binding_spec, self._resource(table_binding))
            for index, (binding_spec, table_binding) in enumerate(
                zip(binding_specs, table_bindings, strict=True)
            )
        ]
        return spec, bindings

    def _endpoint(self) -> Any:
        return parse(self.connector.endpoint, json.dumps(dict(self.endpoint)), "endpoint")

    def _resource(self, table_binding: TableBinding) -> Any:
        return parse(self.connector.resource, json.dumps(table_binding.resource), "resource")


@dataclass(frozen=True)
class Sql:
    """SQL connector with access to its endpoint."""

    client: ConnectorClient

    @property
    def connector(self) -> SqlConnector[Any, Any]:
        assert isinstance(self.client.connector, SqlConnector)
        return self.client.connector

    @property
    def checkpoints(self) -> tuple[str, ...]:
        return self.connector.own_table(self._endpoint, fence.TABLE)

    @property
    def _endpoint(self) -> Any:
        return self.connector.endpoint.model_validate(dict(self.client.endpoint))

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
    responses = [
        *transactor.load(
            iter([Keys(binding, packed.slice(begin, 2)) for begin in range(0, len(packed), 2)])
        )
    ]
    docs = [json.loads(doc) for response in responses for doc in response.docs_json.to_pylist()]
    return sorted(docs, key=json.dumps)
