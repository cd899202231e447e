"""Times of the timeline, source frontiers, and updates.

All values are plain: this package reads no clock and does no I/O.

    time       bounds of times; text of times
    frontier   Frontier: position per partition of a source
    update     Update: (data, time, diff)
"""

from penstock.progress.frontier import SINGLE_PARTITION, Frontier, Partition
from penstock.progress.time import MAX_TIME, MIN_TIME, check_time
from penstock.progress.update import MAX_DIFF, MIN_DIFF, Update

__all__ = [
    "MAX_DIFF",
    "MAX_TIME",
    "MIN_DIFF",
    "MIN_TIME",
    "SINGLE_PARTITION",
    "Frontier",
    "Partition",
    "Update",
    "check_time",
]
