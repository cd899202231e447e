"""How far it has come.

Times and their order, frontiers, intervals of our own time, and updates with
the arithmetic that makes a collection out of them. Everything here is a value
or a function from values to values: no clock, no I/O, no Spark.

    order       our time, and the times of sources with partitions
    antichain   frontiers of times that are only partly ordered
    interval    [lower, upper), and what a batch says about one
    update      (data, time, diff), and sums of them
"""

from penstock.progress.antichain import Antichain, PartitionedFrontier, Regression
from penstock.progress.interval import Description, Interval
from penstock.progress.order import (
    MAX_TIME,
    MIN_TIME,
    Between,
    Exactly,
    JoinableTime,
    Partition,
    PartitionedTime,
    Partitions,
    Sortable,
    Time,
    check_time,
)
from penstock.progress.update import (
    MAX_DIFF,
    MIN_DIFF,
    Update,
    accumulate_as_of,
    advance,
    changes_between,
    consolidate,
)

__all__ = [
    "MAX_DIFF",
    "MAX_TIME",
    "MIN_DIFF",
    "MIN_TIME",
    "Antichain",
    "Between",
    "Description",
    "Exactly",
    "Interval",
    "JoinableTime",
    "Partition",
    "PartitionedFrontier",
    "PartitionedTime",
    "Partitions",
    "Regression",
    "Sortable",
    "Time",
    "Update",
    "accumulate_as_of",
    "advance",
    "changes_between",
    "check_time",
    "consolidate",
]
