"""The catalog of a lake: names, permanent ids and definitions of its objects.

    mz_objects             id, name, type, owner_id, definition
    mz_sources             id, name, type
    mz_source_progresses   id, name, source_id

These are collections of a separate storage location, read like all others. Ids are assigned
in order and never reused. A definition is the section of the file, with `${NAME}` unresolved:
the lake never contains the value of a variable.
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
from penstock.pipeline import CATALOG
from penstock.retry import pauses_ms

__all__ = [
    "WRITER",
    "Object",
    "RequestedObject",
    "Type",
    "known_objects",
    "remove_object",
    "to_requested",
    "update_catalog",
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
"""Writer id of the catalog lock. All processes share it, so a dead writer blocks no other."""

TRIES: Final = 8
"""Attempts before an error; each lost attempt means that another process wrote the catalog."""


@dataclass(frozen=True, slots=True)
class RequestedObject:
    """An object that the catalog should contain."""

    name: str
    type: Type
    definition: Any = None
    """The section of the file."""

    owner: str | None = None
    """Name of the source that owns the object."""


@dataclass(frozen=True, slots=True)
class Object:
    """An object in the catalog."""

    id: str
    name: str
    type: Type
    owner_id: str | None
    definition: Any

    @property
    def kind(self) -> str:
        """Kind of a source, for example `postgres`."""
        return next(iter(set(self.definition or {}) - {"progress"}), "")


def known_objects(location: str) -> list[Object]:
    """Return all objects of a lake by id; an empty list if it has no catalog yet."""
    url = join(location, CATALOG)
    if not is_storage_location(url):
        return []
    with persist.open(url, hold=False) as client:
        if "mz_objects" not in client.collections():
            return []
        return _objects(client.collection("mz_objects"))


def to_requested(known: Sequence[Object]) -> list[RequestedObject]:
    """Convert catalog objects to requested objects, unchanged."""
    names = {obj.id: obj.name for obj in known}
    return [
        RequestedObject(obj.name, obj.type, obj.definition, names.get(obj.owner_id or ""))
        for obj in known
    ]


def update_catalog(
    location: str,
    change: Callable[[Sequence[Object]], Iterable[RequestedObject]],
    *,
    clock: Clock = SYSTEM_CLOCK,
) -> list[Object]:
    """Replace the objects of a lake by `change(objects)`, and return the new objects.

    The lock is held only for this update, and is not acquired if nothing changes. Several
    processes can share a lake. A process that fences this one is not a newer instance of it,
    so the update is retried. `change` may be called several times, and must read its inputs
    on every call.

    Raises:
        TransientError: Other processes wrote the catalog during every attempt.
    """
    known = known_objects(location)
    if known and assign_ids(known, [*change(known)], 0)[0] == known:
        return known
    pauses = pauses_ms(random.Random())
    for turn in range(TRIES):
        try:
            with persist.open(join(location, CATALOG), writer=WRITER) as client:
                return _Catalog(client, clock).apply(change)
        except Fenced as error:
            if turn == TRIES - 1:
                raise TransientError(
                    f'could not write catalog of location "{location}": other processes write it',
                    hint="Try again. To find the other writers, run: penstock status LOCATION",
                ) from error
            clock.wait(threading.Event(), next(pauses))
    raise InternalError("unreachable")


def remove_object(removed: Object, location: str, *, clock: Clock = SYSTEM_CLOCK) -> None:
    """Remove an object and the objects that it owns from the catalog."""

    def remaining(known: Sequence[Object]) -> Iterable[RequestedObject]:
        left = [obj for obj in known if removed.id not in (obj.id, obj.owner_id)]
        return to_requested(left)

    update_catalog(location, remaining, clock=clock)


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

    def apply(
        self, change: Callable[[Sequence[Object]], Iterable[RequestedObject]]
    ) -> list[Object]:
        before = _objects(self._objects)
        last = self._memory.get(LAST_ID) or 0
        after, last = assign_ids(before, [*change(before)], last)
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
            raise InternalError("catalog was changed although the lock is held")


def assign_ids(
    before: Sequence[Object], requested: Sequence[RequestedObject], last: int
) -> tuple[list[Object], int]:
    """Return the requested objects with ids, sorted by id, and the last assigned id.

    An object with the same name and type keeps its id.
    """
    known = {(item.type, item.name): item for item in before}
    after: list[Object] = []
    for item in requested:
        obj = known.get((item.type, item.name))
        if obj is None:
            last += 1
            obj = Object(f"{PREFIXES[item.type]}{last}", item.name, item.type, None, None)
        after.append(replace(obj, definition=item.definition))
    sources = {item.name: item.id for item in after if item.type == "source"}
    owners = {(item.type, item.name): item.owner for item in requested}
    owned = [
        replace(item, owner_id=sources.get(owners[item.type, item.name] or "")) for item in after
    ]
    return sorted(owned, key=lambda item: int(item.id[1:])), last


def _objects(collection: persist.Collection) -> list[Object]:
    if not collection.upper:
        return []
    rows = collection.snapshot(collection.upper - 1).arrow().to_pylist()
    objects = [
        Object(
            row["id"],
            row["name"],
            row["type"],
            row["owner_id"],
            None if row["definition"] is None else json.loads(row["definition"]),
        )
        for row in rows
    ]
    return sorted(objects, key=lambda obj: int(obj.id[1:]))


Row = tuple[tuple[str, str | None], ...]


def _object_rows(objects: Sequence[Object]) -> set[Row]:
    return {
        (
            ("id", obj.id),
            ("name", obj.name),
            ("type", obj.type),
            ("owner_id", obj.owner_id),
            ("definition", None if obj.definition is None else _text(obj.definition)),
        )
        for obj in objects
    }


def _source_rows(objects: Sequence[Object]) -> set[Row]:
    return {
        (("id", obj.id), ("name", obj.name), ("type", obj.kind))
        for obj in objects
        if obj.type == "source"
    }


def _progress_rows(objects: Sequence[Object]) -> set[Row]:
    return {
        (("id", obj.id), ("name", obj.name), ("source_id", obj.owner_id))
        for obj in objects
        if obj.type == "source_progress"
    }


def _difference(before: set[Row], after: set[Row], time: int) -> list[Any]:
    deletes = [(dict(row), time, -1) for row in sorted(before - after, key=str)]
    return deletes + [(dict(row), time, +1) for row in sorted(after - before, key=str)]


def _text(definition: Any) -> str:
    return json.dumps(definition, sort_keys=True, ensure_ascii=False)
