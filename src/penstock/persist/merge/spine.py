"""Which batches to merge, and when. Pure.

Batches stand oldest first. Their *level* is the logarithm of their size, and
the aim is that levels fall from oldest to newest, with fewer than `fan_in` on
each: then a collection of N updates has O(log N) batches and each update is
rewritten O(log N) times, whatever the order in which batches come.

The newest batch is left alone until the next one comes, so that a lone writer
does not chase its own tail.
"""

from collections.abc import Sequence

__all__ = ["level", "next_merge"]


def level(size: int, fan_in: int) -> int:
    """How many times `size` can be divided by `fan_in`.

    >>> [level(size, 2) for size in (1, 2, 3, 4, 100)]
    [0, 1, 1, 2, 6]
    """
    height = 0
    while size >= fan_in:
        size //= fan_in
        height += 1
    return height


def next_merge(sizes: Sequence[int], *, fan_in: int) -> range | None:
    """The adjacent batches to merge next, or None if the spine is in shape.

    >>> next_merge([4, 2, 1, 1], fan_in=2)
    >>> next_merge([4, 2, 1, 1, 100], fan_in=2)
    range(0, 4)
    """
    if len(sizes) < 3:
        return None
    levels = [level(size, fan_in) for size in sizes]
    newest = len(sizes) - 1
    # What is smaller than the newest batch stands in its way: one merge and
    # the small ones are never touched again before the big one is.
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
