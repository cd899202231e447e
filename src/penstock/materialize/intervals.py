"""What a transaction brings to each resource of a shard. Pure.

A transaction is an interval: all changes of the bound collections below its upper
that the endpoint does not have yet. What it has is what the shard was opened with,
so two shards may begin at different times and still end at the same one.

    not there yet                 its whole contents as of upper - 1
    there, of this backfill       the changes from its frontier to upper
    there, at or past upper       nothing
    there, of an older backfill   its whole contents, once the resource was truncated
    there, before an error ended  its whole contents, and deletions of what they lack
    there, with another layout    likewise, unless its connector has filled the new columns
    there, of a predecessor       its whole contents, once what is there was emptied
    there, and not bound lately   its whole contents, once what is there was emptied

A collection that cannot be read just below upper brings nothing. A binding to an errored
collection is frozen: the plan says so, and the transaction leaves it out even if the error
has ended meanwhile. A binding that was added after upper was planned joins with the next
transaction.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.errors import UsageError
from penstock.materialize.checkpoint import Checkpoint, Reached

__all__ = ["Bound", "Changes", "Contents", "Interval", "Rewrite", "after", "interval_of"]


@dataclass(frozen=True, slots=True)
class Bound:
    """A resource, and what of the lake is bound to it."""

    path: str
    name: str
    """Of the collection, for people."""

    collection: str
    """Its id, as in `Reached`."""

    backfill: int
    since: int
    upper: int
    errors: tuple[tuple[int, int], ...] = ()
    """Intervals in which it is in error."""

    columns: str = ""
    """As in `Reached`."""

    unknown: bool = False
    """It was not bound for a while, and nobody knows what it holds now."""

    frozen: bool = False
    """The transaction leaves it out: its collection was in error when the plan was made."""

    truncates: bool = False
    """Whether the transaction can truncate the resource."""

    layout: str = ""
    """As in `Reached`; empty, if documents that were sent stay as they are."""

    continued: frozenset[str] = frozenset()
    """Ids of other layouts whose rows are as `layout` has them, once it is applied."""

    predecessors: frozenset[str] = frozenset()
    """Ids of the collections that had the name before, as in `Reached`."""

    def holds_layout(self, reached: Reached) -> bool:
        """Return whether rows that were not updated are as the layout has them."""
        return not (reached.layout and self.layout) or (
            reached.layout == self.layout or reached.layout in self.continued
        )

    def brings(self, reached: Reached | None, upper: int) -> bool:
        """Whether it can be read just below `upper`, as far as it is needed."""
        if (
            self.frozen
            or upper > self.upper
            or any(lower < upper <= end for lower, end in self.errors)
        ):
            return False
        return reached is not None or self.since < upper


@dataclass(frozen=True, slots=True)
class Contents:
    """All rows as of a time, for a resource that holds none."""

    as_of: int


@dataclass(frozen=True, slots=True)
class Changes:
    """What changed in `[lower, upper)`."""

    lower: int
    upper: int


@dataclass(frozen=True, slots=True)
class Rewrite:
    """All rows as of a time, for a resource that may hold those as of an earlier one."""

    before: int | None
    """The last time it holds; None if that cannot be read any more."""

    as_of: int


Interval = Contents | Changes | Rewrite


def interval_of(bound: Bound, opened: Checkpoint, upper: int) -> Interval | None:
    """What a resource lacks below `upper`; None if nothing.

    Raises:
        UsageError: what it holds is of another history, or is not kept any more.
    """
    reached = opened.bindings.get(bound.path)
    if reached is not None and reached.frontier > bound.upper and not bound.unknown:
        _check_history(bound, reached)
    if not bound.brings(reached, upper):
        return None
    if reached is None:
        return Contents(upper - 1)
    if bound.unknown or reached.columns != bound.columns:
        return Rewrite(None, upper - 1)
    if reached.collection in bound.predecessors and reached.backfill == bound.backfill:
        return Rewrite(None, upper - 1)
    if reached.backfill > bound.backfill:
        raise UsageError(
            f"resource {bound.path} holds backfill {reached.backfill} of collection "
            f'"{bound.name}", and the file says {bound.backfill}',
            hint=f"Say backfill: {reached.backfill}, or a larger number to write it anew.",
        )
    if reached.collection != bound.collection and reached.backfill < bound.backfill:
        return Rewrite(None, upper - 1)
    _check_history(bound, reached)
    if reached.backfill < bound.backfill:
        # Rows that others have put there go, too, unless the connector cannot truncate.
        before = reached.frontier - 1
        known = before >= bound.since and not bound.truncates
        return Rewrite(before if known else None, upper - 1)
    before = reached.frontier - 1
    if reached.frontier > upper:
        return None
    if not bound.holds_layout(reached):
        # SUBTLE: also where the frontier is upper. If the file has changed since upper was
        # planned, rows may have been stored with the layout that was planned.
        return Rewrite(before if before >= bound.since else None, upper - 1)
    if reached.frontier == upper:
        return None
    if reached.frontier <= bound.since and reached.frontier:
        raise UsageError(
            f'resource {bound.path} holds collection "{bound.name}" up to {reached.frontier}, '
            f"and what came after is not kept any more: since is {bound.since}",
            hint=f"Write the resource anew: set its backfill to {reached.backfill + 1}.",
        )
    if any(lower < upper and end > reached.frontier for lower, end in bound.errors):
        return Rewrite(before, upper - 1)
    return Changes(reached.frontier, upper)


def _check_history(bound: Bound, reached: Reached) -> None:
    """Raises UsageError if what a resource holds is not what came before."""
    if reached.backfill < bound.backfill:
        return  # The resource is replaced anyway.
    hint = f"Write the resource anew: set its backfill to {reached.backfill + 1}."
    if reached.collection != bound.collection and reached.collection not in bound.predecessors:
        raise UsageError(
            f'resource {bound.path} holds another history than that of collection "{bound.name}"',
            detail="The collection was dropped and made again, or the location is another.",
            hint=hint,
        )
    if reached.frontier > bound.upper:
        raise UsageError(
            f'resource {bound.path} holds collection "{bound.name}" up to {reached.frontier}, '
            f"and there it ends at {bound.upper}",
            detail="The location was restored from an earlier copy.",
            hint=hint,
        )


def after(
    materialization: str, opened: Checkpoint, bounds: Mapping[str, Bound], upper: int
) -> Checkpoint:
    """The checkpoint of a shard once the transaction is committed.

    Resources that are not bound any more stay as they were.
    """
    reached = dict(opened.bindings)
    for path, bound in bounds.items():
        held = reached.get(path)
        if not bound.brings(held, upper):
            continue
        if (
            held is not None
            and held.frontier > upper
            and held.backfill == bound.backfill
            and not bound.unknown
        ):
            continue  # Nothing was stored.
        reached[path] = Reached(
            bound.collection, bound.backfill, upper, bound.columns, bound.layout
        )
    return Checkpoint(materialization, reached)
