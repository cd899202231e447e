"""The two shapes of collections for a connector: rows of a table, and documents to reduce.

Rows        the changes alone determine the last row of each key
Documents   each row is a document, and is reduced into the stored document of its key
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
"""Key column added to rows without a key: a digest of the row."""

COUNT: Final = "mz_count"
"""Column with the multiplicity of such a row."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Collection that is stored as the last row of each key."""

    key: tuple[str, ...]
    """Key columns."""

    renderings: Mapping[str, str] = field(default_factory=dict[str, str])
    """Rendering of each column, as `renderings_of` returns it."""


@dataclass(frozen=True, slots=True)
class Documents:
    """Collection that is stored as one reduced document for each key."""

    reducer: Reducer
    key: tuple[str, ...]
    """JSON pointers into a document."""

    document: str | None = None
    """Column that holds the document; None if the row is the document."""

    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Default values by pointer, for documents without a value there."""

    order: tuple[str, ...] = ()
    """Columns that order the documents of a key before they are reduced."""

    native: NativePlan | None = None
    """Spark aggregates that reduce the documents; None if Spark cannot express them."""

    counted: bool = False
    """True for rows without a key: a document is the row with the sum of its diffs."""

    columns: str = ""
    """Hash of the columns of counted rows. If it changes, the keys of all rows change."""

    keyless: bool = False
    """True if rows are counted only because the collection has no key.

    Such a collection can be bound only with delta updates.
    """

    renderings: Mapping[str, str] = field(default_factory=dict[str, str])
    """Rendering of each column, as `renderings_of` returns it.

    Empty if a column holds the document.
    """


Shape = Rows | Documents


@dataclass(frozen=True, slots=True)
class BindingPlan:
    """Inputs of a binding in one transaction, and the operations that its resource accepts."""

    bound: Bound
    url: str
    """Storage location of the collection."""

    collection: CollectionState
    shape: Shape
    deletes: bool
    """True if rows of the resource may be deleted."""

    empties: bool = False
    """True if the resource may be truncated before all rows are stored again."""
