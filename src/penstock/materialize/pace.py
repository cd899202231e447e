"""Choice of the upper of a transaction. Pure.

A backlog is stored in few large transactions, but not in a single transaction that occupies the
endpoint for hours. Every collection must be complete at the upper. The upper is therefore the
end of a batch, and the size of a transaction is approximate.
"""

from collections.abc import Iterable

from penstock.persist.state import CollectionState

__all__ = ["upper_within"]


def upper_within(
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
