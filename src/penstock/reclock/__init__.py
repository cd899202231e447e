"""A source's own time, translated into ours.

A source counts in offsets; we count in milliseconds, on one timeline for all
sources. A *binding* says how far a source had come at one of our times, and all
bindings of a source are its remap collection. Everything here is a function from
values to values, but for `Ticker`, which asks a clock it is given.

    remap      what bindings look like at rest, for each type of source
    mint       the next binding, or why there is none
    follow     from bindings to the time of each event, and where to resume
    progress   bindings as users see them
    ticker     when to bind next, and at which time
"""

from penstock.reclock.follow import Bindings, compaction_bound
from penstock.reclock.mint import Closing, Minted, Regressed, Unmoved, close, mint
from penstock.reclock.progress import progress_as_of, progress_changes, progress_name
from penstock.reclock.remap import (
    KAFKA,
    KAFKA_TOPICS,
    KINESIS,
    POSTGRES,
    PUBNUB,
    S3,
    SHAPES,
    WHOLE,
    Offsets,
    PartitionKey,
    Shape,
    accumulated,
    shape_of,
)
from penstock.reclock.ticker import (
    NotYet,
    Pace,
    Reading,
    SteppedBack,
    Tick,
    Ticker,
    WaitForAgreement,
    next_time,
)

__all__ = [
    "KAFKA",
    "KAFKA_TOPICS",
    "KINESIS",
    "POSTGRES",
    "PUBNUB",
    "S3",
    "SHAPES",
    "WHOLE",
    "Bindings",
    "Closing",
    "Minted",
    "NotYet",
    "Offsets",
    "Pace",
    "PartitionKey",
    "Reading",
    "Regressed",
    "Shape",
    "SteppedBack",
    "Tick",
    "Ticker",
    "Unmoved",
    "WaitForAgreement",
    "accumulated",
    "close",
    "compaction_bound",
    "mint",
    "next_time",
    "progress_as_of",
    "progress_changes",
    "progress_name",
    "shape_of",
]
