"""Source kinds: one value describes everything that generic code needs of a kind.

The ingest loop, the catalog and the pipeline file use a kind only through `SourceKind`. It
contains no class of the source itself, so a reader of a lake does not import the source.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from penstock.clock import Clock
from penstock.data.remap_form import RemapForm
from penstock.sources.source import Source

__all__ = ["PropertyTest", "SourceKind"]

PropertyTest: TypeAlias = Callable[[str, object], bool]
"""Returns whether a property with this name and value is no secret."""


def _no_names(name: str, config: Any, /) -> Collection[str]:
    return ()


def _unknown_names(name: str, config: Any, /) -> Collection[str] | None:
    return None


def _no_test(section: Mapping[Any, Any], key: str, /) -> PropertyTest | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceKind:
    """A kind of source.

    `config` is the validated section of the pipeline file in all functions; `name` is the name
    of the source.
    """

    name: str
    """Key of the section in the pipeline file."""

    summary: str
    """Description of the section, for the schema of the pipeline file."""

    build: Callable[[str, Any, str, Clock], Source]
    """Return a source that is not open, given name, config, location of the lake and clock."""

    remap_forms: Mapping[str, RemapForm]
    """Stored form of the remap, by `Source.kind`. A stored form never changes."""

    section: Any = None
    """pydantic model of the section. Built-in kinds have theirs in `penstock.pipeline.sections`."""

    describe: Callable[[Mapping[str, Any]], str] = lambda section: "all records"
    """Return the tables or topics that a section reads, for `penstock plan`."""

    collections: Callable[[str, Any], Collection[str] | None] = _unknown_names
    """Return all collections that the source can create, None if upstream decides."""

    extra_collections: Callable[[str, Any], Collection[str]] = _no_names
    """Return the collections beyond the data whose names the file decides."""

    append_only: Callable[[str, Any], Collection[str]] = _no_names
    """Return the collections whose rows are never deleted."""

    table_collection: Callable[[str], str] = str
    """Return the collection, without the source, of a table as the file names it.

    Raises:
        UsageError: the text is not the name of a table.
    """

    harmless_properties: Callable[[Mapping[Any, Any], str], PropertyTest | None] = _no_test
    """Return, for a key of a section whose values are secrets by default, a test for the others."""

    spark_format: str = ""
    """Spark format of the scans of the source, if its jars must be in the Spark session."""
