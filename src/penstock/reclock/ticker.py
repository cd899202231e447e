"""The times of ticks.

Ticks fall on multiples of the interval. A missed tick is skipped, because the next tick binds
everything before it. The time of a tick is the wall clock, rounded down and read *before* the
source is probed. Everything acknowledged upstream before that time is then below the probed
frontier.

Times only rise; wall clocks do not:

    steps back     The tick uses the upper, one past the last time, and reports `SteppedBack`.
                   Times then rise by one millisecond per tick, paced by the monotonic clock,
                   until the wall clock has caught up.
    jumps ahead    One tick by a clock set to 2038 would use up all times before 2038. A tick more
                   than 60 s ahead of the expected time therefore needs confirmation: the clock
                   of the source must have advanced as far. Until then the ticker waits and
                   reports `WaitForAgreement`.

The expected time is the last confirmed time plus the time that has passed on the monotonic clock.
A wall clock may also gain by steps that are each below 60 s. The gains since the last
confirmation therefore add up, and their sum is limited to 60 s.

After a restart the time passed is not known, and before the first tick there is no expected time;
both need confirmation too. A source clock far ahead of the wall clock confirms it. If a source
has no clock, the caller provides another one.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from penstock.clock import Clock
from penstock.errors import UsageError
from penstock.progress import MAX_TIME, check_time

__all__ = [
    "AHEAD_MS",
    "ClockReading",
    "ClockReference",
    "Decision",
    "NotYet",
    "SteppedBack",
    "Tick",
    "Ticker",
    "WaitForAgreement",
    "next_time",
]

AHEAD_MS: Final = 60_000
"""Limit for ticks ahead of the expected time without confirmation by the source clock."""


@dataclass(frozen=True, slots=True)
class ClockReading:
    """The wall clock and the monotonic clock, read together."""

    now_ms: int
    boot_ms: int


@dataclass(frozen=True, slots=True)
class ClockReference:
    """A point of the timeline on the monotonic clock: `time_ms` at `boot_ms`."""

    time_ms: int
    boot_ms: int

    def expected_ms(self, reading: ClockReading) -> int:
        """Return the expected time at `reading`."""
        return self.time_ms + max(0, reading.boot_ms - self.boot_ms)


@dataclass(frozen=True, slots=True)
class Tick:
    """A tick is due at `time`."""

    time: int
    reference: ClockReference


@dataclass(frozen=True, slots=True)
class SteppedBack:
    """A tick is due at `time`, the upper: the wall clock is `by_ms` behind the last tick."""

    time: int
    by_ms: int
    reference: ClockReference


@dataclass(frozen=True, slots=True)
class NotYet:
    """No tick is due for `wait_ms`, at most one interval."""

    wait_ms: int


@dataclass(frozen=True, slots=True)
class WaitForAgreement:
    """The wall clock reads `time`, too far ahead to use without confirmation."""

    time: int
    ahead_ms: int | None
    """Distance to the expected time; None, if nothing is bound yet."""

    upstream_ms: int | None
    """The source clock; None, if it was not read or the source has none."""


Decision: TypeAlias = Tick | SteppedBack | NotYet | WaitForAgreement


def next_time(
    reading: ClockReading,
    *,
    interval_ms: int,
    upper: int,
    reference: ClockReference | None,
    upstream_ms: int | None = None,
) -> Decision:
    """Decide whether a tick is due, and at which time. The time is at or after `upper`.

    `reference` belongs to the last tick, if this process made it. `upstream_ms` is the source
    clock, if it was read.

    >>> reading, reference = ClockReading(6_987, 100), ClockReference(5_000, 0)
    >>> next_time(reading, interval_ms=1_000, upper=5_001, reference=reference)
    Tick(time=6000, reference=ClockReference(time_ms=5100, boot_ms=100))
    """
    rounded = reading.now_ms // interval_ms * interval_ms
    if rounded >= upper:
        return _ahead(reading, rounded, upper=upper, reference=reference, upstream_ms=upstream_ms)
    # The wall clock had reached the rounded time of the last tick.
    last = upper - 1
    last_rounded = last // interval_ms * interval_ms
    if reading.now_ms >= last_rounded:
        return NotYet(last_rounded + interval_ms - reading.now_ms)
    passed_ms = interval_ms if reference is None else reading.boot_ms - reference.boot_ms
    if passed_ms < interval_ms:
        return NotYet(interval_ms - max(0, passed_ms))
    expected = last if reference is None else reference.expected_ms(reading)
    return SteppedBack(
        upper, last - reading.now_ms, ClockReference(min(upper, expected), reading.boot_ms)
    )


def _ahead(
    reading: ClockReading,
    time: int,
    *,
    upper: int,
    reference: ClockReference | None,
    upstream_ms: int | None,
) -> Tick | WaitForAgreement:
    expected = _expected_ms(reading, upper=upper, reference=reference)
    if expected is not None and time <= expected + AHEAD_MS:
        # SUBTLE: not `now_ms`. Gains without confirmation must add up.
        return Tick(time, ClockReference(min(reading.now_ms, expected), reading.boot_ms))
    if upstream_ms is not None and time <= upstream_ms + AHEAD_MS:
        return Tick(time, ClockReference(min(reading.now_ms, upstream_ms), reading.boot_ms))
    return WaitForAgreement(time, None if expected is None else time - expected, upstream_ms)


def _expected_ms(
    reading: ClockReading, *, upper: int, reference: ClockReference | None
) -> int | None:
    if reference is not None:
        return reference.expected_ms(reading)
    return upper - 1 if upper else None


class Ticker:
    """Waits for the next tick, by a clock."""

    def __init__(
        self, clock: Clock, *, interval_ms: int, upstream_now: Callable[[], int | None]
    ) -> None:
        if interval_ms < 1:
            raise UsageError(
                f"tick interval of {interval_ms} ms is too short",
                hint="Give at least one millisecond.",
            )
        self._clock = clock
        self._interval_ms = interval_ms
        self._upstream_now = upstream_now
        self._reference: ClockReference | None = None
        self._awaits_agreement = False

    def next(
        self, stop: threading.Event, *, upper: int, at_once: bool = False
    ) -> Tick | SteppedBack | WaitForAgreement | None:
        """Wait for the next tick of a source with the upper `upper`; return None on `stop`.

        The caller probes the source after this returns and binds the frontier to the time.

        With `at_once`, for a source that is catching up, wait for the next millisecond instead
        of the next multiple of the interval. The same limits for wrong clocks apply.

        `WaitForAgreement` is returned immediately, for the caller to report. The next call then
        waits one interval before it reads the clock again.

        `upstream_now` is called only if confirmation is needed. Its errors propagate.
        """
        if check_time(upper) == MAX_TIME:
            raise UsageError(f"upper {upper} leaves no time for a next tick")
        if self._awaits_agreement:
            self._awaits_agreement = False
            if self._clock.wait(stop, self._interval_ms):
                return None
        while not stop.is_set():
            decision = self._decide_now(upper, 1 if at_once else self._interval_ms)
            match decision:
                case NotYet(wait_ms=wait_ms):
                    self._clock.wait(stop, wait_ms)
                case WaitForAgreement():
                    self._awaits_agreement = True
                    return decision
                case Tick(reference=reference) | SteppedBack(reference=reference):
                    self._reference = reference
                    return decision
        return None

    def _decide_now(self, upper: int, interval_ms: int) -> Decision:
        reading = ClockReading(self._clock.now_ms(), self._clock.boot_ms())
        decision = self._decide(reading, interval_ms, upper=upper, upstream_ms=None)
        if isinstance(decision, WaitForAgreement):
            # With the same reading, which must be older than any probe.
            upstream_ms = self._upstream_now()
            return self._decide(reading, interval_ms, upper=upper, upstream_ms=upstream_ms)
        return decision

    def _decide(
        self, reading: ClockReading, interval_ms: int, *, upper: int, upstream_ms: int | None
    ) -> Decision:
        return next_time(
            reading,
            interval_ms=interval_ms,
            upper=upper,
            reference=self._reference,
            upstream_ms=upstream_ms,
        )
