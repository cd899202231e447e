"""All source kinds: the only list of sources.

Built-in kinds are listed here. Other packages add kinds with an entry point of the group
`penstock.sources`, whose value is a `SourceKind`:

    [project.entry-points."penstock.sources"]
    jsonl = "jsonl_source:KIND"

Every process that reads the pipeline file or the lake finds the kind, without any call.
"""

import functools
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any, Final

import pyarrow as pa

from penstock.data.remap_form import KINESIS, PUBNUB, S3, RemapForm
from penstock.errors import UsageError
from penstock.sources.kafka.kind import KAFKA_KIND
from penstock.sources.kind import PropertyTest, SourceKind
from penstock.sources.postgres.kind import POSTGRES_KIND

__all__ = [
    "ENTRY_POINTS",
    "SourceKind",
    "harmless_properties",
    "remap_form",
    "source_kind",
    "source_kinds",
    "to_text",
]

ENTRY_POINTS: Final = "penstock.sources"
"""Group of the entry points of source kinds."""

_BUILT_IN: Final = (POSTGRES_KIND, KAFKA_KIND)

_DECIDED_FORMS: Final = {form.name: form for form in (KINESIS, PUBNUB, S3)}
"""Forms that are decided for kinds without a source."""


@functools.cache
def source_kinds() -> Mapping[str, SourceKind]:
    """Return all kinds by name, built-in kinds first.

    Raises:
        UsageError: two packages have a kind of the same name, or an entry point is no kind.
    """
    kinds = {kind.name: kind for kind in _BUILT_IN}
    for entry_point in sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name):
        try:
            kind = entry_point.load()
        except (ImportError, AttributeError) as error:
            raise UsageError(
                f'source kind "{entry_point.name}" could not be loaded',
                detail=f"The entry point is {entry_point.value}: {error}.",
                hint="Install the package again, or uninstall it.",
            ) from error
        if not isinstance(kind, SourceKind) or kind.name != entry_point.name:
            raise UsageError(
                f'entry point "{entry_point.name}" of group "{ENTRY_POINTS}" is not a source kind',
                detail=f"Its value is {entry_point.value}.",
                hint="Point it to a SourceKind with the name of the entry point.",
            )
        if kind.name in kinds:
            raise UsageError(
                f'source kind "{kind.name}" is defined twice',
                detail=f"One definition is {entry_point.value}.",
                hint="Uninstall one of the packages, or rename the kind.",
            )
        kinds[kind.name] = kind
    return kinds


def source_kind(name: str) -> SourceKind:
    """Return the kind with this name.

    Raises:
        UsageError: there is no such kind.
    """
    kinds = source_kinds()
    if name not in kinds:
        raise UsageError(
            f'source kind "{name}" does not exist',
            detail=f"The kinds are {', '.join(kinds)}.",
            hint="Install the package that defines it.",
        )
    return kinds[name]


def remap_form(kind: str) -> RemapForm:
    """Return the stored form of the remap of sources with `Source.kind`.

    Raises:
        UsageError: no installed source has this kind.
    """
    forms = dict(_DECIDED_FORMS)
    for source in source_kinds().values():
        forms |= source.remap_forms
    if kind not in forms:
        raise UsageError(
            f'source type "{kind}" has no remap',
            detail=f"Source types with a remap are {', '.join(forms)}.",
            hint="Install the package that defines the source.",
        )
    return forms[kind]


def harmless_properties(section: Mapping[Any, Any], key: str) -> PropertyTest | None:
    """Return a test for the values below `key` that are no secrets; None if names decide that."""
    tests = (kind.harmless_properties(section, key) for kind in source_kinds().values())
    return next((test for test in tests if test is not None), None)


def to_text(label: str, values: pa.Array) -> pa.Array:
    """Return values as their source prints them. `label` is the type name in the source."""
    # Imported here: it loads compiled code that most commands do not need.
    from penstock.sources.postgres.types import to_text as to_postgres_text

    return to_postgres_text(label, values)
