"""The one namespace of a lake: which names are taken, and who may take another.

Sources, materializations, collections and progress relations share it. Two rules go beyond
equal names: the names that begin with `SOURCE.` belong to that source, so a table that is
added later always finds its name free; and a source and its own collection may have one
name, as a source of one topic does.

A name is taken by an entry of the catalog, before the object is created. A process that
dies in between finds the name taken by its own object.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Final

from penstock.catalog.listing import collections_of
from penstock.catalog.objects import Object, Wanted, as_wanted, catalogued
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.durable import join, normal
from penstock.errors import UsageError
from penstock.persist.append.user_collections import USER_LOCATION
from penstock.persist.lake import is_storage_location
from penstock.persist.lock import lives, owner_of
from penstock.pipeline.file import CATALOG, Pipeline, SourceSection

__all__ = [
    "check_free",
    "described",
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


def listed_names(location: str) -> list[Wanted]:
    """Return the collections and progress relations that the storage locations of a lake have.

    The catalog has all of them, except those of versions that did not take names. The owner
    is the storage location, or None for user collections.
    """
    return [
        Wanted(
            each.name,
            "source_progress" if each.progress else "collection",
            owner=None if each.storage_location == USER_LOCATION else each.storage_location,
        )
        for each in sorted(collections_of(location))
    ]


def name_conflicts(pipeline: Pipeline, taken: Sequence[Wanted]) -> Iterator[tuple[Wanted, str]]:
    """Yield each object of a file whose name is taken, with what has it.

    The names of the file's objects are compared with each other, too. A progress relation
    without a name in the file gets one that is free, and so is never among them.
    """
    named = [
        each
        for name, section in pipeline.sources.items()
        for each in names_of_source(name, section)
    ]
    named += [Wanted(name, "materialization") for name in pipeline.materializations]
    # Sources and materializations first: only other names are easy to change.
    named.sort(key=lambda each: each.type not in ("source", "materialization"))
    agreed = [*taken]
    for each in named:
        holder = holder_of(each, agreed)
        if holder is not None:
            yield each, holder
        agreed.append(each)


def names_of_source(name: str, section: SourceSection) -> list[Wanted]:
    """Return the objects of a source whose names the file decides."""
    named = [Wanted(name, "source"), Wanted(f"{name}_remap", "collection", owner=name)]
    if section.kafka is not None and section.kafka.on_bad_record == "set_aside":
        named.append(Wanted(f"{name}_errors", "collection", owner=name))
    if section.progress is not None:
        named.append(Wanted(section.progress, "source_progress", owner=name))
    return named


def progress_of_source(name: str, taken: Sequence[Wanted]) -> Wanted:
    """Return the progress relation of a source: the one it has, or one with the first free name."""
    for each in taken:
        if each.type == "source_progress" and each.owner == name:
            return each
    names = (f"{name}_progress{number or ''}" for number in count())
    candidates = (Wanted(each, "source_progress", owner=name) for each in names)
    return next(each for each in candidates if holder_of(each, taken) is None)


def check_free(requested: Wanted, taken: Iterable[Wanted]) -> None:
    """Check that an object may have its name.

    Raises:
        UsageError: another object has it, or it is reserved.
    """
    holder = holder_of(requested, taken)
    if holder is not None:
        raise UsageError(
            f"cannot create {described(requested)}: the name is taken",
            detail=f"The name belongs to {holder}.",
            hint=_remedy(requested),
        )


def holder_of(requested: Wanted, taken: Iterable[Wanted]) -> str | None:
    """Return what keeps an object from having its name, for people; None if nothing does."""
    others = [*taken]
    itself = (requested.type, requested.name, requested.owner)
    if any((each.type, each.name, each.owner) == itself for each in others):
        # One of a version that took no names may hide the catalog, and can have another name.
        others = []
        if requested.type != "source_progress":
            return None
    if requested.name.startswith(RESERVED):
        return f"the catalog: names that begin with {RESERVED} are reserved"
    if requested.type in ("source", "materialization") and requested.name in (
        CATALOG,
        USER_LOCATION,
    ):
        return "a storage location that every lake has"
    return next((described(each) for each in others if _clash(requested, each)), None)


def take_name_in_lake(url: str, name: str) -> None:
    """Take the name of a user collection about to be created in storage location `url`.

    A storage location that is not the one of a lake's user collections has no catalog.

    Raises:
        UsageError: the name is taken.
    """
    lake, _, folder = normal(url).rpartition("/")
    if folder == USER_LOCATION and not lake.endswith((":", "/")):
        take_user_collection(lake, name)


def take_user_collection(location: str, name: str, *, clock: Clock = SYSTEM_CLOCK) -> None:
    """Take the name of a user collection in the catalog of a lake.

    The caller holds the lock of the storage location of user collections. While it does, no
    other process removes a name whose collection is not created yet.

    Raises:
        UsageError: the name is taken.
    """
    requested, listed = Wanted(name, "collection"), listed_names(location)

    def added(known: Sequence[Object]) -> Iterator[Wanted]:
        check_free(requested, [*listed, *as_wanted(known)])
        yield from as_wanted(known)
        if not any((each.type, each.name) == ("collection", name) for each in known):
            yield requested

    catalogued(location, added, clock=clock)


def user_location_is_locked(location: str) -> bool:
    """Return whether a job may be about to create a user collection whose name it has taken."""
    url = join(location, USER_LOCATION)
    writer = owner_of(url) if is_storage_location(url) else None
    return writer is not None and lives(writer)


def described(named: Wanted) -> str:
    """Return an object with its kind and owner, as errors name it."""
    match named.type:
        case "source_progress":
            kind = "progress relation"
        case "collection" if named.owner is None:
            kind = "user collection"
        case _:
            kind = named.type
    owned = "" if named.owner is None else f' of source "{named.owner}"'
    return f'{kind} "{named.name}"{owned}'


def _clash(one: Wanted, other: Wanted) -> bool:
    if one.name == other.name:
        return not (_is_topic_of(one, other) or _is_topic_of(other, one))
    return _is_below(one, other) or _is_below(other, one)


def _is_topic_of(collection: Wanted, source: Wanted) -> bool:
    return (collection.type, source.type, collection.owner) == ("collection", "source", source.name)


def _is_below(source: Wanted, other: Wanted) -> bool:
    """Return whether the name of another object is one that only this source may give."""
    return (
        source.type == "source"
        and other.name.startswith(f"{source.name}.")
        and other.owner != source.name
    )


def _remedy(requested: Wanted) -> str:
    match requested.type:
        case "source_progress":
            return (
                f'Choose another name under progress: of source "{requested.owner}", or leave it '
                f"out for {requested.owner}_progress."
            )
        case "collection" if requested.owner is None:
            return "Write to a collection with another name."
        case _:
            kind = "materialization" if requested.type == "materialization" else "source"
            return (
                f"Give the {kind} another name in the file, or drop the object that has the name: "
                "penstock drop LOCATION NAME."
            )
