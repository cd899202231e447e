"""What a file would change in a lake: pure, from what there is and what is written.

    what the catalog has ─┐
                          ├─► changes, each with what it does and what it costs
    what the file says  ──┘

Nothing here asks a server or a connector; what they would refuse is found by whoever can
reach them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from penstock.catalog.objects import Object, Type
from penstock.catalog.secrets import objects_without_secrets, without_secrets

__all__ = ["Action", "Change", "plan"]

Action = Literal["create", "alter", "backfill", "drop", "refuse", "note"]


SOURCE_DROPPED: Final = (
    "its slot, and the publication if we made it, are dropped on the server; its collections "
    "are destroyed"
)
MATERIALIZATION_DROPPED: Final = "its connector deletes what it wrote; it holds nothing back"


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

    def __str__(self) -> str:
        return f'{self.action} {self.type} "{self.name}": {self.what}'


def plan(
    known: Sequence[Object], written: Mapping[str, Any], *, types: Sequence[Type]
) -> list[Change]:
    """What the file as it is `written` changes of what is `known`, for these types of objects."""
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
            each,
            {found.name: found for found in known if found.type == each},
            objects_without_secrets(written.get(f"{each}s")),
        )
    ]


def _unless_bound(change: Change, bound: Mapping[str, str]) -> Change:
    """A change, or that it is refused, since what it drops is bound in the same file."""
    if change.action != "drop" or change.type != "source":
        return change
    taken = [each for each in bound if _belongs(each, change)]
    if not taken:
        return change
    what = f'{change.what}; but materialization "{bound[taken[0]]}" is bound to {taken[0]}'
    return replace(change, action="refuse", what=what)


def _belongs(collection: str, change: Change) -> bool:
    if change.table:
        return collection == f"{change.name}.{change.table}"
    return collection == change.name or collection.startswith(f"{change.name}.")


def _collections(known: Sequence[Object], written: Mapping[str, Any]) -> Iterator[Change]:
    said = objects_without_secrets(written.get("collections"), inherited=False)
    for each in known:
        if each.type == "collection":
            was = without_secrets(each.definition or {}, inherited=False)
            now = said.get(each.name) or {}
            for action, what, *_ in _options(was, now, ignored=set()):
                yield Change(action, "collection", each.name, f"its documents: {what}")


def _changes(of: Type, known: Mapping[str, Object], written: Mapping[str, Any]) -> Iterator[Change]:
    source = of == "source"
    differences = _source_differences if source else _materialization_differences
    for name, said in written.items():
        if name not in known:
            what = _new_source(said) if source else _new_materialization(said)
            yield Change("create", of, name, what)
        # Once more, since what was kept before may be hidden by now.
        elif (was := without_secrets(known[name].definition or {})) != said:
            for action, what, *table in differences(was, said):
                yield Change(action, of, name, what, *table)
    for name in known.keys() - written.keys():
        yield Change("drop", of, name, SOURCE_DROPPED if source else MATERIALIZATION_DROPPED)


Difference = tuple[Action, str] | tuple[Action, str, str]


def _source_differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Difference]:
    kinds = [next(iter(set(each) - {"progress"}), "") for each in (was, now)]
    if kinds[0] != kinds[1]:
        yield (
            "refuse",
            (
                f"it reads from {kinds[0]}, and cannot become one that reads from {kinds[1]}; "
                "drop it first, or give the new one another name"
            ),
        )
        return
    if was.get("progress") != now.get("progress"):
        yield "alter", f"its progress is called {now.get('progress') or 'as by default'}"
    before, after = was[kinds[0]] or {}, now[kinds[0]] or {}
    tables = [_by_name(each.get("tables")) for each in (before, after)]
    if tables[0] is not None and tables[1] is not None:
        for name in tables[1].keys() - tables[0].keys():
            yield "create", f"table {name} joins, and is copied"
        for name in tables[0].keys() - tables[1].keys():
            yield "drop", f"table {name} is left out; its collection is destroyed", name
        for name in tables[0].keys() & tables[1].keys():
            if tables[0][name] != tables[1][name]:
                yield (
                    "refuse",
                    (
                        f"table {name} was followed with other columns; leave it out first "
                        "(--allow-drop), and then name it again"
                    ),
                )
    elif tables[0] is not None:
        yield "alter", "all published tables are followed; those that join are copied"
    elif tables[1] is not None:
        yield "alter", "only the tables that are named now are followed"
    yield from _options(before, after, ignored={"tables"})


def _materialization_differences(
    was: Mapping[str, Any], now: Mapping[str, Any]
) -> Iterator[Difference]:
    if was.get("connector") != now.get("connector"):
        yield (
            "refuse",
            (
                "it has another connector, which knows nothing of what the first one wrote; "
                "give the new one another name, and drop this one"
            ),
        )
        return
    before, after = (
        {_path(each): each for each in side.get("bindings") or ()} for side in (was, now)
    )
    for path in [each for each in after if each not in before]:
        collection = after[path].get("collection")
        yield "create", f"resource {path} is bound, and gets the whole of {collection}"
    for path in [each for each in before if each not in after]:
        yield "alter", f"resource {path} is not written any more; what is there stays"
    for path in [each for each in after if each in before]:
        yield from _binding_differences(path, before[path], after[path])
    yield from _options(was, now, ignored={"bindings"})


def _binding_differences(
    path: str, was: Mapping[str, Any], now: Mapping[str, Any]
) -> Iterator[Difference]:
    counts = [int(each.get("backfill", 0)) for each in (was, now)]
    if counts[1] > counts[0]:
        yield "backfill", f"resource {path} is written anew"
    elif counts[1] < counts[0]:
        yield "refuse", f"backfill of resource {path} went down to {counts[1]}; it only goes up"
    if was.get("collection") != now.get("collection"):
        yield "backfill", f"resource {path} gets the whole of {now.get('collection')} instead"
    for action, what, *_ in _options(was, now, ignored={"backfill", "collection"}):
        yield action, f"resource {path}: {what}"


def _options(
    was: Mapping[str, Any], now: Mapping[str, Any], *, ignored: set[str]
) -> Iterator[Difference]:
    for key in sorted({*was, *now} - ignored):
        if was.get(key) != now.get(key):
            how = "is given" if key not in was else "is left out" if key not in now else "changes"
            yield "alter", f"{key} {how}"


def _by_name(tables: Any) -> dict[str, Any] | None:
    if tables is None:
        return None
    named = [each if isinstance(each, dict) else {"name": each} for each in tables]
    return {
        each["name"]: {key: sorted(each[key]) for key in ("exclude", "text") if each.get(key)}
        for each in named
    }


def _path(binding: Mapping[str, Any]) -> str:
    """By what a binding is known again: its resource, as it is written."""
    resource = binding.get("resource") or {}
    return ".".join(
        str(resource[key]) for key in sorted(resource) if not isinstance(resource[key], bool)
    )


def _new_source(said: Mapping[str, Any]) -> str:
    kind = next(iter(set(said) - {"progress"}), "")
    tables = (said.get(kind) or {}).get("tables")
    which = "all tables that are published" if tables is None else ", ".join(_by_name(tables) or ())
    return f"reads from {kind}: {which}"


def _new_materialization(said: Mapping[str, Any]) -> str:
    bound = ", ".join(str(each.get("collection")) for each in said.get("bindings") or ())
    connector = said.get("connector")
    return (
        f"into {connector if isinstance(connector, str) else 'a connector at an address'}: {bound}"
    )
