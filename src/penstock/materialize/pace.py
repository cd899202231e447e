"""How far a transaction goes. Pure.

A backlog is taken in few large transactions rather than many small ones, but not in one
that an endpoint would work on for hours. It can be cut only where every collection has
come to the end of a time, and is cut where batches end: about there, not exactly.
"""

from collections.abc import Iterable

from penstock.persist.state import CollectionState

__all__ = ["upper_within"]


def upper_within(
    collections: Iterable[CollectionState], reached: int, upper: int, most_bytes: int
) -> int:
    """The last time up to `upper` for which no more than `most_bytes` must be read.

    What does not exist yet is copied as of one time, so there everything is one
    transaction; so is a single time, however large.
    """
    collections = list(collections)
    if not reached:
        return upper
    ends: dict[int, int] = {}
    for collection in collections:
        for batch in collection.batches:
            if reached < batch.upper <= upper:
                ends[batch.upper] = ends.get(batch.upper, 0) + batch.memory
    begins = max((each.since for each in collections), default=0)
    chosen, total = None, 0
    for end in sorted(ends):
        total += ends[end]
        if end <= begins or any(_in_error(each, end - 1) for each in collections):
            continue
        if chosen is not None and total > most_bytes:
            return chosen
        chosen = end
    return upper


def _in_error(collection: CollectionState, time: int) -> bool:
    return any(span.lower <= time < span.upper for span in collection.errors)
