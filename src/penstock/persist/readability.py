"""What of a collection can be read, and what to say of the rest. Pure.

             begins  since            error          upper
    ────────────┼──────┼────────────────┼────┼─────────┼────────► time
      nothing   │ com- │ readable       │    │ readable│ not yet
      was there │pacted│                │    │         │ complete

A reading as of a time looks at one point of this line. One of changes in
`[lower, upper)` goes from the contents as of `lower - 1` to those as of
`upper - 1`, and every time on its way must be readable.
"""

from collections.abc import Iterator

from penstock.errors import UsageError
from penstock.persist.errors import (
    CollectionErrored,
    CollectionReplaced,
    NotYetComplete,
    SinceError,
)
from penstock.persist.records import END, CollectionState, ErrorSpan

__all__ = [
    "check_changes",
    "check_contents",
    "check_since",
    "error_as_of",
    "reachable",
]


def check_contents(collection: CollectionState, as_of: int) -> None:
    """Check that the contents as of a time can be read.

    Raises:
        SinceError: the time lies below since.
        NotYetComplete: it lies at or past upper.
        CollectionErrored: the collection is in error as of it.
    """
    check_since(collection, as_of)
    if as_of >= collection.upper:
        _check_not_replaced(collection)
        raise NotYetComplete(collection.name, as_of=as_of, upper=collection.upper)
    span = error_as_of(collection, as_of)
    if span is not None:
        raise _errored(collection, span, as_of)


def check_changes(collection: CollectionState, lower: int, upper: int) -> None:
    """Check that the updates with times in `[lower, upper)` can be read.

    Raises:
        SinceError: updates below since have been brought up to it, so an
            interval must begin past since, or at 0.
        NotYetComplete: the interval reaches past upper.
        CollectionErrored: the collection is in error somewhere on the way.
    """
    if lower > upper:
        raise UsageError(
            f'changes of collection "{collection.name}" cannot be read from {lower} to {upper}',
            hint="Let the interval [lower, upper) begin before it ends.",
        )
    if lower < collection.first_exact_time:
        raise _since_error(collection, lower - 1, lower=lower)
    if upper > collection.upper:
        _check_not_replaced(collection)
        raise NotYetComplete(collection.name, as_of=upper - 1, upper=collection.upper)
    for span in _ahead(collection, lower):
        if span.lower < upper:
            raise _errored(collection, span, lower)


def check_since(collection: CollectionState, as_of: int) -> None:
    """Check that since has not passed a time.

    Raises:
        SinceError: it has.
    """
    if as_of < collection.since:
        raise _since_error(collection, as_of)


def reachable(collection: CollectionState, lower: int, *, snapshot: bool = False) -> int:
    """How far changes from `lower` on can be read: to upper, or to the first error.

    With `snapshot`, the contents as of `lower` come first, and what was before
    does not matter.

    Raises:
        CollectionErrored: no further than `lower`, because of an error.
        CollectionReplaced: no further than `lower`, because the name moved to another collection.
    """
    if lower >= collection.upper:
        _check_not_replaced(collection)
    for span in _ahead(collection, lower + snapshot):
        if span.lower <= lower < collection.upper:
            raise _errored(collection, span, lower)
        return min(collection.upper, max(span.lower, lower))
    return collection.upper


def error_as_of(collection: CollectionState, as_of: int) -> ErrorSpan | None:
    """The error as of a time, if there is one."""
    return next((s for s in collection.errors if s.lower <= as_of < s.upper), None)


def _ahead(collection: CollectionState, lower: int) -> Iterator[ErrorSpan]:
    """The errors that changes from `lower` on meet: the contents they begin with count too."""
    return (span for span in collection.errors if lower <= span.upper)


def _check_not_replaced(collection: CollectionState) -> None:
    if collection.successor:
        raise CollectionReplaced(collection.name, at=collection.upper)


def _since_error(
    collection: CollectionState, as_of: int, *, lower: int | None = None
) -> SinceError:
    return SinceError(
        collection.name,
        as_of=as_of,
        since=collection.since,
        # Before it, the name referred to collections that are destroyed by now.
        begins=0 if collection.predecessors else collection.begins,
        lower=lower,
    )


def _errored(collection: CollectionState, span: ErrorSpan, at: int) -> CollectionErrored:
    return CollectionErrored(
        collection.name,
        as_of=min(max(at, span.lower), span.upper - 1),
        since=span.lower,
        kind=span.error.kind,
        reason=span.error.message,
        detail=span.error.detail,
        hint=span.error.hint,
        until=_end_of(collection, span),
    )


def _end_of(collection: CollectionState, span: ErrorSpan) -> int | None:
    """From which time on the name can be read again, if there is one."""
    if span.upper < END:
        return span.upper
    return collection.upper if collection.successor else None
