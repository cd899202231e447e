"""What a file would change in a lake: pure, from what there is and what is written.

    what the catalog has ─┐
                          ├─► changes, each with what it does and what it costs
    what the file says  ──┘

Nothing here asks a server or a connector; what they would refuse is found by whoever can
reach them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

from penstock.catalog.objects import Object, Type
from penstock.catalog.secrets import objects_without_secrets, without_secrets
from penstock.data.collection_name import compose_name, source_of
from penstock.errors import UsageError
from penstock.pipeline.written import Missing, interpolated
from penstock.sources.postgres.names import TableName

__all__ = ["Action", "Change", "bound_to", "plan"]

Action = Literal["create", "alter", "backfill", "drop", "refuse", "unreachable", "note"]


STORED: Final[Sequence[Type]] = ("source", "materialization")
"""Types of objects that have a storage location, called after them."""

SOURCE_DROPPED: Final = (
    "its slot, and the publication if we made it, are dropped on the server; its collections "
    "are destroyed"
)
MATERIALIZATION_DROPPED: Final = "its connector deletes what it wrote; it holds nothing back"
ENDPOINT_CHANGED: Final = (
    "endpoint changes; if that is another target, it gets everything, and the one before keeps "
    "what it has"
)

Environment = Mapping[str, str]
NONE: Final[Environment] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that would be done, or would not."""

    action: Action
    type: Type
    name: str
    what: str
    """What comes of it, for people."""

    table: str = ""
    """Of a source: the table that it is about, if it is about one."""

    detail: str = ""
    hint: str = ""
    """Of what cannot be done: known facts, and the remedy."""

    def __str__(self) -> str:
        return f'{self.action} {self.type} "{self.name}": {self.what}'

    @property
    def is_problem(self) -> bool:
        """Whether the change cannot be made as things are."""
        return self.action in ("refuse", "unreachable")


def plan(
    known: Sequence[Object],
    written: Mapping[str, Any],
    *,
    types: Sequence[Type],
    environment: Environment = NONE,
) -> list[Change]:
    """What the file as it is `written` changes of what is `known`, for these types of objects.

    What variables hold, by the `environment`, is compared where it must be, and never told.
    """
    bound = {
        str(binding.get("collection")): name
        for name, said in (written.get("materializations") or {}).items()
        for binding in said.get("bindings") or ()
    }
    return [*_collections(known, written)] + [
        _unless_bound(change, bound)
        for each in ("source", "materialization")
        if each in types
        for change in _changes(
            each, known, objects_without_secrets(written.get(f"{each}s")), environment
        )
    ]


def bound_to(source: str, known: Sequence[Object]) -> dict[str, str]:
    """The materializations that take from a source, each with a collection that it takes."""
    ids = {each.id for each in known if (each.type, each.name) == ("source", source)}
    owned = {each.name for each in known if each.owner_id in ids}
    return {
        each.name: collection
        for each in known
        if each.type == "materialization"
        for binding in (each.definition or {}).get("bindings") or ()
        if (collection := str(binding.get("collection"))) in owned or _is_of(source, collection)
    }


def _unless_bound(change: Change, bound: Mapping[str, str]) -> Change:
    """A change, or that it is refused, since what it drops is bound in the same file."""
    if change.action != "drop" or change.type != "source":
        return change
    taken = [each for each in bound if _belongs(each, change)]
    if not taken:
        return change
    what = f'{change.what}; but materialization "{bound[taken[0]]}" is bound to {taken[0]}'
    hint = f"Remove the binding from the file too, or keep {_described(change)} in it."
    return replace(change, action="refuse", what=what, hint=hint)


def _described(change: Change) -> str:
    return f"table {change.table}" if change.table else f'{change.type} "{change.name}"'


def _belongs(collection: str, change: Change) -> bool:
    if change.table:
        return collection == f"{change.name}.{change.table}"
    return _is_of(change.name, collection)


def _is_of(source: str, collection: str) -> bool:
    return source_of(collection, {source}) is not None


def _collections(known: Sequence[Object], written: Mapping[str, Any]) -> Iterator[Change]:
    said = objects_without_secrets(written.get("collections"), inherited=False)
    for each in known:
        if each.type == "collection":
            was = without_secrets(each.definition or {}, inherited=False)
            now = said.get(each.name) or {}
            for option in _options(was, now, ignored=set()):
                what = f"its documents: {option.what}"
                yield Change(option.action, "collection", each.name, what)


def _changes(
    of: Type, known: Sequence[Object], written: Mapping[str, Any], environment: Environment
) -> Iterator[Change]:
    there = {each.name: each for each in known if each.type == of}
    others = {each.name: each.type for each in known if each.type in STORED and each.type != of}
    for name, said in written.items():
        if name in others:
            what = f"its name, and with it the storage location, is that of a {others[name]}"
            hint = f"Drop that first: penstock drop LOCATION {name}. Or choose another name."
            yield Change("refuse", of, name, what, hint=hint)
        elif name not in there:
            what = _new_source(said) if of == "source" else _new_materialization(said)
            yield Change("create", of, name, what)
        # Once more, since what was kept before may be hidden by now.
        elif (was := without_secrets(there[name].definition or {})) != said:
            if of == "source":
                made = _made_by(there[name], known)
                found = _source_differences(was, said, made, environment)
            else:
                found = _materialization_differences(was, said, environment)
            for each in found:
                yield Change(each.action, of, name, each.what, each.table, hint=each.hint)
    for name in [each for each in there if each not in written]:
        dropped = SOURCE_DROPPED if of == "source" else MATERIALIZATION_DROPPED
        yield Change("drop", of, name, dropped)


def _made_by(source: Object, known: Sequence[Object]) -> list[str]:
    """The collections of a source's tables, without its name before them."""
    before = f"{source.name}."
    return [
        each.name.removeprefix(before)
        for each in known
        if each.type == "collection" and each.owner_id == source.id and each.name.startswith(before)
    ]


class Difference(NamedTuple):
    """A change of one object, as `Change` has it."""

    action: Action
    what: str
    table: str = ""
    hint: str = ""


def _source_differences(
    was: Mapping[str, Any],
    now: Mapping[str, Any],
    made: Sequence[str],
    environment: Environment,
) -> Iterator[Difference]:
    kinds = [next(iter(set(each) - {"progress"}), "") for each in (was, now)]
    if kinds[0] != kinds[1]:
        yield Difference(
            "refuse",
            f"it reads from {kinds[0]}, and cannot become one that reads from {kinds[1]}",
            hint="Drop it first (penstock drop), or give the new one another name.",
        )
        return
    if was.get("progress") != now.get("progress"):
        called = now.get("progress") or "as by default"
        yield Difference("alter", f"its progress is called {called}")
    before, after = was[kinds[0]] or {}, now[kinds[0]] or {}
    tables = [_by_name(each.get("tables"), environment) for each in (before, after)]
    match tables:
        case [None, dict(named)]:
            yield Difference("alter", "only the tables that are named now are followed")
            yield from _table_differences({each: _Table(each, {}) for each in made}, named)
        case [dict(were), dict(named)]:
            yield from _table_differences(were, named)
        case [dict(), None]:
            what = "all published tables are followed; those that join are copied"
            yield Difference("alter", what)
        case _:
            pass
    yield from _options(before, after, ignored={"tables"})


def _table_differences(
    was: Mapping[str, "_Table"], now: Mapping[str, "_Table"]
) -> Iterator[Difference]:
    for each in [each for each in now if each not in was]:
        yield Difference("create", f"table {now[each].name} joins, and is copied")
    for each in [each for each in was if each not in now]:
        what = f"table {was[each].name} is left out; its collection is destroyed"
        yield Difference("drop", what, each)
    for each in [each for each in now if each in was]:
        if was[each].said != now[each].said:
            yield Difference(
                "refuse",
                f"table {now[each].name} was followed with other columns",
                hint="Leave it out first (penstock up FILE --allow-drop), and then name it again.",
            )


def _materialization_differences(
    was: Mapping[str, Any], now: Mapping[str, Any], environment: Environment
) -> Iterator[Difference]:
    if was.get("connector") != now.get("connector"):
        yield Difference(
            "refuse",
            "it has another connector, which knows nothing of what the first one wrote",
            hint="Give the new one another name, and drop this one.",
        )
        return
    before, after = (
        {_path(each): each for each in side.get("bindings") or ()} for side in (was, now)
    )
    for path in [each for each in after if each not in before]:
        collection = after[path].get("collection")
        what = f"resource {path} is bound, and gets the whole of {collection}"
        yield Difference("create", what)
    for path in [each for each in before if each not in after]:
        what = f"resource {path} is not written any more; what is there stays"
        yield Difference("alter", what)
    for path in [each for each in after if each in before]:
        yield from _binding_differences(path, before[path], after[path], environment)
    if was.get("endpoint") != now.get("endpoint"):
        yield Difference("alter", ENDPOINT_CHANGED)
    yield from _options(was, now, ignored={"bindings", "endpoint"})


def _binding_differences(
    path: str, was: Mapping[str, Any], now: Mapping[str, Any], environment: Environment
) -> Iterator[Difference]:
    said = now.get("backfill", 0)
    before, after = (_count(each.get("backfill", 0), environment) for each in (was, now))
    if before is None or after is None:
        # What a variable held then, nobody knows any more.
        if was.get("backfill", 0) != said:
            yield Difference("alter", f"resource {path} is written anew if backfill went up")
    elif after > before:
        yield Difference("backfill", f"resource {path} is written anew")
    elif after < before:
        yield Difference(
            "refuse",
            f"backfill of resource {path} went down to {said}",
            hint=f"It only goes up. Write {before}, or {before + 1} to replace the contents.",
        )
    if was.get("collection") != now.get("collection"):
        what = f"resource {path} gets the whole of {now.get('collection')} instead"
        yield Difference("backfill", what)
    for option in _options(was, now, ignored={"backfill", "collection"}):
        yield option._replace(what=f"resource {path}: {option.what}")


def _options(
    was: Mapping[str, Any], now: Mapping[str, Any], *, ignored: set[str]
) -> Iterator[Difference]:
    for key in sorted({*was, *now} - ignored):
        if was.get(key) != now.get(key):
            how = "is given" if key not in was else "is left out" if key not in now else "changes"
            yield Difference("alter", f"{key} {how}")


@dataclass(frozen=True, slots=True)
class _Table:
    name: str
    """As it is written."""

    said: Mapping[str, Any]
    """Of its columns."""


def _by_name(tables: Any, environment: Environment) -> dict[str, _Table] | None:
    """Tables that are named, by what their collections are called after the source."""
    if tables is None:
        return None
    named = [each if isinstance(each, dict) else {"name": str(each)} for each in tables]
    return {
        _called(each["name"], environment): _Table(
            each["name"],
            {key: sorted(each[key]) for key in ("exclude", "text") if each.get(key)},
        )
        for each in named
    }


def _called(name: str, environment: Environment) -> str:
    try:
        table = TableName.parse(_meant(name, environment))
    except UsageError:
        return name  # It is refused by whoever reads the file.
    return compose_name(table.schema, table.name)


def _count(value: Any, environment: Environment) -> int | None:
    """A number, if all of its variables are known."""
    try:
        return int(_meant(value, environment))
    except ValueError:
        return None


def _meant(value: Any, environment: Environment) -> Any:
    """What a value stands for, or itself if that cannot be known."""
    missing: list[Missing] = []
    meant = interpolated(value, environment, missing)
    return value if missing else meant


def _path(binding: Mapping[str, Any]) -> str:
    """By what a binding is known again: its resource, as it is written."""
    resource = binding.get("resource") or {}
    return ".".join(
        str(resource[key]) for key in sorted(resource) if not isinstance(resource[key], bool)
    )


def _new_source(said: Mapping[str, Any]) -> str:
    kind = next(iter(set(said) - {"progress"}), "")
    section = said.get(kind) or {}
    if kind == "kafka":
        topics = section.get("topics") or [section.get("topic")]
        return f"reads from kafka: {', '.join(map(str, topics))}"
    tables = section.get("tables")
    which = "all tables that are published" if tables is None else ", ".join(_names(tables))
    return f"reads from {kind}: {which}"


def _names(tables: Sequence[Any]) -> list[str]:
    return [each["name"] if isinstance(each, dict) else str(each) for each in tables]


def _new_materialization(said: Mapping[str, Any]) -> str:
    bound = ", ".join(str(each.get("collection")) for each in said.get("bindings") or ())
    connector = said.get("connector")
    return (
        f"into {connector if isinstance(connector, str) else 'a connector at an address'}: {bound}"
    )
