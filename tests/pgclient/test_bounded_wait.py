import threading

import pytest

from penstock.deadlines import STOP_GRACE_S, answer_timeout_s
from penstock.errors import TransientError
from penstock.pgclient import SilenceWatch
from penstock.testing.clocks import ManualClock

DEADLINE_MS = int(answer_timeout_s() * 1_000)
GRACE_MS = int(STOP_GRACE_S * 1_000)


def test_silence_watch_before_deadline_does_not_inspect_backend() -> None:
    clock = ManualClock()
    watch = SilenceWatch("here", lambda: pytest.fail("inspected"), None, clock=clock)
    clock.move_ms(DEADLINE_MS - 1)
    watch.check()
    assert watch.silent_since_ms == clock.boot_ms() - DEADLINE_MS + 1
    watch.received()
    assert watch.silent_since_ms is None
    clock.move_ms(DEADLINE_MS - 1)
    watch.check()


def test_silence_watch_inspects_busy_backend_at_each_deadline() -> None:
    clock = ManualClock()
    inspections: list[int] = []

    def inspect() -> str:
        inspections.append(clock.boot_ms())
        return ""

    watch = SilenceWatch("here", inspect, None, clock=clock)
    for _ in range(4):
        clock.move_ms(DEADLINE_MS // 2)
        watch.check()
    assert len(inspections) == 2


@pytest.mark.parametrize("reason", ["the server has closed the connection", None])
def test_silence_watch_of_lost_connection_raises_transient_error(reason: str | None) -> None:
    clock = ManualClock()
    inspect = None if reason is None else lambda: reason
    watch = SilenceWatch("here", inspect, None, clock=clock)
    clock.move_ms(DEADLINE_MS)
    with pytest.raises(TransientError, match="here does not answer") as raised:
        watch.check()
    assert (reason or "Nothing was received") in raised.value.detail


def test_silence_watch_after_stop_ends_wait_within_grace() -> None:
    clock = ManualClock()
    stop = threading.Event()
    watch = SilenceWatch("here", lambda: "", stop, clock=clock)
    stop.set()
    watch.check()
    clock.move_ms(GRACE_MS - 1)
    watch.check()
    clock.move_ms(1)
    with pytest.raises(TransientError, match="stopped while waiting for here"):
        watch.check()
