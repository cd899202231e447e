"""Changes that a file makes to a lake. Pure: a function of the catalog and the file.

    catalog ─┐
             ├─► changes, each with its effect
    file    ─┘

Nothing here contacts a server or a connector. The preflight check finds what they would
reject.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

from penstock.catalog.objects import Object, Type
from penstock.catalog.redaction import objects_without_secrets, without_secrets
from penstock.data.collection_name import source_of
from penstock.errors import UsageError
from penstock.pipeline import UnsetVariable, substitute
from penstock.sources.registry import SourceKind, source_kind

__all__ = ["Action", "Change", "bound_materializations", "plan"]

Action = Literal["create", "alter", "backfill", "drop", "refuse", "unreachable", "note"]


STORED: Final[Sequence[Type]] = ("source", "materialization")
"""Object types with a storage location of the same name."""

SOURCE_DROPPED: Final = (
    "drops its replication slot, the publication if Penstock created it, and its collections"
)
MATERIALIZATION_DROPPED: Final = (
    "its connector drops the resources that it created; its holds are released"
)
ENDPOINT_CHANGED: Final = (
    "endpoint changes; a different endpoint receives all rows, and the previous one keeps its rows"
)

Environment = Mapping[str, str]
NONE: Final[Environment] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Change:
    """One change, or a reason why it cannot be made."""

    action: Action
    type: Type
    name: str
    what: str
    """Effect of the change, as text."""

    table: str = ""
    """For a source: the table that changes, if it is only one."""

    adds: bool = False
    """The change adds a table or a binding, with the prerequisites of a new object."""

    detail: str = ""
    hint: str = ""
    """For a problem: known facts, and the remedy."""

    def __str__(self) -> str:
        return f'{self.action} {self.type} "{self.name}": {self.what}'

    @property
    def is_new(self) -> bool:
        """Return whether the object, or a part of it, is new."""
        return self.action == "create" or self.adds

    @property
    def is_problem(self) -> bool:
        """Return whether the change cannot be made."""
        return self.action in ("refuse", "unreachable")


def plan(
    known: Sequence[Object],
    file_sections: Mapping[str, Any],
    *,
    types: Sequence[Type],
    environment: Environment = NONE,
) -> list[Change]:
    """Return the changes from the known objects to the file, for these object types.

    Values of variables from the `environment` are compared where necessary, and never
    appear in a change.
    """
    materialization_of = {
        str(binding.get("collection")): name
        for name, section in (file_sections.get("materializations") or {}).items()
        for binding in section.get("bindings") or ()
    }
    return [*_collections(known, file_sections)] + [
        _unless_bound(change, materialization_of)
        for object_type in ("source", "materialization")
        if object_type in types
        for change in _changes(
            object_type,
            known,
            objects_without_secrets(file_sections.get(f"{object_type}s")),
            environment,
        )
    ]


def bound_materializations(source: str, known: Sequence[Object]) -> dict[str, str]:
    """Return the materializations bound to a source, each with one of its collections."""
    ids = {obj.id for obj in known if (obj.type, obj.name) == ("source", source)}
    owned = {obj.name for obj in known if obj.owner_id in ids}
    return {
        obj.name: collection
        for obj in known
        if obj.type == "materialization"
        for binding in (obj.definition or {}).get("bindings") or ()
        if (collection := str(binding.get("collection"))) in owned
        or _belongs_to_source(source, collection)
    }


def _unless_bound(change: Change, materialization_of: Mapping[str, str]) -> Change:
    """Reject the change if the file binds a collection that it drops."""
    if change.action != "drop" or change.type != "source":
        return change
    collections = [collection for collection in materialization_of if _belongs(collection, change)]
    if not collections:
        return change
    first = collections[0]
    what = f'{change.what}, but materialization "{materialization_of[first]}" is bound to {first}'
    hint = f"Remove the binding from the file too, or keep {_describe(change)} in it."
    return replace(change, action="refuse", what=what, hint=hint)


def _describe(change: Change) -> str:
    return f"table {change.table}" if change.table else f'{change.type} "{change.name}"'


def _belongs(collection: str, change: Change) -> bool:
    if change.table:
        return collection == f"{change.name}.{change.table}"
    return _belongs_to_source(change.name, collection)


def _belongs_to_source(source: str, collection: str) -> bool:
    return source_of(collection, {source}) is not None


def _collections(known: Sequence[Object], file_sections: Mapping[str, Any]) -> Iterator[Change]:
    sections = objects_without_secrets(file_sections.get("collections"), inherited=False)
    for obj in known:
        if obj.type == "collection":
            old = without_secrets(obj.definition or {}, inherited=False)
            new = sections.get(obj.name) or {}
            for option in _options(old, new, ignored=set()):
                what = f"documents: {option.what}"
                yield Change(option.action, "collection", obj.name, what)


def _changes(
    object_type: Type,
    known: Sequence[Object],
    file_sections: Mapping[str, Any],
    environment: Environment,
) -> Iterator[Change]:
    by_name = {obj.name: obj for obj in known if obj.type == object_type}
    others = {obj.name: obj.type for obj in known if obj.type in STORED and obj.type != object_type}
    for name, section in file_sections.items():
        if name in others:
            what = f"the name and the storage location belong to a {others[name]}"
            hint = f"Drop it first: penstock drop LOCATION {name}. Or use another name."
            yield Change("refuse", object_type, name, what, hint=hint)
        elif name not in by_name:
            what = (
                _describe_new_source(section)
                if object_type == "source"
                else _describe_new_materialization(section)
            )
            yield Change("create", object_type, name, what)
        # Redact again: the stored definition may be older than a redaction rule.
        elif (old := without_secrets(by_name[name].definition or {})) != section:
            if object_type == "source":
                collections = _table_collections(by_name[name], known)
                differences = _source_differences(old, section, collections, environment)
            else:
                differences = _materialization_differences(old, section, environment)
            for diff in differences:
                yield Change(
                    diff.action,
                    object_type,
                    name,
                    diff.what,
                    diff.table,
                    adds=diff.adds,
                    hint=diff.hint,
                )
    for name in [name for name in by_name if name not in file_sections]:
        dropped = SOURCE_DROPPED if object_type == "source" else MATERIALIZATION_DROPPED
        yield Change("drop", object_type, name, dropped)


def _table_collections(source: Object, known: Sequence[Object]) -> list[str]:
    """Return the table collections of a source, without the prefix of its name."""
    prefix = f"{source.name}."
    return [
        obj.name.removeprefix(prefix)
        for obj in known
        if obj.type == "collection" and obj.owner_id == source.id and obj.name.startswith(prefix)
    ]


class Difference(NamedTuple):
    """One difference of an object, as in `Change`."""

    action: Action
    what: str
    table: str = ""
    adds: bool = False
    hint: str = ""


def _source_differences(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    collections: Sequence[str],
    environment: Environment,
) -> Iterator[Difference]:
    kinds = [next(iter(set(section) - {"progress"}), "") for section in (old, new)]
    if kinds[0] != kinds[1]:
        yield Difference(
            "refuse",
            f"its kind cannot change from {kinds[0]} to {kinds[1]}",
            hint="Drop the source first (penstock drop), or use another name for the new one.",
        )
        return
    if old.get("progress") != new.get("progress"):
        name = new.get("progress") or "by default"
        yield Difference("alter", f"progress relation is named {name}")
    old_section, new_section = old[kinds[0]] or {}, new[kinds[0]] or {}
    kind = source_kind(kinds[0])
    tables = [
        _by_name(section.get("tables"), kind, environment) for section in (old_section, new_section)
    ]
    match tables:
        case [None, dict(new_tables)]:
            yield Difference("alter", "only the listed tables are captured")
            yield from _table_differences(
                {name: _Table(name, {}) for name in collections}, new_tables
            )
        case [dict(old_tables), dict(new_tables)]:
            yield from _table_differences(old_tables, new_tables)
        case [dict(), None]:
            what = "all published tables are captured; new tables get an initial snapshot"
            yield Difference("alter", what)
        case _:
            pass
    yield from _options(old_section, new_section, ignored={"tables"})


def _table_differences(
    old: Mapping[str, "_Table"], new: Mapping[str, "_Table"]
) -> Iterator[Difference]:
    for table_name in [table_name for table_name in new if table_name not in old]:
        what = f"table {new[table_name].name} is added, with an initial snapshot"
        yield Difference("alter", what, adds=True)
    for table_name in [table_name for table_name in old if table_name not in new]:
        what = f"table {old[table_name].name} is removed; its collection is dropped"
        yield Difference("drop", what, table_name)
    for table_name in [table_name for table_name in new if table_name in old]:
        if old[table_name].columns != new[table_name].columns:
            yield Difference(
                "refuse",
                f"table {new[table_name].name} changes its columns",
                hint="Remove the table first (penstock up FILE --allow-drop), then add it again.",
            )


def _materialization_differences(
    old: Mapping[str, Any], new: Mapping[str, Any], environment: Environment
) -> Iterator[Difference]:
    if old.get("connector") != new.get("connector"):
        yield Difference(
            "refuse",
            "its connector changes",
            hint="Use another name for the new materialization, and drop this one.",
        )
        return
    old_bindings, new_bindings = (
        {_path(binding): binding for binding in side.get("bindings") or ()} for side in (old, new)
    )
    for path in [path for path in new_bindings if path not in old_bindings]:
        collection = new_bindings[path].get("collection")
        what = f"resource {path} is added, with a backfill from {collection}"
        yield Difference("alter", what, adds=True)
    for path in [path for path in old_bindings if path not in new_bindings]:
        what = f"resource {path} is removed; its rows remain"
        yield Difference("alter", what)
    for path in [path for path in new_bindings if path in old_bindings]:
        yield from _binding_differences(path, old_bindings[path], new_bindings[path], environment)
    if old.get("endpoint") != new.get("endpoint"):
        yield Difference("alter", ENDPOINT_CHANGED)
    yield from _options(old, new, ignored={"bindings", "endpoint"})


def _binding_differences(
    path: str, old: Mapping[str, Any], new: Mapping[str, Any], environment: Environment
) -> Iterator[Difference]:
    backfill = new.get("backfill", 0)
    old_count, new_count = (
        _count(binding.get("backfill", 0), environment) for binding in (old, new)
    )
    if old_count is None or new_count is None:
        # The earlier value of the variable is unknown.
        if old.get("backfill", 0) != backfill:
            yield Difference("alter", f"resource {path} is backfilled if backfill increased")
    elif new_count > old_count:
        yield Difference("backfill", f"resource {path} is backfilled")
    elif new_count < old_count:
        yield Difference(
            "refuse",
            f"backfill of resource {path} decreases to {backfill}",
            hint=f"Backfill can only increase. Write {old_count}, or {old_count + 1} to replace "
            "the contents.",
        )
    if old.get("collection") != new.get("collection"):
        what = f"resource {path} is backfilled from {new.get('collection')}"
        yield Difference("backfill", what)
    for option in _options(old, new, ignored={"backfill", "collection"}):
        yield option._replace(what=f"resource {path}: {option.what}")


def _options(
    old: Mapping[str, Any], new: Mapping[str, Any], *, ignored: set[str]
) -> Iterator[Difference]:
    for key in sorted({*old, *new} - ignored):
        if old.get(key) != new.get(key):
            verb = "is added" if key not in old else "is removed" if key not in new else "changes"
            yield Difference("alter", f"{key} {verb}")


@dataclass(frozen=True, slots=True)
class _Table:
    name: str
    """Name as in the file."""

    columns: Mapping[str, Any]
    """Options of its columns."""


def _by_name(tables: Any, kind: SourceKind, environment: Environment) -> dict[str, _Table] | None:
    """Return the listed tables by collection name, without the source."""
    if tables is None:
        return None
    sections = [table if isinstance(table, dict) else {"name": str(table)} for table in tables]
    return {
        _collection_name(table["name"], kind, environment): _Table(
            table["name"],
            {key: sorted(table[key]) for key in ("exclude", "text") if table.get(key)},
        )
        for table in sections
    }


def _collection_name(name: str, kind: SourceKind, environment: Environment) -> str:
    try:
        return kind.table_collection(_resolve(name, environment))
    except UsageError:
        return name  # The validation of the file rejects it.


def _count(value: Any, environment: Environment) -> int | None:
    """Return the integer, or None if a variable is not set."""
    try:
        return int(_resolve(value, environment))
    except ValueError:
        return None


def _resolve(value: Any, environment: Environment) -> Any:
    """Substitute variables, or return the value unchanged if one is not set."""
    missing: list[UnsetVariable] = []
    resolved = substitute(value, environment, missing)
    return value if missing else resolved


def _path(binding: Mapping[str, Any]) -> str:
    """Return the resource of a binding as text, its identity in the file."""
    resource = binding.get("resource") or {}
    return ".".join(
        str(resource[key]) for key in sorted(resource) if not isinstance(resource[key], bool)
    )


def _describe_new_source(section: Mapping[str, Any]) -> str:
    kind = next(iter(set(section) - {"progress"}), "")
    return f"reads from {kind}: {source_kind(kind).describe(section.get(kind) or {})}"


def _describe_new_materialization(section: Mapping[str, Any]) -> str:
    bound = ", ".join(str(binding.get("collection")) for binding in section.get("bindings") or ())
    connector = section.get("connector")
    return f"into {connector if isinstance(connector, str) else 'a remote connector'}: {bound}"
