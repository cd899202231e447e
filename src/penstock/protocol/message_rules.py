"""Validity of one message, for both directions.

A violation is the rest of a sentence that starts with the name of the message. `transaction.py`
checks the order of messages.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa

from penstock.protocol.messages import (
    Apply,
    Load,
    Loaded,
    Open,
    StartCommit,
    StartedCommit,
    Store,
    Validate,
    Validated,
)
from penstock.protocol.specs import CollectionSpec, MaterializationBinding, MaterializationSpec

__all__ = ["find_spec_violation", "find_violation"]


def find_violation(message: Any) -> str:
    """Return the first violation in `message`; empty if it is valid."""
    return next(_violations(message), "")


def _violations(message: Any) -> Iterator[str]:
    match message:
        case Load(binding, keys):
            yield from _column_violations(binding, packed_keys=keys)
            if not len(keys):
                yield "has no packed_keys"
        case Loaded(binding, docs):
            yield from _column_violations(binding, docs_json=docs)
            if not len(docs):
                yield "has no docs_json"
        case Store():
            yield from _store_violations(message)
        case Open(spec, version):
            if not spec.materialization:
                yield "has no materialization name"
            if not version:
                yield "has no version"
            if not is_json_object(message.state_json or b"{}"):
                yield "has a driver_checkpoint_json that is not a JSON object"
        case Apply(spec, version):
            if not spec.materialization:
                yield "has no materialization name"
            if not version:
                yield "has no version"
        case Validate(name, _, bindings):
            if not name:
                yield "has no materialization name"
            for index, proposed in enumerate(bindings):
                where = f"has an invalid binding {index} ({proposed.collection.collection})"
                for violation in _collection_violations(proposed.collection):
                    yield f"{where}: {violation}"
                for violation in _config_violations(proposed.field_config_json):
                    yield f"{where}: {violation}"
        case StartCommit(checkpoint):
            if not checkpoint:
                yield "has no runtime_checkpoint"
        case StartedCommit(state) if state is not None:
            if not is_json_object(state.json) and (state.json or state.patch):
                yield "has a driver_checkpoint_json that is not a JSON object"
        case Validated(bindings):
            for index, validated in enumerate(bindings):
                if not validated.resource_path or not all(validated.resource_path):
                    yield f"has no resource_path in binding {index}"
        case _:
            pass


def _column_violations(number: int, **columns: pa.Array) -> Iterator[str]:
    if not 0 <= number < 1 << 32:
        yield f"has an invalid binding number: {number}"
    for name, column in columns.items():
        kind = pa.BooleanArray if name in ("exists", "deletes") else pa.BinaryArray
        if not isinstance(column, kind) or column.null_count:
            yield f"has {name} that are not a {kind.__name__} without nulls"


def _store_violations(store: Store) -> Iterator[str]:
    count = len(store.packed_keys)
    if not count and not store.empties:
        yield "has no packed_keys"
    if count and store.empties:
        yield "has both empties and packed_keys"
    columns: dict[str, pa.Array] = {
        "packed_values": store.packed_values,
        "docs_json": store.docs_json,
        "exists": store.exists,
    }
    if store.deletes is not None:
        columns["deletes"] = store.deletes
    yield from _column_violations(store.binding, packed_keys=store.packed_keys, **columns)
    for name, column in columns.items():
        if len(column) != count:
            yield f"has {count} packed_keys, but {len(column)} {name}"


def find_spec_violation(spec: MaterializationSpec) -> str:
    """Return the first violation in a built specification; empty if it is valid."""
    return next(_spec_violations(spec), "")


def _spec_violations(spec: MaterializationSpec) -> Iterator[str]:
    if not is_json_object(spec.endpoint_spec_json):
        yield "endpoint_spec_json is not a JSON object"
    seen: set[tuple[str, ...]] = set()
    for index, binding in enumerate(spec.bindings):
        where = f"binding {index} ({binding.collection.collection})"
        for violation in _binding_violations(binding):
            yield f"{where}: {violation}"
        if binding.resource_path in seen:
            yield f"{where}: resource path {list(binding.resource_path)} is used twice"
        seen.add(binding.resource_path)


def _binding_violations(binding: MaterializationBinding) -> Iterator[str]:
    if not is_json_object(binding.resource_spec_json):
        yield "resource_spec_json is not a JSON object"
    if not binding.resource_path or not all(binding.resource_path):
        yield "resource_path is missing"
    yield from _collection_violations(binding.collection)
    selection = binding.field_selection
    yield from _config_violations(selection.field_config_json)
    if len(selection.keys) != len(binding.collection.key_ptrs):
        yield (
            f"{len(selection.keys)} key fields are selected, but the key of the collection has "
            f"{len(binding.collection.key_ptrs)}"
        )
    for name, ptr in zip(selection.keys, binding.collection.key_ptrs, strict=False):
        projection = binding.collection.projection(name)
        if projection is not None and projection.ptr != ptr:
            yield f'key field "{name}" is at {projection.ptr!r}, not at {ptr!r}'
    if list(selection.values) != sorted(selection.values):
        yield "field_selection.values are not sorted"
    if len(set(selection.fields)) != len(selection.fields):
        yield "a field is selected twice"
    for name in selection.fields:
        if binding.collection.projection(name) is None:
            yield f'selected field "{name}" is not a projection of the collection'


def _collection_violations(collection: CollectionSpec) -> Iterator[str]:
    if not collection.collection:
        yield "the collection has no name"
    if not collection.key_ptrs:
        yield "the collection has no key"
    if len(set(collection.key_ptrs)) != len(collection.key_ptrs):
        yield "the key contains a location twice"
    names = [projection.field for projection in collection.projections]
    if not all(names):
        yield "a projection has no field"
    if len(set(names)) != len(names):
        yield "two projections have the same field"
    for ptr in (*collection.key_ptrs, *(projection.ptr for projection in collection.projections)):
        if ptr and not ptr.startswith("/"):
            yield f"{ptr!r} is not a JSON pointer"
    located = {projection.ptr for projection in collection.projections}
    for ptr in collection.key_ptrs:
        if ptr not in located:
            yield f"key location {ptr!r} has no projection"
    for name in ("read_schema_json", "write_schema_json"):
        text = getattr(collection, name)
        if text and not isinstance(_parsed(text), dict | bool):
            yield f"{name} is not a JSON schema"


def _config_violations(configs: Mapping[str, str]) -> Iterator[str]:
    for name, text in configs.items():
        if text and not is_json_object(text):
            yield f'the configuration of field "{name}" is not a JSON object'


def is_json_object(text: str | bytes) -> bool:
    """Return whether a text is a JSON object."""
    return isinstance(_parsed(text), dict)


def _parsed(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
