"""Checks of reads against since, upper and error spans. Pure.

             begins  since            error          upper
    ────────────┼──────┼────────────────┼────┼─────────┼────────► time
      no data   │ com- │ readable       │    │ readable│ not yet
                │pacted│                │    │         │ complete

A read as of a time needs one point of this line. A read of changes in `[lower, upper)`
leads from the contents as of `lower - 1` to the contents as of `upper - 1`, and every
time between them must be readable.
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
            hint="Use an interval [lower, upper) with lower at most upper.",
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
    """Return the upper of the readable changes from `lower`: upper, or the first error.

    With `snapshot`, the contents as of `lower` are read first, and errors before it do
    not matter.

    Raises:
        CollectionErrored: no change is readable, because of an error.
        CollectionReplaced: no change is readable, because the name moved to another collection.
    """
    if lower >= collection.upper:
        _check_not_replaced(collection)
    for span in _ahead(collection, lower + snapshot):
        if span.lower <= lower < collection.upper:
            raise _errored(collection, span, lower)
        return min(collection.upper, max(span.lower, lower))
    return collection.upper


def error_as_of(collection: CollectionState, as_of: int) -> ErrorSpan | None:
    """Return the error span that contains a time, or None."""
    return next((s for s in collection.errors if s.lower <= as_of < s.upper), None)


def _ahead(collection: CollectionState, lower: int) -> Iterator[ErrorSpan]:
    """Return the errors that changes from `lower` meet, in the contents before them too."""
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
        # Before it, the name referred to collections that have been destroyed.
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
    """Return the time from which the name is readable again, or None."""
    if span.upper < END:
        return span.upper
    return collection.upper if collection.successor else None
