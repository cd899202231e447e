"""What an entry may say of collections besides what is appended to them.

    client.append_all([AppendTo(orders, rows, 7, 8)], collection_changes=[Grow(orders, wider)])

All of it or none: each is checked, in order, against the state that the entry
follows and those before it, and one that is refused leaves nothing written.
What readers have been promised stays: nothing here changes what can be read
as of a time below upper.
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
    """The collection's history begins at `since`: there is nothing to read before it.

    Only while nothing has been complete in it. What was written at earlier times and
    not sealed is there from the beginning.
    """

    collection: "Collection"
    since: int


@dataclass(frozen=True, slots=True)
class Grow:
    """The collection has a further schema, for readers as of its upper before this entry and later.

    What the same call appends to it has that schema. It may grow several times in one
    call: tables then have the last schema, and files any of them.
    """

    collection: "Collection"
    schema: pa.Schema
    defaults: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Fail:
    """From `time` on the collection cannot be read, because of `error`; its upper may move on."""

    collection: "Collection"
    time: int
    error: StoredError


@dataclass(frozen=True, slots=True)
class Recover:
    """As of `time` and later the collection that failed can be read again."""

    collection: "Collection"
    time: int


@dataclass(frozen=True, slots=True)
class Replace:
    """As of `time` and later the name of the collection refers to `by`, which begins there.

    As of earlier times it refers to the collection itself, which is sealed at `time`
    and takes no further updates.
    """

    collection: "Collection"
    by: "Collection"
    time: int


@dataclass(frozen=True, slots=True)
class WriteTo:
    """Updates at times at or past upper, which are not sealed: they are seen once sealed."""

    collection: "Collection"
    updates: Updates
    """Or a list of tables and `Staged`."""


CollectionChange: TypeAlias = Begin | Grow | Fail | Recover | Replace | WriteTo


def with_growth(found: CollectionState, growing: Sequence[Grow]) -> CollectionState:
    """The collection as it will be when it has grown.

    Raises:
        UsageError: it cannot grow so.
    """
    for each in growing:
        further = grown(found, each.schema, each.defaults)
        if further is not None:
            found = replace(found, schemas=(*found.schemas, further))
    return found


def operations_of(
    changes: Sequence[CollectionChange], state: State, *, versions: Mapping[int, int]
) -> list[Operation]:
    """What the entry says for `changes`.

    `versions` tells how many schema versions collections had when the updates
    that come with a further one were prepared.

    Raises:
        UsageError: one of them may not be said.
    """
    operations: list[Operation] = []
    for id in {each.collection.id for each in changes if isinstance(each, Grow)}:
        found = state.collections[id]
        if len(found.schemas) != versions[id]:
            raise UsageError(
                f'schema of collection "{found.name}" was altered meanwhile', hint="Try again."
            )
    for each in changes:
        found = state.collections[each.collection.id]
        match each:
            case Begin(since=since):
                operation: Operation | None = _begin(found, check_as_of(since))
            case Grow():
                further = grown(found, each.schema, each.defaults)
                operation = None if further is None else log.Alter(found.id, further)
            case Fail(time=time, error=error):
                operation = _fail(found, check_as_of(time), error)
            case Recover(time=time):
                operation = _recover(found, check_as_of(time))
            case Replace(by=by, time=time):
                operation = _replace(found, state.collections[by.id], check_as_of(time))
            case WriteTo():
                operation = None
            case unhandled:
                assert_never(unhandled)
        if operation is not None:
            operations.append(operation)
            state = foreseen(state, [operation])
    return operations


def _begin(found: CollectionState, since: int) -> Operation:
    what = f'collection "{found.name}" cannot begin at {since}'
    if found.upper > 0:
        raise UsageError(
            what,
            detail=f"Its upper is {found.upper}: times below it are complete.",
            hint="Only a collection in which nothing has been complete can be given a beginning.",
        )
    if found.begins or found.since > since:
        raise UsageError(
            what,
            detail=f"It begins at {found.begins}, and its since is {found.since}.",
            hint="A collection begins once.",
        )
    return log.Begin(found.id, since)


def _fail(found: CollectionState, time: int, error: StoredError) -> Operation:
    what = f'collection "{found.name}" cannot fail at {time}'
    if time < found.upper:
        raise UsageError(
            what,
            detail=f"Its upper is {found.upper}: what can be read below it stays so.",
            hint=f"Let it fail at {found.upper} or later.",
        )
    if (last := _last(found)) is not None and last.upper > time:
        until = "and has not recovered" if last.upper == END else f"until {last.upper}"
        raise UsageError(
            what,
            detail=f"It failed at {last.lower} {until}: {last.error.message}.",
            hint="The first error stands; let it recover before it fails again.",
        )
    return log.Fail(found.id, time, error)


def _recover(found: CollectionState, time: int) -> Operation:
    what = f'collection "{found.name}" cannot recover at {time}'
    last = _last(found)
    if last is None or last.upper < END:
        raise UsageError(what, detail="It is not in error.", hint="There is nothing to do.")
    if time < max(found.upper, last.lower):
        raise UsageError(
            what,
            detail=f"It failed at {last.lower}, and its upper is {found.upper}: "
            "what cannot be read below it stays so.",
            hint=f"Let it recover at {max(found.upper, last.lower)} or later.",
        )
    return log.Recover(found.id, time)


def _replace(found: CollectionState, by: CollectionState, time: int) -> Operation:
    what = f'collection "{found.name}" cannot be replaced at {time}'
    if found.successor:
        raise UsageError(
            what,
            detail=f"Another collection has its name from {found.upper} on.",
            hint="Replace that one.",
        )
    if time < found.upper or any(batch.upper > found.upper for batch in found.batches):
        raise UsageError(
            what,
            detail=f"Its upper is {found.upper}, and it may hold updates that are not sealed.",
            hint=f"Discard updates that are not sealed, and replace it at {found.upper} or later.",
        )
    if by.id == found.id or by.upper or by.begins != time or by.owner != found.owner:
        raise UsageError(
            what,
            detail=f'Collection "{by.name}" of owner "{by.owner}" begins at {by.begins} and has '
            f"upper {by.upper}.",
            hint="Replace it by a collection of the same owner that begins at that time.",
        )
    return log.Replace(found.id, by.id, time)


def _last(found: CollectionState) -> "log.ErrorSpan | None":
    return found.errors[-1] if found.errors else None
