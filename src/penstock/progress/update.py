"""Updates: changes of a collection.

A collection is a sum of updates. Its contents as of `t` are the sum of the diffs of all updates
with a time at or before `t`. `penstock.data` consolidates and advances updates in Arrow tables.
"""

from collections.abc import Hashable
from typing import Final, Generic, NamedTuple, TypeVar

__all__ = ["MAX_DIFF", "MIN_DIFF", "Update"]

MIN_DIFF: Final = -(2**63)
MAX_DIFF: Final = 2**63 - 1
"""Bounds of a diff: 64 bits at rest. A sum outside of them is rejected and never wraps."""

D = TypeVar("D", bound=Hashable)


class Update(NamedTuple, Generic[D]):
    """From `time` on, `diff` more copies of `data`; fewer copies, if `diff` is negative."""

    data: D
    time: int
    diff: int
