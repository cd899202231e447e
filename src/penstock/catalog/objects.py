"""What a lake's objects are called, and the ids under which they never change.

    mz_objects             id, name, type, owner_id, definition
    mz_sources             id, name, type
    mz_source_progresses   id, name, source_id

These are collections of a storage location of their own, read like any other. Ids are given
out in order and never again, whatever is dropped. A definition is what the file says,
`${NAME}` as it stands there: what a variable holds is nowhere in a lake.
"""

import json
import random
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import pyarrow as pa

from penstock import persist
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.durable import join
from penstock.errors import Fenced, InternalError, TransientError
from penstock.persist import AppendTo
from penstock.persist.lake import is_storage_location
from penstock.persist.state_store import StateStore
from penstock.pipeline.file import CATALOG
from penstock.retry import pauses_ms

__all__ = [
    "WRITER",
    "Object",
    "Type",
    "Wanted",
    "as_wanted",
    "catalogued",
    "forget_object",
    "known_objects",
]

Type = Literal["source", "source_progress", "collection", "materialization"]

PREFIXES: Final[Mapping[Type, str]] = {
    "source": "s",
    "source_progress": "p",
    "collection": "c",
    "materialization": "m",
}
OBJECTS: Final = pa.schema(
    [
        pa.field("id", pa.string(), False),
        pa.field("name", pa.string(), False),
        pa.field("type", pa.string(), False),
        pa.field("owner_id", pa.string()),
        pa.field("definition", pa.string()),
    ]
)
SOURCES: Final = pa.schema(
    [pa.field(name, pa.string(), False) for name in ("id", "name", "type")],
)
PROGRESSES: Final = pa.schema(
    [pa.field(name, pa.string(), False) for name in ("id", "name", "source_id")],
)
LAST_ID: Final = "last id"
WRITER: Final = "catalog"
"""The id of its lock, for whoever takes it: one that died with it keeps nobody out."""

TRIES: Final = 8
"""How often somebody else may come in between; each of them has then written what it knows."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """An object that there is to be."""

    name: str
    type: Type
    definition: Any = None
    """What the file says of it."""

    owner: str | None = None
    """The source to which it belongs."""


@dataclass(frozen=True, slots=True)
class Object:
    """An object that there is."""

    id: str
    name: str
    type: Type
    owner_id: str | None
    definition: Any

    @property
    def kind(self) -> str:
        """Of a source, what it reads from."""
        return next(iter(set(self.definition or {}) - {"progress"}), "")


def known_objects(location: str) -> list[Object]:
    """All objects of a lake, by id; none if it has no catalog yet."""
    url = join(location, CATALOG)
    if not is_storage_location(url):
        return []
    with persist.open(url, hold=False) as client:
        if "mz_objects" not in client.collections():
            return []
        return _objects(client.collection("mz_objects"))


def as_wanted(known: Sequence[Object]) -> list[Wanted]:
    """What there is, as it is wanted if nothing is to change."""
    names = {each.id: each.name for each in known}
    return [
        Wanted(each.name, each.type, each.definition, names.get(each.owner_id or ""))
        for each in known
    ]


def catalogued(
    location: str,
    change: Callable[[Sequence[Object]], Iterable[Wanted]],
    *,
    clock: Clock = SYSTEM_CLOCK,
) -> list[Object]:
    """Let the lake have the objects that `change` makes of those there are; all of them then.

    The lock is taken for this alone, and not at all if nothing changes. Several processes
    may share a lake, each with its part of it; one that comes in between is not a newer
    self, so this looks again and goes on. What `change` finds out by itself it must find
    out when it is called, which may be several times.

    Raises:
        TransientError: others came in between each time.
    """
    known = known_objects(location)
    if known and resolved(known, [*change(known)], 0)[0] == known:
        return known
    pauses = pauses_ms(random.Random())
    for turn in range(TRIES):
        try:
            with persist.open(join(location, CATALOG), writer=WRITER) as client:
                return _Catalog(client, clock).become(change)
        except Fenced as error:
            if turn == TRIES - 1:
                raise TransientError(
                    f'catalog of location "{location}" cannot be written: others write it',
                    hint="Try again; if it stays so, see who does: penstock status LOCATION",
                ) from error
            clock.wait(threading.Event(), next(pauses))
    raise InternalError("unreachable")


def forget_object(gone: Object, location: str, *, clock: Clock = SYSTEM_CLOCK) -> None:
    """Let the lake have an object no more, nor what belongs to it."""

    def rest(known: Sequence[Object]) -> Iterable[Wanted]:
        left = [each for each in known if gone.id not in (each.id, each.owner_id)]
        return as_wanted(left)

    catalogued(location, rest, clock=clock)


class _Catalog:
    def __init__(self, client: persist.Client, clock: Clock) -> None:
        self._client = client
        self._clock = clock
        self._memory = StateStore(client, CATALOG)
        self._objects, self._sources, self._progresses = (
            client.create_or_load(name, schema=schema, key_columns=["id"])
            for name, schema in (
                ("mz_objects", OBJECTS),
                ("mz_sources", SOURCES),
                ("mz_source_progresses", PROGRESSES),
            )
        )

    def become(self, change: Callable[[Sequence[Object]], Iterable[Wanted]]) -> list[Object]:
        before = _objects(self._objects)
        last = self._memory.get(LAST_ID) or 0
        after, last = resolved(before, [*change(before)], last)
        if after != before or not self._objects.upper:
            self._write(before, after, last)
        return after

    def _write(self, before: Sequence[Object], after: Sequence[Object], last: int) -> None:
        time = max(self._clock.now_ms(), self._objects.upper)
        notes, upper = {LAST_ID: last}, self._memory.upper
        appends = [
            AppendTo(
                collection, _difference(rows(before), rows(after), time), collection.upper, time + 1
            )
            for collection, rows in (
                (self._objects, _object_rows),
                (self._sources, _source_rows),
                (self._progresses, _progress_rows),
            )
        ]
        appends.append(
            AppendTo(self._memory.collection, self._memory.updates(notes, upper), upper, upper + 1)
        )
        if not isinstance(self._client.append_all(appends), persist.Appended):
            raise InternalError("the catalog was written by another with our lock")


def resolved(
    before: Sequence[Object], wanted: Sequence[Wanted], last: int
) -> tuple[list[Object], int]:
    """What there is to be, by id, and the last id given out.

    Who keeps name and type keeps the id.
    """
    known = {(each.type, each.name): each for each in before}
    after: list[Object] = []
    for each in wanted:
        found = known.get((each.type, each.name))
        if found is None:
            last += 1
            found = Object(f"{PREFIXES[each.type]}{last}", each.name, each.type, None, None)
        after.append(replace(found, definition=each.definition))
    sources = {each.name: each.id for each in after if each.type == "source"}
    owners = {(each.type, each.name): each.owner for each in wanted}
    owned = [
        replace(each, owner_id=sources.get(owners[each.type, each.name] or "")) for each in after
    ]
    return sorted(owned, key=lambda each: int(each.id[1:])), last


def _objects(collection: persist.Collection) -> list[Object]:
    if not collection.upper:
        return []
    rows = collection.snapshot(collection.upper - 1).arrow().to_pylist()
    found = [
        Object(
            row["id"],
            row["name"],
            row["type"],
            row["owner_id"],
            None if row["definition"] is None else json.loads(row["definition"]),
        )
        for row in rows
    ]
    return sorted(found, key=lambda each: int(each.id[1:]))


Row = tuple[tuple[str, str | None], ...]


def _object_rows(objects: Sequence[Object]) -> set[Row]:
    return {
        (
            ("id", each.id),
            ("name", each.name),
            ("type", each.type),
            ("owner_id", each.owner_id),
            ("definition", None if each.definition is None else _text(each.definition)),
        )
        for each in objects
    }


def _source_rows(objects: Sequence[Object]) -> set[Row]:
    return {
        (("id", each.id), ("name", each.name), ("type", each.kind))
        for each in objects
        if each.type == "source"
    }


def _progress_rows(objects: Sequence[Object]) -> set[Row]:
    return {
        (("id", each.id), ("name", each.name), ("source_id", each.owner_id))
        for each in objects
        if each.type == "source_progress"
    }


def _difference(before: set[Row], after: set[Row], time: int) -> list[Any]:
    gone = [(dict(row), time, -1) for row in sorted(before - after, key=str)]
    return gone + [(dict(row), time, +1) for row in sorted(after - before, key=str)]


def _text(definition: Any) -> str:
    return json.dumps(definition, sort_keys=True, ensure_ascii=False)
