"""Timer that sends feedback to the server while the writer holds its lock (A7)."""

from pathlib import Path

import pytest

from penstock.servers.postgres import Database
from penstock.sources.postgres.feedback import (
    INTERVAL_MS,
    OWNERSHIP_VALID_MS,
    Feedback,
    feedback_interval_ms,
)
from penstock.sources.postgres.lsn import Lsn
from penstock.testing.clocks import ManualClock
from tests.ingest.pump import Pump, until


class RecordingStream:
    """Stream that records the confirmed positions."""

    def __init__(self, clock: ManualClock) -> None:
        self.positions: list[Lsn] = []
        self.last_ms = 0
        self.server_timeout_ms = 0
        self._clock = clock

    def confirm(self, flush: Lsn, *, reply: bool = False) -> None:
        self.positions.append(flush)
        self.last_ms = self._clock.boot_ms()


def test_feedback_without_durable_progress_stops_after_proof_interval() -> None:
    clock = ManualClock()
    stream = RecordingStream(clock)
    began = clock.boot_ms()
    feedback = Feedback(stream, clock, durable=Lsn(7))
    feedback.start()
    until(lambda: clock.boot_ms() > began + 4 * OWNERSHIP_VALID_MS, "time to pass")
    feedback.stop()
    assert len(stream.positions) == OWNERSHIP_VALID_MS // INTERVAL_MS
    assert stream.last_ms <= began + OWNERSHIP_VALID_MS
    assert {*stream.positions} == {Lsn(7)}


def test_feedback_of_durable_position_is_sent_immediately() -> None:
    clock = ManualClock()
    stream = RecordingStream(clock)
    feedback = Feedback(stream, clock, durable=Lsn(7))
    feedback.durable(Lsn(9))
    assert stream.positions == [Lsn(9)]
    feedback.stop()


@pytest.mark.parametrize(
    ("server_timeout_ms", "interval_ms"),
    [(0, 1_000), (60_000, 1_000), (3_000, 1_000), (1_500, 500), (1_000, 333), (30, 50), (1, 50)],
)
def test_feedback_interval_is_a_third_of_the_server_timeout(
    server_timeout_ms: int, interval_ms: int
) -> None:
    assert feedback_interval_ms(server_timeout_ms) == interval_ms


def test_feedback_is_sent_at_interval_of_its_stream() -> None:
    clock = ManualClock()
    stream = RecordingStream(clock)
    stream.server_timeout_ms = 1_500
    began = clock.boot_ms()
    feedback = Feedback(stream, clock, durable=Lsn(7))
    feedback.start()
    until(lambda: clock.boot_ms() > began + 4 * OWNERSHIP_VALID_MS, "time to pass")
    feedback.stop()
    assert len(stream.positions) == OWNERSHIP_VALID_MS // 500
    assert {*stream.positions} == {Lsn(7)}


def test_stream_with_short_wal_sender_timeout_survives_between_ticks(
    database: Database, tmp_path: Path
) -> None:
    database.sql(
        "CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION penstock FOR TABLE t;"
        f"ALTER DATABASE {database.name} SET wal_sender_timeout = '1s'"
    )

    def lasts() -> bool:
        return bool(
            database.sql(
                "SELECT 1 FROM pg_stat_replication JOIN pg_stat_activity USING (pid)"
                " WHERE datname = current_database()"
                " AND clock_timestamp() - pg_stat_replication.backend_start > interval '3 s'"
            )
        )

    with Pump(database, tmp_path, tick_ms=4_000):
        until(lasts, "a stream that is older than three timeouts", 15_000)
