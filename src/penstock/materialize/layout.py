"""Layout of a binding: the rendering of the rows of a collection in its resource. Pure.

A schema change can alter every row of a collection without an update. Rows read through the
new schema hold the default of an added column, or print a widened type differently. A
resource adopts such a change in one of two ways:

    continue    the connector creates the new columns, filled with their stored defaults
    rewrite     all rows are stored again, within one transaction

The checkpoint records the id of the layout of the rows that a resource holds. After any crash,
the id shows whether the resource still needs one of the two (hazard C14). The state of the
materialization records recent layouts. A layout is recorded before the first transaction that
uses it is planned. A layout that is not recorded is treated as different in every field.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import xxhash

from penstock.materialize.binding_kind import BindingKind, DocumentsKind
from penstock.materialize.row_encoder import column_pointer
from penstock.persist.state_store import StateStore
from penstock.protocol.specs import CollectionSpec, MaterializationBinding, Projection

__all__ = ["KnownLayouts", "Layout", "LayoutChange", "compare_layouts", "layout_of"]

STATE_KEY: Final = "layouts"
LAYOUTS_PER_RESOURCE: Final = 4


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


def layout_of(
    collection: CollectionSpec, kind: BindingKind, binding: MaterializationBinding
) -> Layout:
    """Return the layout that a binding gives its resource."""
    selection = binding.field_selection
    columns = {column_pointer(name): projection for name, projection in kind.renderings.items()}
    projections = [collection.projection(name) for name in selection.fields]
    fields = {
        projection.field: (projection.ptr, _field_rendering(projection, columns))
        for projection in projections
        if projection is not None
    }
    for position, name in enumerate(selection.keys):
        pointer, rendering = fields[name]
        fields[name] = pointer, f"{rendering} key {position}"
    return Layout({} if isinstance(kind, DocumentsKind) else columns, fields)


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


@dataclass(frozen=True, slots=True)
class KnownLayouts:
    """Recent layouts of each resource, oldest first, by path."""

    by_path: Mapping[str, Sequence[Layout]]

    @classmethod
    def load(cls, store: StateStore) -> "KnownLayouts":
        """Read the layouts from the state of a materialization."""
        return cls.parse({STATE_KEY: store.get(STATE_KEY)})

    @classmethod
    def parse(cls, state: Mapping[str, Any]) -> "KnownLayouts":
        """Return the layouts in the state entries of a materialization."""
        return cls(msgspec.convert(state.get(STATE_KEY) or {}, dict[str, list[Layout]]))

    def with_layouts(self, layouts: Mapping[str, Layout]) -> "KnownLayouts":
        """Return these layouts plus the present layout of each resource.

        Each resource keeps its newest `LAYOUTS_PER_RESOURCE` layouts.
        """
        known = dict(self.by_path)
        for path, layout in layouts.items():
            others = [other for other in known.get(path, ()) if other.id != layout.id]
            known[path] = [*others, layout][-LAYOUTS_PER_RESOURCE:]
        return KnownLayouts(known)

    def to_state(self) -> Mapping[str, Any]:
        """Return the entry for the state of the materialization."""
        return {STATE_KEY: msgspec.json.decode(msgspec.json.encode(self.by_path))}

    def continued(self, path: str, layout: Layout, filled: Collection[str]) -> frozenset[str]:
        """Return the ids of layouts that the resource continues without a rewrite."""
        changes = self.changes(path, layout, filled)
        return frozenset(id for id, change in changes.items() if not change.rewritten)

    def changes(
        self, path: str, layout: Layout, filled: Collection[str]
    ) -> Mapping[str, LayoutChange]:
        """Return the change from each known layout of a resource, by its id, to `layout`.

        `filled` is as in `compare_layouts`.
        """
        return {
            known.id: compare_layouts(known, layout, filled) for known in self.by_path.get(path, ())
        }
