"""Changes of collections in one log entry, next to the appended updates.

    client.append_all([AppendTo(orders, rows, 7, 8)], collection_changes=[Grow(orders, wider)])

The call is atomic. Each change is checked, in order, against the state before the entry and
the changes before it. If one is rejected, nothing is written. No change alters the contents
that can be read as of a time below upper.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, assert_never

import pyarrow as pa
from msgspec.structs import replace

from penstock.errors import UsageError
from penstock.persist import state as log
from penstock.persist.input_validation import Updates, check_as_of
from penstock.persist.schema_check import grown
from penstock.persist.state import END, CollectionState, Operation, State, StoredError, foreseen

if TYPE_CHECKING:
    from penstock.persist.collection import Collection

__all__ = [
    "Begin",
    "CollectionChange",
    "Fail",
    "Grow",
    "Recover",
    "Replace",
    "WriteTo",
    "operations_of",
    "with_growth",
]


@dataclass(frozen=True, slots=True)
class Begin:
    """Start of the collection's history at `since`: there is nothing to read before it.

    Allowed only while no time of the collection is complete. Updates that were written at
    earlier times and not sealed count from `since` on.
    """

    collection: "Collection"
    since: int


@dataclass(frozen=True, slots=True)
class Grow:
    """New schema version, for readers as of the upper before this entry and later.

    Updates for the collection in the same call have this schema. A collection may grow
    several times in one call: tables then have the last schema, and files any of them.
    """

    collection: "Collection"
    schema: pa.Schema
    defaults: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Fail:
    """Failure of the collection: reads as of `time` or later raise `error`; upper may advance."""

    collection: "Collection"
    time: int
    error: StoredError


@dataclass(frozen=True, slots=True)
class Recover:
    """End of a failure: the collection can be read again as of `time` and later."""

    collection: "Collection"
    time: int


@dataclass(frozen=True, slots=True)
class Replace:
    """Move of the collection's name, as of `time` and later, to `by`, which begins there.

    As of earlier times, the name refers to the replaced collection. That collection is
    sealed at `time` and rejects further updates.
    """

    collection: "Collection"
    by: "Collection"
    time: int


@dataclass(frozen=True, slots=True)
class WriteTo:
    """Updates at times at or past upper that are not sealed yet, and so not visible to readers."""

    collection: "Collection"
    updates: Updates
    """Updates, or a list of tables and `Staged`."""


CollectionChange: TypeAlias = Begin | Grow | Fail | Recover | Replace | WriteTo


def with_growth(collection: CollectionState, growing: Sequence[Grow]) -> CollectionState:
    """Return the collection state after the given growth.

    Raises:
        UsageError: the schema cannot change in this way.
    """
    for growth in growing:
        further = grown(collection, growth.schema, growth.defaults)
        if further is not None:
            collection = replace(collection, schemas=(*collection.schemas, further))
    return collection


def operations_of(
    changes: Sequence[CollectionChange], state: State, *, versions: Mapping[int, int]
) -> list[Operation]:
    """Return the log operations for `changes`.

    `versions` gives the number of schema versions that each growing collection had when its
    updates were prepared.

    Raises:
        UsageError: a change is rejected.
    """
    operations: list[Operation] = []
    for id in {change.collection.id for change in changes if isinstance(change, Grow)}:
        collection = state.collections[id]
        if len(collection.schemas) != versions[id]:
            raise UsageError(
                f'schema of collection "{collection.name}" was altered concurrently',
                hint="Try again.",
            )
    for change in changes:
        collection = state.collections[change.collection.id]
        match change:
            case Begin(since=since):
                operation: Operation | None = _begin(collection, check_as_of(since))
            case Grow():
                further = grown(collection, change.schema, change.defaults)
                operation = None if further is None else log.Alter(collection.id, further)
            case Fail(time=time, error=error):
                operation = _fail(collection, check_as_of(time), error)
            case Recover(time=time):
                operation = _recover(collection, check_as_of(time))
            case Replace(by=by, time=time):
                operation = _replace(collection, state.collections[by.id], check_as_of(time))
            case WriteTo():
                operation = None
            case unhandled:
                assert_never(unhandled)
        if operation is not None:
            operations.append(operation)
            state = foreseen(state, [operation])
    return operations


def _begin(collection: CollectionState, since: int) -> Operation:
    what = f'collection "{collection.name}" cannot begin at {since}'
    if collection.upper > 0:
        raise UsageError(
            what,
            detail=f"Its upper is {collection.upper}: times below it are complete.",
            hint="Set the beginning of a collection before its first seal.",
        )
    if collection.begins or collection.since > since:
        raise UsageError(
            what,
            detail=f"It begins at {collection.begins}, and its since is {collection.since}.",
            hint="A collection begins once.",
        )
    return log.BeginHistory(collection.id, since)


def _fail(collection: CollectionState, time: int, error: StoredError) -> Operation:
    what = f'collection "{collection.name}" cannot fail at {time}'
    if time < collection.upper:
        raise UsageError(
            what,
            detail=f"Its upper is {collection.upper}: contents below it do not change.",
            hint=f"Record the error at {collection.upper} or later.",
        )
    if (last := _last(collection)) is not None and last.upper > time:
        until = "and has not recovered" if last.upper == END else f"until {last.upper}"
        raise UsageError(
            what,
            detail=f"It failed at {last.lower} {until}: {last.error.message}.",
            hint="The first error stays recorded. Recover the collection before the next error.",
        )
    return log.FailCollection(collection.id, time, error)


def _recover(collection: CollectionState, time: int) -> Operation:
    what = f'collection "{collection.name}" cannot recover at {time}'
    last = _last(collection)
    if last is None or last.upper < END:
        raise UsageError(what, detail="It is not in error.", hint="There is nothing to do.")
    if time < max(collection.upper, last.lower):
        raise UsageError(
            what,
            detail=f"It failed at {last.lower}, and its upper is {collection.upper}: "
            "contents below it do not change.",
            hint=f"Recover it at {max(collection.upper, last.lower)} or later.",
        )
    return log.RecoverCollection(collection.id, time)


def _replace(collection: CollectionState, by: CollectionState, time: int) -> Operation:
    what = f'collection "{collection.name}" cannot be replaced at {time}'
    if collection.successor:
        raise UsageError(
            what,
            detail=f"Another collection has its name from {collection.upper} on.",
            hint="Replace that one.",
        )
    if time < collection.upper or any(
        batch.upper > collection.upper for batch in collection.batches
    ):
        raise UsageError(
            what,
            detail=f"Its upper is {collection.upper}, and it may hold updates that are not sealed.",
            hint="Discard updates that are not sealed, and replace it at "
            f"{collection.upper} or later.",
        )
    if by.id == collection.id or by.upper or by.begins != time or by.owner != collection.owner:
        raise UsageError(
            what,
            detail=f'Collection "{by.name}" of owner "{by.owner}" begins at {by.begins} and has '
            f"upper {by.upper}.",
            hint="Replace it by a collection of the same owner that begins at that time.",
        )
    return log.ReplaceCollection(collection.id, by.id, time)


def _last(collection: CollectionState) -> "log.ErrorSpan | None":
    return collection.errors[-1] if collection.errors else None
