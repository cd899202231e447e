"""Times rise, none is far ahead of the truth, and whoever does not tick says why."""

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
    NotYet,
    Pace,
    Reading,
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


# One decision.


def decided(now_ms: int, *, upper: int, pace: Pace | None = None, upstream_ms: int | None = None):
    return next_time(
        Reading(now_ms, boot_ms=50_000),
        interval_ms=INTERVAL_MS,
        upper=upper,
        pace=pace,
        upstream_ms=upstream_ms,
    )


def test_a_tick_is_the_clock_rounded_down():
    decision = decided(NOON + 2_987, upper=NOON + 1, pace=Pace(NOON, boot_ms=47_000))
    assert decision == Tick(NOON + 2_000, Pace(NOON + 2_987, 50_000))


def test_missed_ticks_are_skipped():
    decision = decided(NOON + 30_001, upper=NOON + 1, pace=Pace(NOON, boot_ms=20_000))
    assert decision == Tick(NOON + 30_000, Pace(NOON + 30_000, 50_000))


def test_a_time_that_was_used_is_not_used_again():
    assert decided(NOON + 300, upper=NOON + 1) == NotYet(700)
    assert decided(NOON + 300, upper=NOON + 1, pace=Pace(NOON, 49_700)) == NotYet(700)


def test_a_round_time_that_is_the_upper_is_free():
    decision = decided(NOON + 300, upper=NOON, pace=Pace(NOON - 1, boot_ms=49_000))
    assert isinstance(decision, Tick)
    assert decision.time == NOON


def test_a_clock_that_stepped_back_goes_on_at_the_upper_and_says_so():
    pace = Pace(NOON, boot_ms=49_000)
    decision = decided(NOON - HOUR_MS, upper=NOON + 1, pace=pace)
    assert decision == SteppedBack(NOON + 1, by_ms=HOUR_MS, pace=Pace(NOON + 1, 50_000))


def test_a_clock_that_swings_gains_nothing_by_stepping_back():
    # The last tick was 50 s ahead, without a witness.
    pace = Pace(NOON, boot_ms=49_000)
    decision = decided(NOON, upper=NOON + 50_001, pace=pace)
    assert decision == SteppedBack(NOON + 50_001, by_ms=50_000, pace=Pace(NOON + 1_000, 50_000))


def test_a_clock_that_stepped_back_ticks_no_more_often_for_it():
    pace = Pace(NOON, boot_ms=49_400)
    assert decided(NOON - HOUR_MS, upper=NOON + 1, pace=pace) == NotYet(400)


def test_a_clock_that_is_behind_after_a_restart_goes_on_at_once():
    decision = decided(NOON - HOUR_MS, upper=NOON + 1)
    assert isinstance(decision, SteppedBack)
    assert decision.time == NOON + 1


@pytest.mark.parametrize("upstream_ms", [None, NOON, NOON + TEN_YEARS_MS - AHEAD_MS - 1])
def test_a_clock_far_ahead_waits_for_a_witness(upstream_ms: int | None):
    pace = Pace(NOON, boot_ms=49_000)
    now = NOON + TEN_YEARS_MS
    decision = decided(now, upper=NOON + 1, pace=pace, upstream_ms=upstream_ms)
    assert decision == WaitForAgreement(now, TEN_YEARS_MS - 1_000, upstream_ms)


@pytest.mark.parametrize("upstream_ms", [NOON + TEN_YEARS_MS - AHEAD_MS, NOON + 2 * TEN_YEARS_MS])
def test_a_witness_that_has_come_as_far_is_enough(upstream_ms: int):
    now = NOON + TEN_YEARS_MS
    decision = decided(now, upper=NOON + 1, pace=Pace(NOON, 0), upstream_ms=upstream_ms)
    assert decision == Tick(now, Pace(min(now, upstream_ms), 50_000))


def test_up_to_a_minute_ahead_needs_no_witness():
    pace = Pace(NOON, boot_ms=50_000)
    assert isinstance(decided(NOON + 60_999, upper=NOON + 1, pace=pace), Tick)
    assert isinstance(decided(NOON + 61_000, upper=NOON + 1, pace=pace), WaitForAgreement)


def test_a_minute_slept_is_a_minute_passed():
    pace = Pace(NOON, boot_ms=-3 * HOUR_MS)
    assert isinstance(decided(NOON + 3 * HOUR_MS, upper=NOON + 1, pace=pace), Tick)


def test_the_first_tick_needs_a_witness_and_so_does_a_long_absence():
    assert decided(NOON, upper=0) == WaitForAgreement(NOON, None, None)
    assert isinstance(decided(NOON, upper=0, upstream_ms=NOON), Tick)
    assert isinstance(decided(NOON + 59_000, upper=NOON + 1), Tick)
    assert isinstance(decided(NOON + HOUR_MS, upper=NOON + 1), WaitForAgreement)
    assert isinstance(decided(NOON + HOUR_MS, upper=NOON + 1, upstream_ms=NOON + HOUR_MS), Tick)


# Invariant 17: whatever the clock does, times rise, and progress continues or says why.

Decide = Callable[..., Decision]


@dataclass(frozen=True)
class Moment:
    """What happens before the next look at the clock."""

    passes_ms: int
    """On every clock."""

    steps_ms: int = 0
    """On the wall clock alone."""

    restarts: bool = False
    upstream: bool = True
    """Whether the source answers when asked for the time."""


steps_ms = st.one_of(
    st.just(0),
    st.sampled_from([-HOUR_MS, HOUR_MS, -TEN_YEARS_MS, TEN_YEARS_MS, -1, 1, -50_000, 50_000]),
    st.integers(-120_000, 120_000),
)
moments = st.builds(
    Moment,
    passes_ms=st.sampled_from([0, 10, 999, 1_000, 1_001, 2_500, 70_000]),
    steps_ms=st.one_of(st.just(0), steps_ms),
    restarts=st.sampled_from([False, False, False, True]),
    upstream=st.sampled_from([True, True, False]),
)


def check_times(decide: Decide, trial: settings) -> None:
    @trial
    @given(life=st.lists(moments, max_size=30))
    def law(life: list[Moment]) -> None:
        truth, wall_error = NOON, 0
        upper, pace = NOON + 1, Pace(NOON, boot_ms=0)
        restarts, last_told, steps_back = 0, NOON, 0
        for moment in life:
            truth += moment.passes_ms
            wall_error += moment.steps_ms
            steps_back += moment.steps_ms < 0
            if moment.restarts:
                pace, restarts = None, restarts + 1
            decision = decide(
                Reading(truth + wall_error, truth - NOON),
                interval_ms=INTERVAL_MS,
                upper=upper,
                pace=pace,
                upstream_ms=truth if moment.upstream else None,
            )
            match decision:
                case Tick(time=time, pace=pace) | SteppedBack(time=time, pace=pace):
                    assert time >= upper, "times rise"
                    upper, last_told, steps_back = time + 1, truth, 0
                    slack = AHEAD_MS * (1 + restarts) + len(life)
                    assert time <= truth + slack, "no time is far ahead of the truth"
                    if isinstance(decision, Tick):
                        assert time % INTERVAL_MS == 0, "ticks fall on round times"
                        assert time <= truth + wall_error, "a tick is no later than the clock"
                    else:
                        assert decision.by_ms == time - 1 - (truth + wall_error) > 0
                case WaitForAgreement():
                    last_told, steps_back = truth, 0
                    assert not moment.upstream or wall_error > AHEAD_MS, "doubted for a reason"
                case NotYet(wait_ms=wait_ms):
                    assert 0 < wait_ms <= INTERVAL_MS
                    # After a step back the wall clock passes up to an interval again.
                    silence_ms = truth - last_told
                    assert silence_ms < (3 + steps_back) * INTERVAL_MS, "ticks or says"

    law()


def test_times_rise_and_progress_continues_or_says_why():
    check_times(next_time, settings(max_examples=300))


def _rounded(reading: Reading) -> int:
    return reading.now_ms // INTERVAL_MS * INTERVAL_MS


def the_greater_of_now_and_upper(reading: Reading, *, upper: int, **_: Any) -> Decision:
    return Tick(max(_rounded(reading), upper), Pace(reading.now_ms, reading.boot_ms))


def now(reading: Reading, **_: Any) -> Decision:
    return Tick(_rounded(reading), Pace(reading.now_ms, reading.boot_ms))


def silence_until_the_clock_is_back(reading: Reading, *, upper: int, **rest: Any) -> Decision:
    if _rounded(reading) < upper:
        return NotYet(INTERVAL_MS)
    return next_time(reading, upper=upper, **rest)


def forgets_what_was_gained(reading: Reading, **rest: Any) -> Decision:
    decision = next_time(reading, **rest)
    if isinstance(decision, Tick):
        return Tick(decision.time, Pace(reading.now_ms, reading.boot_ms))
    return decision


def believes_no_one(reading: Reading, *, upstream_ms: int | None, **rest: Any) -> Decision:
    return next_time(reading, upstream_ms=None, **rest)


@pytest.mark.parametrize(
    "wrong",
    [
        the_greater_of_now_and_upper,
        now,
        silence_until_the_clock_is_back,
        forgets_what_was_gained,
        believes_no_one,
    ],
)
def test_wrong_times_are_caught(wrong: Decide):
    with pytest.raises(AssertionError):
        check_times(wrong, planted)


# By a clock.


class SteppingClock:
    """A clock that stands still until somebody waits, and whose wall clock can be set."""

    def __init__(self, now_ms: int) -> None:
        self.wall_ms = now_ms
        self.steady_ms = 7_000

    def now_ms(self) -> int:
        return self.wall_ms

    def boot_ms(self) -> int:
        return self.steady_ms

    def wait(self, event: threading.Event, timeout_ms: int) -> bool:
        assert timeout_ms > 0
        self.wall_ms += timeout_ms
        self.steady_ms += timeout_ms
        return event.is_set()


def ticked(ticker: Ticker, upper: int) -> list[tuple[type, int]]:
    """The next three ticks, each sealed at once."""
    told: list[tuple[type, int]] = []
    while len(told) < 3:
        decision = ticker.next(threading.Event(), upper=upper)
        assert isinstance(decision, Tick | SteppedBack)
        told.append((type(decision), decision.time))
        upper = decision.time + 1
    return told


def test_ticks_fall_on_round_times():
    clock = SteppingClock(NOON + 1_250)
    ticker = Ticker(clock, interval_ms=1_000, upstream_now=clock.now_ms)
    assert ticked(ticker, 0) == [
        (Tick, NOON + 1_000),
        (Tick, NOON + 2_000),
        (Tick, NOON + 3_000),
    ]


def test_a_clock_set_back_ticks_on_and_then_catches_up():
    clock = SteppingClock(NOON)
    ticker = Ticker(clock, interval_ms=1_000, upstream_now=clock.now_ms)
    assert ticked(ticker, 0)[-1] == (Tick, NOON + 2_000)
    clock.wall_ms -= HOUR_MS
    began = clock.steady_ms
    assert ticked(ticker, NOON + 2_001) == [
        (SteppedBack, NOON + 2_001),
        (SteppedBack, NOON + 2_002),
        (SteppedBack, NOON + 2_003),
    ]
    assert clock.steady_ms - began == 3_000
    clock.wall_ms += HOUR_MS
    assert ticked(ticker, NOON + 2_004)[0] == (Tick, NOON + 5_000)


def test_a_clock_set_ten_years_ahead_waits_says_so_and_goes_on_when_it_is_back():
    clock = SteppingClock(NOON)
    asked: list[int] = []

    def upstream_now() -> int:
        asked.append(clock.steady_ms)
        return NOON + clock.steady_ms - 7_000

    ticker = Ticker(clock, interval_ms=1_000, upstream_now=upstream_now)
    ticked(ticker, 0)
    assert len(asked) == 1, "of the first tick; the next ones need no witness"
    clock.wall_ms += TEN_YEARS_MS
    for _ in range(3):
        doubt = ticker.next(threading.Event(), upper=NOON + 2_001)
        assert isinstance(doubt, WaitForAgreement)
        assert doubt.upstream_ms is not None
        assert doubt.upstream_ms < NOON + HOUR_MS
    assert [b - a for a, b in pairwise(asked[1:])] == [1_000, 1_000]
    clock.wall_ms -= TEN_YEARS_MS
    assert ticked(ticker, NOON + 2_001)[0][0] is Tick


def test_a_tick_that_was_not_sealed_leaves_no_trace_in_the_next():
    clock = SteppingClock(NOON)
    ticker = Ticker(clock, interval_ms=1_000, upstream_now=clock.now_ms)
    first = ticker.next(threading.Event(), upper=0)
    again = ticker.next(threading.Event(), upper=0)
    assert isinstance(first, Tick)
    assert isinstance(again, Tick)
    assert first.time == again.time == NOON


def test_whoever_is_told_to_stop_stops():
    stop = threading.Event()
    stop.set()
    clock = SteppingClock(NOON)
    ticker = Ticker(clock, interval_ms=1_000, upstream_now=lambda: None)
    assert ticker.next(stop, upper=0) is None
    assert isinstance(ticker.next(threading.Event(), upper=0), WaitForAgreement)
    assert ticker.next(stop, upper=0) is None


def test_what_cannot_tick_is_refused():
    clock = SteppingClock(NOON)
    with pytest.raises(UsageError, match="0 ms between ticks is too short"):
        Ticker(clock, interval_ms=0, upstream_now=clock.now_ms)
    ticker = Ticker(clock, interval_ms=1, upstream_now=clock.now_ms)
    with pytest.raises(UsageError, match="closed has no next tick"):
        ticker.next(threading.Event(), upper=MAX_TIME)


def test_a_source_that_catches_up_ticks_at_once_and_believes_the_clock_no_more_for_it():
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
    doubted = ticker.next(stop, upper=second.time + 1, at_once=True)
    assert isinstance(doubted, WaitForAgreement)
