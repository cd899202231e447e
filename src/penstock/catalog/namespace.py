"""The namespace of a lake: taken names, and the rules for new ones.

Sources, materializations, collections and progress relations share it. Two rules go beyond
equal names. Names that start with `SOURCE.` belong to that source, so the name of a table
that is added later is always free. A source and its own collection may have the same name,
as for a source of one topic.

A name is taken by a catalog entry before the object is created. A process that dies in
between finds the name taken by its own object.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Final

from penstock.catalog.inspect import list_collections
from penstock.catalog.objects import Object, RequestedObject, to_requested, update_catalog
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.durable import join, normal
from penstock.errors import UsageError
from penstock.persist.append.user_collections import USER_LOCATION
from penstock.persist.lake import is_storage_location
from penstock.persist.lock import may_be_alive, owner_of
from penstock.pipeline import CATALOG, Pipeline, SourceSection

__all__ = [
    "check_free",
    "describe",
    "holder_of",
    "listed_names",
    "name_conflicts",
    "names_of_source",
    "progress_of_source",
    "take_name_in_lake",
    "take_user_collection",
    "user_location_is_locked",
]

RESERVED: Final = "mz_"


def listed_names(location: str) -> list[RequestedObject]:
    """Return the collections and progress relations that the storage locations of a lake have.

    The catalog has all of them, except those of versions that did not take names. The owner
    is the storage location, or None for user collections.
    """
    return [
        RequestedObject(
            item.name,
            "source_progress" if item.progress else "collection",
            owner=None if item.storage_location == USER_LOCATION else item.storage_location,
        )
        for item in sorted(list_collections(location))
    ]


def name_conflicts(
    pipeline: Pipeline, taken: Sequence[RequestedObject]
) -> Iterator[tuple[RequestedObject, str]]:
    """Yield each object of a file whose name is taken, with the holder of the name.

    The objects of the file are also compared with each other. A progress relation without a
    name in the file gets a free name, and never conflicts.
    """
    requested_objects = [
        item
        for name, section in pipeline.sources.items()
        for item in names_of_source(name, section)
    ]
    requested_objects += [
        RequestedObject(name, "materialization") for name in pipeline.materializations
    ]
    # Sources and materializations first: their names are harder to change.
    requested_objects.sort(key=lambda item: item.type not in ("source", "materialization"))
    agreed = [*taken]
    for item in requested_objects:
        holder = holder_of(item, agreed)
        if holder is not None:
            yield item, holder
        agreed.append(item)


def names_of_source(name: str, section: SourceSection) -> list[RequestedObject]:
    """Return the objects of a source whose names the file decides."""
    requested_objects = [
        RequestedObject(name, "source"),
        RequestedObject(f"{name}_remap", "collection", owner=name),
    ]
    requested_objects += [
        RequestedObject(collection, "collection", owner=name)
        for collection in section.kind.extra_collections(name, section.config)
    ]
    if section.progress is not None:
        requested_objects.append(RequestedObject(section.progress, "source_progress", owner=name))
    return requested_objects


def progress_of_source(name: str, taken: Sequence[RequestedObject]) -> RequestedObject:
    """Return the progress relation of a source: the existing one, or one with a free name."""
    for item in taken:
        if item.type == "source_progress" and item.owner == name:
            return item
    names = (f"{name}_progress{number or ''}" for number in count())
    candidates = (RequestedObject(item, "source_progress", owner=name) for item in names)
    return next(item for item in candidates if holder_of(item, taken) is None)


def check_free(requested: RequestedObject, taken: Iterable[RequestedObject]) -> None:
    """Check that an object may have its name.

    Raises:
        UsageError: Another object has the name, or the name is reserved.
    """
    holder = holder_of(requested, taken)
    if holder is not None:
        raise UsageError(
            f"cannot create {describe(requested)}: the name is taken",
            detail=f"The name belongs to {holder}.",
            hint=_remedy(requested),
        )


def holder_of(requested: RequestedObject, taken: Iterable[RequestedObject]) -> str | None:
    """Return a description of the object that holds the name, or None if the name is free."""
    others = [*taken]
    itself = (requested.type, requested.name, requested.owner)
    if any((item.type, item.name, item.owner) == itself for item in others):
        # A progress relation of an older version can hide the catalog, and can be renamed.
        others = []
        if requested.type != "source_progress":
            return None
    if requested.name.startswith(RESERVED):
        return f"the catalog: names that start with {RESERVED} are reserved"
    if requested.type in ("source", "materialization") and requested.name in (
        CATALOG,
        USER_LOCATION,
    ):
        return "a storage location that every lake has"
    return next((describe(item) for item in others if _clash(requested, item)), None)


def take_name_in_lake(url: str, name: str) -> None:
    """Take the name of a user collection about to be created in storage location `url`.

    Only the storage location of the user collections of a lake has a catalog.

    Raises:
        UsageError: The name is taken.
    """
    lake, _, folder = normal(url).rpartition("/")
    if folder == USER_LOCATION and not lake.endswith((":", "/")):
        take_user_collection(lake, name)


def take_user_collection(location: str, name: str, *, clock: Clock = SYSTEM_CLOCK) -> None:
    """Take the name of a user collection in the catalog of a lake.

    The caller holds the lock of the storage location of user collections. While it does, no
    other process removes a name whose collection is not created yet.

    Raises:
        UsageError: The name is taken.
    """
    requested, listed = RequestedObject(name, "collection"), listed_names(location)

    def added(known: Sequence[Object]) -> Iterator[RequestedObject]:
        check_free(requested, [*listed, *to_requested(known)])
        yield from to_requested(known)
        if not any((item.type, item.name) == ("collection", name) for item in known):
            yield requested

    update_catalog(location, added, clock=clock)


def user_location_is_locked(location: str) -> bool:
    """Return whether a job may be about to create a user collection whose name it has taken."""
    url = join(location, USER_LOCATION)
    writer = owner_of(url) if is_storage_location(url) else None
    return writer is not None and may_be_alive(writer)


def describe(item: RequestedObject) -> str:
    """Describe an object with its kind and owner, for messages."""
    match item.type:
        case "source_progress":
            kind = "progress relation"
        case "collection" if item.owner is None:
            kind = "user collection"
        case _:
            kind = item.type
    owned = "" if item.owner is None else f' of source "{item.owner}"'
    return f'{kind} "{item.name}"{owned}'


def _clash(one: RequestedObject, other: RequestedObject) -> bool:
    if one.name == other.name:
        return not (_is_topic_of(one, other) or _is_topic_of(other, one))
    return _is_below(one, other) or _is_below(other, one)


def _is_topic_of(collection: RequestedObject, source: RequestedObject) -> bool:
    return (collection.type, source.type, collection.owner) == ("collection", "source", source.name)


def _is_below(source: RequestedObject, other: RequestedObject) -> bool:
    """Return whether only this source may create the name of the other object."""
    return (
        source.type == "source"
        and other.name.startswith(f"{source.name}.")
        and other.owner != source.name
    )


def _remedy(requested: RequestedObject) -> str:
    match requested.type:
        case "source_progress":
            return (
                f'Choose another name under progress: of source "{requested.owner}", or '
                f"remove it to use {requested.owner}_progress."
            )
        case "collection" if requested.owner is None:
            return "Write to a collection with another name."
        case _:
            kind = "materialization" if requested.type == "materialization" else "source"
            return (
                f"Give the {kind} another name in the file, or drop the object that has the name: "
                "penstock drop LOCATION NAME."
            )
