"""Recent layouts of the resources of a materialization, recorded in its state.

A checkpoint names a layout by its id. A layout is recorded before the first transaction that
uses it is planned. A layout that is not recorded is treated as different in every field.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from penstock.materialize.building import Built
from penstock.materialize.checkpoint import path_text
from penstock.materialize.layout import Layout, LayoutChange, compare_layouts
from penstock.sources.source import StateStore

__all__ = ["KnownLayouts"]

NOTE: Final = "layouts"
LAYOUTS_PER_RESOURCE: Final = 4


@dataclass(frozen=True, slots=True)
class KnownLayouts:
    """Recent layouts of each resource, oldest first, by path."""

    by_path: Mapping[str, Sequence[Layout]]

    @classmethod
    def get(cls, memory: StateStore) -> "KnownLayouts":
        """Read the layouts from the state of a materialization."""
        return cls.parse({NOTE: memory.get(NOTE)})

    @classmethod
    def parse(cls, state: Mapping[str, Any]) -> "KnownLayouts":
        """Return the layouts in the state entries of a materialization."""
        return cls(msgspec.convert(state.get(NOTE) or {}, dict[str, list[Layout]]))

    def with_built(self, built: Built) -> "KnownLayouts":
        """Return these layouts plus the layouts of all bindings.

        Each resource keeps its newest `LAYOUTS_PER_RESOURCE` layouts.
        """
        known = dict(self.by_path)
        for binding, layout in zip(built.spec.bindings, built.layouts, strict=True):
            path = path_text(binding.resource_path)
            others = [each for each in known.get(path, ()) if each.id != layout.id]
            known[path] = [*others, layout][-LAYOUTS_PER_RESOURCE:]
        return KnownLayouts(known)

    def note(self) -> Mapping[str, Any]:
        """Return the entry for the state of the materialization."""
        return {NOTE: msgspec.json.decode(msgspec.json.encode(self.by_path))}

    def continued(self, built: Built, number: int) -> frozenset[str]:
        """Return the ids of layouts that a binding continues without a rewrite."""
        return frozenset(
            id for id, change in self.changes(built, number).items() if not change.rewritten
        )

    def changes(self, built: Built, number: int) -> Mapping[str, LayoutChange]:
        """Return the change from each earlier layout, by its id, to the layout of a binding."""
        after = built.layouts[number]
        path = path_text(built.spec.bindings[number].resource_path)
        return {
            before.id: compare_layouts(before, after, built.filled[number])
            for before in self.by_path.get(path, ())
        }
