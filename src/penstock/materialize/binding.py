"""What the rows of a collection are to a connector: rows of a table, or documents to be reduced.

Rows        of a table: the changes alone tell the last state of each key
Documents   each row is one, and is reduced into what is stored under its key
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.materialize.intervals import Bound
from penstock.persist.state import CollectionState
from penstock.reduce import Reducer
from penstock.reduce.native import NativePlan

__all__ = ["COUNT", "ROW", "BindingPlan", "Documents", "Rows", "Shape"]

ROW: Final = "mz_row"
"""Of rows without a key: what tells a row from others."""

COUNT: Final = "mz_count"
"""And how often it is there."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The last row of each key."""

    key: tuple[str, ...]
    """Columns."""

    renderings: Mapping[str, str] = field(default_factory=dict[str, str])
    """By column, as in `renderings_of`."""


@dataclass(frozen=True, slots=True)
class Documents:
    """All documents of a key, reduced."""

    reducer: Reducer
    key: tuple[str, ...]
    """Pointers into a document."""

    document: str | None = None
    """The column that has it; None, if the row is the document."""

    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What stands at a pointer where a document has nothing."""

    order: tuple[str, ...] = ()
    """Columns that say which of two comes first."""

    native: NativePlan | None = None
    """By which aggregates Spark reduces them, if it can."""

    counted: bool = False
    """Rows without a key: the document is the row, and how often it came or went."""

    columns: str = ""
    """Which columns tell counted rows apart: where they change, so do all rows."""

    keyless: bool = False
    """It is counted only since there is no key, which will do for delta updates."""

    renderings: Mapping[str, str] = field(default_factory=dict[str, str])
    """By column, as in `renderings_of`; empty, if a column has the document."""


Shape = Rows | Documents


@dataclass(frozen=True, slots=True)
class BindingPlan:
    """Where a binding's documents come from, and what becomes of them."""

    bound: Bound
    url: str
    """The storage location of its collection."""

    collection: CollectionState
    shape: Shape
    deletes: bool
    """Whether documents may be removed."""

    empties: bool = False
    """Whether the resource may be emptied before it is written anew."""
