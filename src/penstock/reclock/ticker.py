"""When to tick, and at which time.

Ticks fall on round times, the multiples of the interval, and a tick that was missed
is skipped: a binding covers all that came before it, so the next tick makes up for
it. The time of a tick is the wall clock, read *before* the source is probed and
rounded down, so that what was acknowledged upstream before the time lies below what
the probe finds.

Our times only ever rise, and a wall clock does not:

    steps back     The tick goes to the upper, one past the last time, and says so.
                   Times then rise by one millisecond a tick, at the pace of the
                   clock that never steps, until the wall clock has caught up.
    jumps ahead    One tick by a clock set to 2038 would take the timeline there for
                   good, with every time before it used up. So a tick more than
                   60 s ahead of where the last one and the time passed since put us
                   needs a witness: the source's own clock must have come as far.
                   Until it has, the ticker waits, and says so.

A clock may also creep, by steps that are each too small to need a witness. So from
one witness to the next it is the clock that never steps that is followed: what the
wall clock gains on it is added up, and all of it together may be 60 s.

After a restart nobody knows how much time has passed, and before the first tick
there is nothing to compare with; then the witness is needed too. A witness far ahead
of us does no harm, and counts. A source that cannot tell the time needs another one;
which one is for the caller to choose.
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
    "Decision",
    "NotYet",
    "Pace",
    "Reading",
    "SteppedBack",
    "Tick",
    "Ticker",
    "WaitForAgreement",
    "next_time",
]

AHEAD_MS: Final = 60_000
"""How far ahead of the time that should have passed a tick may be without a witness."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Both clocks, read together: the wall's, and the one that never steps."""

    now_ms: int
    boot_ms: int


@dataclass(frozen=True, slots=True)
class Pace:
    """Where we should be: `time_ms` when the steady clock stood at `boot_ms`, and on from there."""

    time_ms: int
    boot_ms: int

    def expected_ms(self, reading: Reading) -> int:
        """The time that it should be by now."""
        return self.time_ms + max(0, reading.boot_ms - self.boot_ms)


@dataclass(frozen=True, slots=True)
class Tick:
    """Tick at `time`."""

    time: int
    pace: Pace


@dataclass(frozen=True, slots=True)
class SteppedBack:
    """Tick at `time`, which is the upper: the wall clock is `by_ms` behind the last tick."""

    time: int
    by_ms: int
    pace: Pace


@dataclass(frozen=True, slots=True)
class NotYet:
    """The next tick may be due in `wait_ms`, which is never more than an interval."""

    wait_ms: int


@dataclass(frozen=True, slots=True)
class WaitForAgreement:
    """The wall clock says `time`, which is not believed without a witness."""

    time: int
    ahead_ms: int | None
    """Of where we should be; None, if nothing was ever bound."""

    upstream_ms: int | None
    """What the witness says; None, if it was not asked or could not tell."""


Decision: TypeAlias = Tick | SteppedBack | NotYet | WaitForAgreement


def next_time(
    reading: Reading,
    *,
    interval_ms: int,
    upper: int,
    pace: Pace | None,
    upstream_ms: int | None = None,
) -> Decision:
    """Whether to tick now, and at which time; it is at or past `upper`.

    `pace` is the one of the last tick, if that was made by this process, and
    `upstream_ms` what the source's clock says, if it was asked.

    >>> next_time(Reading(6_987, 100), interval_ms=1_000, upper=5_001, pace=Pace(5_000, 0))
    Tick(time=6000, pace=Pace(time_ms=5100, boot_ms=100))
    """
    rounded = reading.now_ms // interval_ms * interval_ms
    if rounded >= upper:
        return _ahead(reading, rounded, upper=upper, pace=pace, upstream_ms=upstream_ms)
    # The round time of the last tick is where the clock must have been.
    last = upper - 1
    last_rounded = last // interval_ms * interval_ms
    if reading.now_ms >= last_rounded:
        return NotYet(last_rounded + interval_ms - reading.now_ms)
    passed_ms = interval_ms if pace is None else reading.boot_ms - pace.boot_ms
    if passed_ms < interval_ms:
        return NotYet(interval_ms - max(0, passed_ms))
    expected = last if pace is None else pace.expected_ms(reading)
    return SteppedBack(upper, last - reading.now_ms, Pace(min(upper, expected), reading.boot_ms))


def _ahead(
    reading: Reading, time: int, *, upper: int, pace: Pace | None, upstream_ms: int | None
) -> Tick | WaitForAgreement:
    expected = _expected_ms(reading, upper=upper, pace=pace)
    if expected is not None and time <= expected + AHEAD_MS:
        # SUBTLE: not `now_ms`. Gains that nobody witnessed must add up.
        return Tick(time, Pace(min(reading.now_ms, expected), reading.boot_ms))
    if upstream_ms is not None and time <= upstream_ms + AHEAD_MS:
        return Tick(time, Pace(min(reading.now_ms, upstream_ms), reading.boot_ms))
    return WaitForAgreement(time, None if expected is None else time - expected, upstream_ms)


def _expected_ms(reading: Reading, *, upper: int, pace: Pace | None) -> int | None:
    if pace is not None:
        return pace.expected_ms(reading)
    return upper - 1 if upper else None


class Ticker:
    """Says when to tick, by a clock."""

    def __init__(
        self, clock: Clock, *, interval_ms: int, upstream_now: Callable[[], int | None]
    ) -> None:
        if interval_ms < 1:
            raise UsageError(
                f"interval of {interval_ms} ms between ticks is too short",
                hint="Give at least one millisecond.",
            )
        self._clock = clock
        self._interval_ms = interval_ms
        self._upstream_now = upstream_now
        self._pace: Pace | None = None
        self._doubted = False

    def next(
        self, stop: threading.Event, *, upper: int, at_once: bool = False
    ) -> Tick | SteppedBack | WaitForAgreement | None:
        """Wait for the next tick of a source whose collections have come to `upper`.

        With `at_once`, for a source that is catching up, it is not a round time that is
        waited for, but the next millisecond; the clock is believed no more for that.

        The time is one at which to bind what is probed after this returns. When the
        clock is not believed, that is returned at once, to be told; the next call
        then waits for an interval before it looks again. None, if `stop` is set.

        `upstream_now` is called only if a witness is needed. Its errors pass through.
        """
        if check_time(upper) == MAX_TIME:
            raise UsageError("a source that is closed has no next tick")
        if self._doubted:
            self._doubted = False
            if self._clock.wait(stop, self._interval_ms):
                return None
        while not stop.is_set():
            decision = self._look(upper, 1 if at_once else self._interval_ms)
            match decision:
                case NotYet(wait_ms=wait_ms):
                    self._clock.wait(stop, wait_ms)
                case WaitForAgreement():
                    self._doubted = True
                    return decision
                case Tick(pace=pace) | SteppedBack(pace=pace):
                    self._pace = pace
                    return decision
        return None

    def _look(self, upper: int, interval_ms: int) -> Decision:
        reading = Reading(self._clock.now_ms(), self._clock.boot_ms())
        decision = self._decided(reading, interval_ms, upper=upper, upstream_ms=None)
        if isinstance(decision, WaitForAgreement):
            # By the same reading, which must stay older than any probe.
            upstream_ms = self._upstream_now()
            return self._decided(reading, interval_ms, upper=upper, upstream_ms=upstream_ms)
        return decision

    def _decided(
        self, reading: Reading, interval_ms: int, *, upper: int, upstream_ms: int | None
    ) -> Decision:
        return next_time(
            reading,
            interval_ms=interval_ms,
            upper=upper,
            pace=self._pace,
            upstream_ms=upstream_ms,
        )
