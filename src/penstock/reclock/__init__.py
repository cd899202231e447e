"""Reclocking: positions of a source mapped to times of the timeline.

A *remap binding* is a pair of a time and a source frontier. All bindings of a source form a
collection, its remap. Everything here is a function of values, except `Ticker`, which reads the
clock that it is given.

    remap      updates of remap, in the form of a source kind
    mint       the next binding, or the reason for none
    progress   the progress relation: bindings as users read them
    ticker     times of ticks

Bindings never decrease, so each event has exactly one time. Let R(t) be the source frontier that
remap has as of t:

    time of event e      =  the least t with e below R(t)
    contents as of t     =  the events below R(t)
    resume frontier      =  R(u - 1), for data with the upper u

The since of remap therefore stays at or below u - 1.
"""

from penstock.reclock.mint import Minted, Regressed, Unmoved, mint
from penstock.reclock.progress import progress_as_of, progress_changes, progress_name
from penstock.reclock.remap import (
    accumulate,
)
from penstock.reclock.ticker import (
    ClockReading,
    ClockReference,
    NotYet,
    SteppedBack,
    Tick,
    Ticker,
    WaitForAgreement,
    next_time,
)

__all__ = [
    "ClockReading",
    "ClockReference",
    "Minted",
    "NotYet",
    "Regressed",
    "SteppedBack",
    "Tick",
    "Ticker",
    "Unmoved",
    "WaitForAgreement",
    "accumulate",
    "mint",
    "next_time",
    "progress_as_of",
    "progress_changes",
    "progress_name",
]
