"""Interval of updates that a transaction applies to each resource, and its upper. Pure functions.

A transaction applies all changes of the bound collections below its upper that the endpoint does
not hold yet. The checkpoint in Opened determines the changes that the endpoint holds. Two shards
may therefore begin at different times, and still end at the same upper.

    state of the resource             interval
    ──────────────────────────────────────────────────────────────────────────────
    holds nothing                     all contents as of upper - 1
    this backfill                     the changes from its frontier to upper
    frontier at or past upper         nothing
    older backfill                    truncate, then all contents
    frontier before the end           all contents, and deletions of keys
      of an error                       that are not in them
    another layout                    likewise, unless its connector has filled
                                        the new columns
    written from a predecessor        truncate, then all contents
    not bound for some time           truncate, then all contents

A collection that cannot be read just below upper is left out. A binding to an errored collection
is frozen: the plan records this, and the transaction leaves the binding out even if the error has
ended since. A binding that was added after upper was planned starts with the next transaction.

A backlog is stored in few large transactions, but not in a single transaction that occupies the
endpoint for hours. Every collection must be complete at the upper. The upper is therefore the
end of a batch, and the size of a transaction is approximate.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from penstock.errors import UsageError
from penstock.materialize.checkpoint import Checkpoint, ResourceProgress
from penstock.persist.state import CollectionState

__all__ = [
    "BoundResource",
    "ChangesInterval",
    "ContentsInterval",
    "Interval",
    "RewriteInterval",
    "checkpoint_after",
    "limit_upper",
    "missing_interval",
]


@dataclass(frozen=True, slots=True)
class BoundResource:
    """A resource and the state of the collection that is bound to it."""

    path: str
    name: str
    """Name of the collection, for messages."""

    collection: str
    """Id of the collection, as in `ResourceProgress`."""

    backfill: int
    since: int
    upper: int
    errors: tuple[tuple[int, int], ...] = ()
    """Error intervals `[lower, upper)` of the collection."""

    columns: str = ""
    """Hash of the columns, as in `ResourceProgress`."""

    unknown: bool = False
    """True if the resource was not bound for some time, so its contents are not known."""

    frozen: bool = False
    """True if the transaction leaves the resource out.

    Its collection was in error when the transaction was planned.
    """

    truncates: bool = False
    """True if the transaction can truncate the resource."""

    layout: str = ""
    """Id of the layout, as in `ResourceProgress`; empty if stored documents are never rewritten."""

    continued: frozenset[str] = frozenset()
    """Ids of earlier layouts whose rows match `layout` after Apply, without a rewrite."""

    predecessors: frozenset[str] = frozenset()
    """Ids of the earlier collections of the name, as in `ResourceProgress`."""

    def holds_layout(self, reached: ResourceProgress) -> bool:
        """Return whether the stored rows match the layout, even without an update."""
        return not (reached.layout and self.layout) or (
            reached.layout == self.layout or reached.layout in self.continued
        )

    def includes(self, reached: ResourceProgress | None, upper: int) -> bool:
        """Return whether a transaction up to `upper` includes the resource.

        The collection must be readable just below `upper`.
        """
        if (
            self.frozen
            or upper > self.upper
            or any(lower < upper <= end for lower, end in self.errors)
        ):
            return False
        return reached is not None or self.since < upper


@dataclass(frozen=True, slots=True)
class ContentsInterval:
    """All rows as of a time, for a resource that holds none."""

    as_of: int


@dataclass(frozen=True, slots=True)
class ChangesInterval:
    """Changes with times in `[lower, upper)`."""

    lower: int
    upper: int


@dataclass(frozen=True, slots=True)
class RewriteInterval:
    """All rows as of a time, for a resource that may hold the rows of an earlier time."""

    before: int | None
    """Time of the rows that the resource holds.

    None if that time is not readable any more, or if the contents are not known.
    """

    as_of: int


Interval = ContentsInterval | ChangesInterval | RewriteInterval


def missing_interval(bound: BoundResource, opened: Checkpoint, upper: int) -> Interval | None:
    """Return the updates below `upper` that a resource is missing; None if there are none.

    Raises:
        UsageError: the resource holds another history, or the missing changes are below since.
    """
    reached = opened.bindings.get(bound.path)
    if reached is not None and reached.frontier > bound.upper and not bound.unknown:
        _check_history(bound, reached)
    if not bound.includes(reached, upper):
        return None
    if reached is None:
        return ContentsInterval(upper - 1)
    if bound.unknown or reached.columns != bound.columns:
        return RewriteInterval(None, upper - 1)
    if reached.collection in bound.predecessors and reached.backfill == bound.backfill:
        return RewriteInterval(None, upper - 1)
    if reached.backfill > bound.backfill:
        raise UsageError(
            f"resource {bound.path} holds backfill {reached.backfill} of collection "
            f'"{bound.name}", and the file requests {bound.backfill}',
            hint=f"Set backfill: {reached.backfill}, or a larger number to write it again.",
        )
    if reached.collection != bound.collection and reached.backfill < bound.backfill:
        return RewriteInterval(None, upper - 1)
    _check_history(bound, reached)
    if reached.backfill < bound.backfill:
        # Truncation also removes rows of other writers. Without it, those rows stay.
        before = reached.frontier - 1
        known = before >= bound.since and not bound.truncates
        return RewriteInterval(before if known else None, upper - 1)
    before = reached.frontier - 1
    if reached.frontier > upper:
        return None
    if not bound.holds_layout(reached):
        # SUBTLE: also if the frontier equals upper. If the file has changed since upper was
        # planned, rows may have been stored with the planned layout.
        return RewriteInterval(before if before >= bound.since else None, upper - 1)
    if reached.frontier == upper:
        return None
    if reached.frontier <= bound.since and reached.frontier:
        raise UsageError(
            f'resource {bound.path} holds collection "{bound.name}" up to {reached.frontier}, '
            f"and later changes are no longer readable: since is {bound.since}",
            hint=f"Write the resource again: set its backfill to {reached.backfill + 1}.",
        )
    if any(lower < upper and end > reached.frontier for lower, end in bound.errors):
        return RewriteInterval(before, upper - 1)
    return ChangesInterval(reached.frontier, upper)


def _check_history(bound: BoundResource, reached: ResourceProgress) -> None:
    """Raise UsageError if the contents of a resource are not from the history of the collection."""
    if reached.backfill < bound.backfill:
        return  # The resource is replaced anyway.
    hint = f"Write the resource again: set its backfill to {reached.backfill + 1}."
    if reached.collection != bound.collection and reached.collection not in bound.predecessors:
        raise UsageError(
            f'resource {bound.path} holds another history than collection "{bound.name}"',
            detail="The collection was dropped and created again, or the location has changed.",
            hint=hint,
        )
    if reached.frontier > bound.upper:
        raise UsageError(
            f'resource {bound.path} holds collection "{bound.name}" up to {reached.frontier}, '
            f"and the collection ends at {bound.upper}",
            detail="The location was restored from an earlier copy.",
            hint=hint,
        )


def checkpoint_after(
    materialization: str, opened: Checkpoint, bounds: Mapping[str, BoundResource], upper: int
) -> Checkpoint:
    """Return the checkpoint of a shard after the commit of the transaction up to `upper`.

    Entries of resources that are not bound any more do not change.
    """
    reached = dict(opened.bindings)
    for path, bound in bounds.items():
        progress = reached.get(path)
        if not bound.includes(progress, upper):
            continue
        if (
            progress is not None
            and progress.frontier > upper
            and progress.backfill == bound.backfill
            and not bound.unknown
        ):
            continue  # Nothing was stored.
        reached[path] = ResourceProgress(
            bound.collection, bound.backfill, upper, bound.columns, bound.layout
        )
    return Checkpoint(materialization, reached)


def limit_upper(
    collections: Iterable[CollectionState], reached: int, upper: int, most_bytes: int
) -> int:
    """Return the largest time up to `upper` with at most about `most_bytes` to read.

    If `reached` is 0, the result is `upper`: the initial contents are read as of one time, in
    one transaction. The changes of a single batch are never divided either.
    """
    collections = list(collections)
    if not reached:
        return upper
    ends: dict[int, int] = {}
    for collection in collections:
        for batch in collection.batches:
            if reached < batch.upper <= upper:
                ends[batch.upper] = ends.get(batch.upper, 0) + batch.memory
    begins = max((collection.since for collection in collections), default=0)
    limit, total = None, 0
    for end in sorted(ends):
        total += ends[end]
        if end <= begins or any(_in_error(collection, end - 1) for collection in collections):
            continue
        if limit is not None and total > most_bytes:
            return limit
        limit = end
    return upper


def _in_error(collection: CollectionState, time: int) -> bool:
    return any(span.lower <= time < span.upper for span in collection.errors)
