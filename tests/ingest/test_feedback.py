"""The timer that keeps the server informed, until nobody has proved to be the writer (A7)."""

from penstock.sources.postgres.feedback import EVERY_MS, PROVED_MS, Feedback
from penstock.sources.postgres.lsn import Lsn
from penstock.testing.clocks import ManualClock
from tests.ingest.pump import until


class Told:
    """Remembers what it was told."""

    def __init__(self, clock: ManualClock) -> None:
        self.positions: list[Lsn] = []
        self.last_ms = 0
        self._clock = clock

    def confirm(self, flush: Lsn, *, reply: bool = False) -> None:
        self.positions.append(flush)
        self.last_ms = self._clock.boot_ms()


def test_it_falls_silent_when_nothing_was_made_durable_for_long() -> None:
    clock = ManualClock()
    told = Told(clock)
    began = clock.boot_ms()
    feedback = Feedback(told, clock, durable=Lsn(7))
    feedback.start()
    until(lambda: clock.boot_ms() > began + 4 * PROVED_MS, "time to pass")
    feedback.stop()
    assert len(told.positions) == PROVED_MS // EVERY_MS
    assert told.last_ms <= began + PROVED_MS
    assert {*told.positions} == {Lsn(7)}


def test_what_is_durable_is_said_at_once() -> None:
    clock = ManualClock()
    told = Told(clock)
    feedback = Feedback(told, clock, durable=Lsn(7))
    feedback.durable(Lsn(9))
    assert told.positions == [Lsn(9)]
    feedback.stop()
