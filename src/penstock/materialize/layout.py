"""The layout of a binding: how its resource renders the rows of its collection. Pure.

A schema change can alter every row of a collection without an update: rows read through
the new schema hold the default of an added column, or print a widened type differently.
A resource follows such a change in one of two ways:

    continue    the connector creates the new columns, filled with their stored defaults
    rewrite     all rows are stored again, within one transaction

The layout of the rows that a resource holds is recorded in the checkpoint, by its id, so
that after any crash it is known which of the two is still to be done (hazard C14).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import msgspec
import pyarrow as pa
import xxhash

from penstock.data.schema import label_of
from penstock.materialize.binding import Documents, Shape
from penstock.materialize.rows import pointer_of
from penstock.protocol.specs import CollectionSpec, MaterializationBinding, Projection

__all__ = ["Layout", "LayoutChange", "compare_layouts", "layout_of", "renderings_of"]


class Layout(msgspec.Struct, frozen=True):
    """Columns of a collection, and the fields of a resource that are made from them."""

    columns: Mapping[str, str]
    """Rendering of each column, by pointer; empty if the fields come from documents."""

    fields: Mapping[str, tuple[str, str]]
    """Pointer and rendering of each selected field, by name."""

    @property
    def id(self) -> str:
        """Digest that identifies the layout in checkpoints."""
        return xxhash.xxh64_hexdigest(msgspec.json.encode(self, order="deterministic"))


@dataclass(frozen=True, slots=True)
class LayoutChange:
    """Difference between the layout of a resource and the one that it shall have."""

    rewritten: tuple[str, ...] = ()
    """Fields whose values change in rows that were not updated, and that nobody fills."""


def renderings_of(columns: pa.Schema) -> Mapping[str, str]:
    """Return, for each column, a text that changes exactly when its values print differently.

    A wider integer prints the same; a float that becomes a double, or a decimal with
    more digits in its fraction, does not.
    """
    return {field.name: _rendering(field) for field in columns}


def layout_of(collection: CollectionSpec, shape: Shape, binding: MaterializationBinding) -> Layout:
    """Return the layout that a binding gives its resource."""
    selection = binding.field_selection
    columns = {pointer_of(name): each for name, each in shape.renderings.items()}
    projections = [collection.projection(name) for name in selection.fields]
    fields = {
        each.field: (each.ptr, _field_rendering(each, columns))
        for each in projections
        if each is not None
    }
    for position, name in enumerate(selection.keys):
        pointer, rendering = fields[name]
        fields[name] = pointer, f"{rendering} key {position}"
    return Layout({} if isinstance(shape, Documents) else columns, fields)


def compare_layouts(before: Layout, after: Layout, filled: Collection[str]) -> LayoutChange:
    """Return the fields that untouched rows do not hold as `after` has them.

    `filled` are the fields whose columns the connector creates with the stored default in
    every row. That is the right value only if the collection has a new column for them.
    """

    def holds(name: str) -> bool:
        if name in before.fields:
            return before.fields[name] == after.fields[name]
        pointer, _ = after.fields[name]
        return name in filled and pointer in after.columns and pointer not in before.columns

    return LayoutChange(tuple(name for name in after.fields if not holds(name)))


def _field_rendering(projection: Projection, columns: Mapping[str, str]) -> str:
    """Return how a field prints; its JSON Schema default counts where documents have one."""
    pointer, default = projection.ptr, projection.inference.default_json
    if pointer == "":
        return xxhash.xxh64_hexdigest(msgspec.json.encode(columns, order="deterministic"))
    return columns.get(pointer, f"document {default}")


def _rendering(field: pa.Field) -> str:
    kind = field.type
    if pa.types.is_boolean(kind):
        return "boolean"
    if pa.types.is_integer(kind):
        return "integer"
    if pa.types.is_floating(kind):
        return str(kind)
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return "base64"
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return "text"
    label = label_of(field) or ""
    return f"{label} {kind.scale}" if pa.types.is_decimal(kind) else f"{label} {kind}"
