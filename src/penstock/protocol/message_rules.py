"""What a message must be to mean something, whichever end it comes from.

Each rule is a sentence that follows the name of the message. Message order is
`transaction.py`'s affair; here is what one message says by itself.
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

__all__ = ["broken_rule", "broken_spec_rule"]


def broken_rule(message: Any) -> str:
    """The first rule that `message` breaks; empty if there is none."""
    return next(_broken(message), "")


def _broken(message: Any) -> Iterator[str]:
    match message:
        case Load(binding, keys):
            yield from _broken_columns(binding, packed_keys=keys)
            if not len(keys):
                yield "has no packed_keys"
        case Loaded(binding, docs):
            yield from _broken_columns(binding, docs_json=docs)
            if not len(docs):
                yield "has no docs_json"
        case Store():
            yield from _broken_store(message)
        case Open(spec, version):
            if not spec.materialization:
                yield "names no materialization"
            if not version:
                yield "has no version"
            if not is_json_object(message.state_json or b"{}"):
                yield "has a driver_checkpoint_json that is not a JSON object"
        case Apply(spec, version):
            if not spec.materialization:
                yield "names no materialization"
            if not version:
                yield "has no version"
        case Validate(name, _, bindings):
            if not name:
                yield "names no materialization"
            for index, asked in enumerate(bindings):
                where = f"asks for binding {index} ({asked.collection.collection})"
                for rule in _broken_collection(asked.collection):
                    yield f"{where}: {rule}"
                for rule in _broken_configs(asked.field_config_json):
                    yield f"{where}: {rule}"
        case StartCommit(checkpoint):
            if not checkpoint:
                yield "has no runtime_checkpoint"
        case StartedCommit(state) if state is not None:
            if not is_json_object(state.json) and (state.json or state.patch):
                yield "has a driver_checkpoint_json that is not a JSON object"
        case Validated(bindings):
            for index, answered in enumerate(bindings):
                if not answered.resource_path or not all(answered.resource_path):
                    yield f"has a binding ({index}) without a resource_path"
        case _:
            pass


def _broken_columns(number: int, **columns: pa.Array) -> Iterator[str]:
    if not 0 <= number < 1 << 32:
        yield f"is of binding {number}"
    for name, column in columns.items():
        kind = pa.BooleanArray if name in ("exists", "deletes") else pa.BinaryArray
        if not isinstance(column, kind) or column.null_count:
            yield f"has {name} that are no {kind.__name__} without nulls"


def _broken_store(store: Store) -> Iterator[str]:
    count = len(store.packed_keys)
    if not count and not store.empties:
        yield "has no packed_keys"
    if count and store.empties:
        yield "empties, and has packed_keys"
    columns: dict[str, pa.Array] = {
        "packed_values": store.packed_values,
        "docs_json": store.docs_json,
        "exists": store.exists,
    }
    if store.deletes is not None:
        columns["deletes"] = store.deletes
    yield from _broken_columns(store.binding, packed_keys=store.packed_keys, **columns)
    for name, column in columns.items():
        if len(column) != count:
            yield f"has {count} packed_keys, but {len(column)} {name}"


def broken_spec_rule(spec: MaterializationSpec) -> str:
    """The first rule that what was built breaks; empty if there is none."""
    return next(_broken_spec(spec), "")


def _broken_spec(spec: MaterializationSpec) -> Iterator[str]:
    if not is_json_object(spec.endpoint_spec_json):
        yield "endpoint_spec_json is not a JSON object"
    seen: set[tuple[str, ...]] = set()
    for index, binding in enumerate(spec.bindings):
        where = f"binding {index} ({binding.collection.collection})"
        for rule in _broken_binding(binding):
            yield f"{where}: {rule}"
        if binding.resource_path in seen:
            yield f"{where}: resource path {list(binding.resource_path)} is another binding's, too"
        seen.add(binding.resource_path)


def _broken_binding(binding: MaterializationBinding) -> Iterator[str]:
    if not is_json_object(binding.resource_spec_json):
        yield "resource_spec_json is not a JSON object"
    if not binding.resource_path or not all(binding.resource_path):
        yield "there is no resource_path"
    yield from _broken_collection(binding.collection)
    selection = binding.field_selection
    yield from _broken_configs(selection.field_config_json)
    if len(selection.keys) != len(binding.collection.key_ptrs):
        yield (
            f"{len(selection.keys)} fields are selected as keys of a collection "
            f"that has {len(binding.collection.key_ptrs)}"
        )
    for name, ptr in zip(selection.keys, binding.collection.key_ptrs, strict=False):
        found = binding.collection.projection(name)
        if found is not None and found.ptr != ptr:
            yield f'key field "{name}" is at {found.ptr!r}, not at {ptr!r}'
    if list(selection.values) != sorted(selection.values):
        yield "field_selection.values are not sorted"
    if len(set(selection.fields)) != len(selection.fields):
        yield "a field is selected twice"
    for name in selection.fields:
        if binding.collection.projection(name) is None:
            yield f'field "{name}" is selected, and is no projection of the collection'


def _broken_collection(collection: CollectionSpec) -> Iterator[str]:
    if not collection.collection:
        yield "the collection has no name"
    if not collection.key_ptrs:
        yield "the collection has no key"
    if len(set(collection.key_ptrs)) != len(collection.key_ptrs):
        yield "a location is in the key twice"
    names = [each.field for each in collection.projections]
    if not all(names):
        yield "a projection has no field"
    if len(set(names)) != len(names):
        yield "two projections have the same field"
    for ptr in (*collection.key_ptrs, *(each.ptr for each in collection.projections)):
        if ptr and not ptr.startswith("/"):
            yield f"{ptr!r} is no JSON pointer"
    located = {each.ptr for each in collection.projections}
    for ptr in collection.key_ptrs:
        if ptr not in located:
            yield f"no projection is at {ptr!r}, which is of the key"
    for name in ("read_schema_json", "write_schema_json"):
        text = getattr(collection, name)
        if text and not isinstance(_parsed(text), dict | bool):
            yield f"{name} is not a JSON schema"


def _broken_configs(configs: Mapping[str, str]) -> Iterator[str]:
    for name, text in configs.items():
        if text and not is_json_object(text):
            yield f'the configuration of field "{name}" is not a JSON object'


def is_json_object(text: str | bytes) -> bool:
    """Whether it is one."""
    return isinstance(_parsed(text), dict)


def _parsed(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
