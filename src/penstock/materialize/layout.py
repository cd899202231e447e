"""Layout of a binding: the rendering of the rows of a collection in its resource. Pure.

A schema change can alter every row of a collection without an update. Rows read through the
new schema hold the default of an added column, or print a widened type differently. A
resource adopts such a change in one of two ways:

    continue    the connector creates the new columns, filled with their stored defaults
    rewrite     all rows are stored again, within one transaction

The checkpoint records the id of the layout of the rows that a resource holds. After any crash,
the id shows whether the resource still needs one of the two (hazard C14).
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
    """Columns of a collection, and the resource fields that are computed from the columns."""

    columns: Mapping[str, str]
    """Rendering of each column, by pointer; empty if the fields are extracted from documents."""

    fields: Mapping[str, tuple[str, str]]
    """Pointer and rendering of each selected field, by name."""

    @property
    def id(self) -> str:
        """Digest that identifies the layout in checkpoints."""
        return xxhash.xxh64_hexdigest(msgspec.json.encode(self, order="deterministic"))


@dataclass(frozen=True, slots=True)
class LayoutChange:
    """Difference between the present layout of a resource and its required layout."""

    rewritten: tuple[str, ...] = ()
    """Fields that differ in rows without an update, and that the connector does not fill."""


def renderings_of(columns: pa.Schema) -> Mapping[str, str]:
    """Return, for each column, a text that changes exactly when its values print differently.

    A widened integer prints the same. A float that becomes a double, or a decimal with a larger
    scale, prints differently.
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
    """Return the fields whose values in rows without an update differ between the layouts.

    `filled` are the fields whose columns the connector creates with the stored default in
    every row. The default is the correct value only if the column of the collection is new too.
    """

    def holds(name: str) -> bool:
        if name in before.fields:
            return before.fields[name] == after.fields[name]
        pointer, _ = after.fields[name]
        return name in filled and pointer in after.columns and pointer not in before.columns

    return LayoutChange(tuple(name for name in after.fields if not holds(name)))


def _field_rendering(projection: Projection, columns: Mapping[str, str]) -> str:
    """Return the rendering of a field; a field of a document includes its JSON Schema default."""
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
