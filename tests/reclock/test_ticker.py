"""Times of ticks under correct and wrong clocks."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from penstock.errors import UsageError
from penstock.progress import MAX_TIME
from penstock.reclock import (
    ClockReading,
    ClockReference,
    NotYet,
    SteppedBack,
    Tick,
    Ticker,
    WaitForAgreement,
    next_time,
)
from penstock.reclock.ticker import AHEAD_MS, Decision

planted = settings(
    max_examples=2_000, derandomize=True, database=None, phases=[Phase.generate], deadline=None
)

NOON = 1_649_678_400_000
HOUR_MS = 3_600_000
TEN_YEARS_MS = 10 * 365 * 24 * HOUR_MS
INTERVAL_MS = 1_000


# next_time.


def decide(
    now_ms: int,
    *,
    upper: int,
    reference: ClockReference | None = None,
    upstream_ms: int | None = None,
):
    return next_time(
        ClockReading(now_ms, boot_ms=50_000),
        interval_ms=INTERVAL_MS,
        upper=upper,
        reference=reference,
        upstream_ms=upstream_ms,
    )


def test_next_time_is_clock_rounded_down():
    decision = decide(NOON + 2_987, upper=NOON + 1, reference=ClockReference(NOON, boot_ms=47_000))
    assert decision == Tick(NOON + 2_000, ClockReference(NOON + 2_987, 50_000))


def test_next_time_after_missed_ticks_skips_them():
    decision = decide(NOON + 30_001, upper=NOON + 1, reference=ClockReference(NOON, boot_ms=20_000))
    assert decision == Tick(NOON + 30_000, ClockReference(NOON + 30_000, 50_000))


def test_next_time_below_upper_is_not_yet_due():
    assert decide(NOON + 300, upper=NOON + 1) == NotYet(700)
    assert decide(NOON + 300, upper=NOON + 1, reference=ClockReference(NOON, 49_700)) == NotYet(700)


def test_next_time_at_upper_ticks():
    decision = decide(NOON + 300, upper=NOON, reference=ClockReference(NOON - 1, boot_ms=49_000))
    assert isinstance(decision, Tick)
    assert decision.time == NOON


def test_next_time_after_clock_step_back_is_upper():
    reference = ClockReference(NOON, boot_ms=49_000)
    decision = decide(NOON - HOUR_MS, upper=NOON + 1, reference=reference)
    assert decision == SteppedBack(
        NOON + 1, by_ms=HOUR_MS, reference=ClockReference(NOON + 1, 50_000)
    )


def test_next_time_after_swing_keeps_expected_time():
    # The last tick was 50 s ahead, without confirmation.
    reference = ClockReference(NOON, boot_ms=49_000)
    decision = decide(NOON, upper=NOON + 50_001, reference=reference)
    assert decision == SteppedBack(
        NOON + 50_001, by_ms=50_000, reference=ClockReference(NOON + 1_000, 50_000)
    )


def test_next_time_after_clock_step_back_waits_one_interval():
    reference = ClockReference(NOON, boot_ms=49_400)
    assert decide(NOON - HOUR_MS, upper=NOON + 1, reference=reference) == NotYet(400)


def test_next_time_behind_after_restart_ticks_immediately():
    decision = decide(NOON - HOUR_MS, upper=NOON + 1)
    assert isinstance(decision, SteppedBack)
    assert decision.time == NOON + 1


@pytest.mark.parametrize("upstream_ms", [None, NOON, NOON + TEN_YEARS_MS - AHEAD_MS - 1])
def test_next_time_far_ahead_waits_for_agreement(upstream_ms: int | None):
    reference = ClockReference(NOON, boot_ms=49_000)
    now = NOON + TEN_YEARS_MS
    decision = decide(now, upper=NOON + 1, reference=reference, upstream_ms=upstream_ms)
    assert decision == WaitForAgreement(now, TEN_YEARS_MS - 1_000, upstream_ms)


@pytest.mark.parametrize("upstream_ms", [NOON + TEN_YEARS_MS - AHEAD_MS, NOON + 2 * TEN_YEARS_MS])
def test_next_time_far_ahead_with_agreement_ticks(upstream_ms: int):
    now = NOON + TEN_YEARS_MS
    decision = decide(
        now, upper=NOON + 1, reference=ClockReference(NOON, 0), upstream_ms=upstream_ms
    )
    assert decision == Tick(now, ClockReference(min(now, upstream_ms), 50_000))


def test_next_time_within_a_minute_ahead_needs_no_agreement():
    reference = ClockReference(NOON, boot_ms=50_000)
    assert isinstance(decide(NOON + 60_999, upper=NOON + 1, reference=reference), Tick)
    assert isinstance(decide(NOON + 61_000, upper=NOON + 1, reference=reference), WaitForAgreement)


def test_next_time_after_suspend_needs_no_agreement():
    reference = ClockReference(NOON, boot_ms=-3 * HOUR_MS)
    assert isinstance(decide(NOON + 3 * HOUR_MS, upper=NOON + 1, reference=reference), Tick)


def test_next_time_without_reference_needs_agreement():
    assert decide(NOON, upper=0) == WaitForAgreement(NOON, None, None)
    assert isinstance(decide(NOON, upper=0, upstream_ms=NOON), Tick)
    assert isinstance(decide(NOON + 59_000, upper=NOON + 1), Tick)
    assert isinstance(decide(NOON + HOUR_MS, upper=NOON + 1), WaitForAgreement)
    assert isinstance(decide(NOON + HOUR_MS, upper=NOON + 1, upstream_ms=NOON + HOUR_MS), Tick)


# Invariant 17: for every clock, times rise, and each pause in progress is reported.

Decide = Callable[..., Decision]


@dataclass(frozen=True)
class ClockEvent:
    """A change of the clocks before they are read again."""

    passes_ms: int
    """Time that passes on every clock."""

    steps_ms: int = 0
    """Step of the wall clock."""

    restarts: bool = False
    upstream: bool = True
    """True if the source reports its clock."""


steps_ms = st.one_of(
    st.just(0),
    st.sampled_from([-HOUR_MS, HOUR_MS, -TEN_YEARS_MS, TEN_YEARS_MS, -1, 1, -50_000, 50_000]),
    st.integers(-120_000, 120_000),
)
clock_events = st.builds(
    ClockEvent,
    passes_ms=st.sampled_from([0, 10, 999, 1_000, 1_001, 2_500, 70_000]),
    steps_ms=st.one_of(st.just(0), steps_ms),
    restarts=st.sampled_from([False, False, False, True]),
    upstream=st.sampled_from([True, True, False]),
)


def check_times(decide: Decide, trial: settings) -> None:
    @trial
    @given(events=st.lists(clock_events, max_size=30))
    def law(events: list[ClockEvent]) -> None:
        truth, wall_error = NOON, 0
        upper, reference = NOON + 1, ClockReference(NOON, boot_ms=0)
        restarts, last_report, steps_back = 0, NOON, 0
        for event in events:
            truth += event.passes_ms
            wall_error += event.steps_ms
            steps_back += event.steps_ms < 0
            if event.restarts:
                reference, restarts = None, restarts + 1
            decision = decide(
                ClockReading(truth + wall_error, truth - NOON),
                interval_ms=INTERVAL_MS,
                upper=upper,
                reference=reference,
                upstream_ms=truth if event.upstream else None,
            )
            match decision:
                case (
                    Tick(time=time, reference=reference)
                    | SteppedBack(time=time, reference=reference)
                ):
                    assert time >= upper, "times rise"
                    upper, last_report, steps_back = time + 1, truth, 0
                    slack = AHEAD_MS * (1 + restarts) + len(events)
                    assert time <= truth + slack, "no time is far ahead of true time"
                    if isinstance(decision, Tick):
                        assert time % INTERVAL_MS == 0, "ticks fall on multiples of the interval"
                        assert time <= truth + wall_error, "a tick is at or before the clock"
                    else:
                        assert decision.by_ms == time - 1 - (truth + wall_error) > 0
                case WaitForAgreement():
                    last_report, steps_back = truth, 0
                    assert not event.upstream or wall_error > AHEAD_MS, (
                        "waits only if the clock is ahead"
                    )
                case NotYet(wait_ms=wait_ms):
                    assert 0 < wait_ms <= INTERVAL_MS
                    # After a step back the wall clock repeats up to one interval.
                    pause_ms = truth - last_report
                    assert pause_ms < (3 + steps_back) * INTERVAL_MS, "ticks or reports"

    law()


def test_next_time_for_any_clock_rises_or_reports():
    check_times(next_time, settings(max_examples=300))


def _round_down(reading: ClockReading) -> int:
    return reading.now_ms // INTERVAL_MS * INTERVAL_MS


def use_greater_of_now_and_upper(reading: ClockReading, *, upper: int, **_: Any) -> Decision:
    return Tick(max(_round_down(reading), upper), ClockReference(reading.now_ms, reading.boot_ms))


def use_wall_clock(reading: ClockReading, **_: Any) -> Decision:
    return Tick(_round_down(reading), ClockReference(reading.now_ms, reading.boot_ms))


def wait_silently_for_clock(reading: ClockReading, *, upper: int, **arguments: Any) -> Decision:
    if _round_down(reading) < upper:
        return NotYet(INTERVAL_MS)
    return next_time(reading, upper=upper, **arguments)


def forget_gains(reading: ClockReading, **arguments: Any) -> Decision:
    decision = next_time(reading, **arguments)
    if isinstance(decision, Tick):
        return Tick(decision.time, ClockReference(reading.now_ms, reading.boot_ms))
    return decision


def ignore_upstream_clock(
    reading: ClockReading, *, upstream_ms: int | None, **arguments: Any
) -> Decision:
    return next_time(reading, upstream_ms=None, **arguments)


@pytest.mark.parametrize(
    "wrong",
    [
        use_greater_of_now_and_upper,
        use_wall_clock,
        wait_silently_for_clock,
        forget_gains,
        ignore_upstream_clock,
    ],
)
def test_wrong_next_time_is_caught(wrong: Decide):
    with pytest.raises(AssertionError):
        check_times(wrong, planted)


# Ticker.


class SteppingClock:
    """A clock that advances only in `wait`, with a wall clock that tests can set."""

    def __init__(self, now_ms: int) -> None:
        self.wall_ms = now_ms
        self.monotonic_ms = 7_000

    def now_ms(self) -> int:
        return self.wall_ms

    def boot_ms(self) -> int:
        return self.monotonic_ms

    def wait(self, event: threading.Event, timeout_ms: int) -> bool:
        assert timeout_ms > 0
        self.wall_ms += timeout_ms
        self.monotonic_ms += timeout_ms
        return event.is_set()


def next_three(ticker: Ticker, upper: int) -> list[tuple[type, int]]:
    """Return kind and time of the next three ticks, each sealed immediately."""
    ticks: list[tuple[type, int]] = []
    while len(ticks) < 3:
        decision = ticker.next(threading.Event(), upper=upper)
        assert isinstance(decision, Tick | SteppedBack)
        ticks.append((type(decision), decision.time))
        upper = decision.time + 1
    return ticks


def test_ticker_ticks_on_multiples_of_interval():
    clock = SteppingClock(NOON + 1_250)
    ticker = Ticker(clock, interval_ms=1_000, upstream_now=clock.now_ms)
    assert next_three(ticker, 0) == [
        (Tick, NOON + 1_000),
        (Tick, NOON + 2_000),
        (Tick, NOON + 3_000),
    ]


def test_ticker_after_clock_step_back_continues_and_catches_up():
    clock = SteppingClock(NOON)
    ticker = Ticker(clock, interval_ms=1_000, upstream_now=clock.now_ms)
    assert next_three(ticker, 0)[-1] == (Tick, NOON + 2_000)
    clock.wall_ms -= HOUR_MS
    began = clock.monotonic_ms
    assert next_three(ticker, NOON + 2_001) == [
        (SteppedBack, NOON + 2_001),
        (SteppedBack, NOON + 2_002),
        (SteppedBack, NOON + 2_003),
    ]
    assert clock.monotonic_ms - began == 3_000
    clock.wall_ms += HOUR_MS
    assert next_three(ticker, NOON + 2_004)[0] == (Tick, NOON + 5_000)


def test_ticker_with_clock_far_ahead_waits_until_clock_is_corrected():
    clock = SteppingClock(NOON)
    upstream_reads: list[int] = []

    def upstream_now() -> int:
        upstream_reads.append(clock.monotonic_ms)
        return NOON + clock.monotonic_ms - 7_000

    ticker = Ticker(clock, interval_ms=1_000, upstream_now=upstream_now)
    next_three(ticker, 0)
    assert len(upstream_reads) == 1, "only the first tick needs agreement"
    clock.wall_ms += TEN_YEARS_MS
    for _ in range(3):
        decision = ticker.next(threading.Event(), upper=NOON + 2_001)
        assert isinstance(decision, WaitForAgreement)
        assert decision.upstream_ms is not None
        assert decision.upstream_ms < NOON + HOUR_MS
    assert [b - a for a, b in pairwise(upstream_reads[1:])] == [1_000, 1_000]
    clock.wall_ms -= TEN_YEARS_MS
    assert next_three(ticker, NOON + 2_001)[0][0] is Tick


def test_ticker_after_unsealed_tick_returns_same_time():
    clock = SteppingClock(NOON)
    ticker = Ticker(clock, interval_ms=1_000, upstream_now=clock.now_ms)
    first = ticker.next(threading.Event(), upper=0)
    again = ticker.next(threading.Event(), upper=0)
    assert isinstance(first, Tick)
    assert isinstance(again, Tick)
    assert first.time == again.time == NOON


def test_ticker_with_stop_set_returns_none():
    stop = threading.Event()
    stop.set()
    clock = SteppingClock(NOON)
    ticker = Ticker(clock, interval_ms=1_000, upstream_now=lambda: None)
    assert ticker.next(stop, upper=0) is None
    assert isinstance(ticker.next(threading.Event(), upper=0), WaitForAgreement)
    assert ticker.next(stop, upper=0) is None


def test_ticker_with_invalid_argument_raises_usage_error():
    clock = SteppingClock(NOON)
    with pytest.raises(UsageError, match="tick interval of 0 ms is too short"):
        Ticker(clock, interval_ms=0, upstream_now=clock.now_ms)
    ticker = Ticker(clock, interval_ms=1, upstream_now=clock.now_ms)
    with pytest.raises(UsageError, match="leaves no time for a next tick"):
        ticker.next(threading.Event(), upper=MAX_TIME)


def test_ticker_at_once_ticks_next_millisecond_under_same_limits():
    clock = SteppingClock(NOON + 300)
    ticker = Ticker(clock, interval_ms=1_000, upstream_now=lambda: NOON + 300)
    stop = threading.Event()
    first = ticker.next(stop, upper=0, at_once=True)
    assert isinstance(first, Tick)
    assert first.time == NOON + 300
    second = ticker.next(stop, upper=first.time + 1, at_once=True)
    assert isinstance(second, Tick)
    assert second.time == first.time + 1
    clock.wall_ms += 24 * HOUR_MS
    third = ticker.next(stop, upper=second.time + 1, at_once=True)
    assert isinstance(third, WaitForAgreement)
