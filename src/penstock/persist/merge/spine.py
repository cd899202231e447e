"""Choice of the batches to merge next. Pure.

Batches are ordered oldest first. The *level* of a batch is the logarithm of its size.
Merges make the levels fall from oldest to newest, with fewer than `fan_in` batches on each.
A collection of N updates then has O(log N) batches, and each update is rewritten O(log N)
times, in any order of arrival.

The newest batch is not merged until the next one arrives. Otherwise, a single writer would
merge its latest batch over and over.
"""

from collections.abc import Sequence

__all__ = ["level", "next_merge"]


def level(size: int, fan_in: int) -> int:
    """Return the number of times that `size` can be divided by `fan_in`.

    >>> [level(size, 2) for size in (1, 2, 3, 4, 100)]
    [0, 1, 1, 2, 6]
    """
    height = 0
    while size >= fan_in:
        size //= fan_in
        height += 1
    return height


def next_merge(sizes: Sequence[int], *, fan_in: int) -> range | None:
    """Return the adjacent batches to merge next, or None if the spine needs no merge.

    >>> next_merge([4, 2, 1, 1], fan_in=2)
    >>> next_merge([4, 2, 1, 1, 100], fan_in=2)
    range(0, 4)
    """
    if len(sizes) < 3:
        return None
    levels = [level(size, fan_in) for size in sizes]
    newest = len(sizes) - 1
    # Batches smaller than the newest one violate the order of levels. One merge combines
    # them, and they are not rewritten again before the newest batch is.
    low = newest
    while low > 0 and levels[low - 1] < levels[newest]:
        low -= 1
    if newest - low >= 2:
        return range(low, newest)
    high = newest
    while high > 0:
        low = high - 1
        while low > 0 and levels[low - 1] == levels[high - 1]:
            low -= 1
        if high - low >= fan_in:
            return range(low, high)
        high = low
    return None
