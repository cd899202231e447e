"""Broker paused by SIGSTOP: the status reports it, a stop is not delayed, and reads resume."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

import penstock.ingest
from penstock.catalog.inspect import inspect_lake
from penstock.clock import SYSTEM_CLOCK
from penstock.engine.shared_session.spark import SharedSession
from penstock.ingest import Supervisor
from penstock.persist import Settings
from penstock.sources.kafka.source import KafkaSource
from tests.e2e.process import until
from tests.fix_kafka import make_broker
from tests.sources.kafka.clients import produce
from tests.sources.kafka.lake import Topic

pytestmark = pytest.mark.spark

STOP_TIMEOUT_S = 15
"""Default value."""


class Run:
    """Source that runs in a thread."""

    def __init__(self, topic: Topic) -> None:
        self.topic = topic
        self.stop = threading.Event()
        self._supervisor: Supervisor | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        penstock.ingest.run(
            self.topic.write_file(),
            stop=self.stop,
            jobs=self.topic.session,
            on_start=self._note_supervisor,
        )

    def _note_supervisor(self, running: Supervisor) -> None:
        self._supervisor = running

    def await_texts(self, texts: str) -> None:
        """Wait for records with one letter each."""
        until(
            lambda: (
                self.topic.has_rows() and sorted(row[2] for row in self.topic.seen()) == [*texts]
            ),
            f"records {texts}",
        )

    def status(self) -> Mapping[str, Any]:
        """Return the fields of the source in `penstock status`."""
        (location,) = inspect_lake(f"file:{self.topic.folder}/lake", Settings())
        (source,) = location.to_json()["sources"]
        return source

    def end(self) -> float:
        """Stop as SIGTERM does; return the duration in seconds."""
        began_ms = SYSTEM_CLOCK.boot_ms()
        self.stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
        return (SYSTEM_CLOCK.boot_ms() - began_ms) / 1_000


@contextmanager
def running(topic: Topic) -> Iterator[Run]:
    run = Run(topic)
    try:
        yield run
    finally:
        run.end()


def test_paused_broker_is_reported_and_does_not_delay_stop(
    session: SharedSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_ANSWER_TIMEOUT", "2")
    paused = threading.Event()

    with make_broker() as broker, ExitStack() as in_read:
        broker.create_topic("clicks", partitions=2)
        topic = Topic(broker, "clicks", tmp_path, session)
        producer = Producer(broker.client())
        produce(producer, "clicks", ["a", "b"])
        with running(topic) as run:
            run.await_texts("ab")
            with broker.hung():
                until(lambda: run.status()["connected"] is False, "the report")
                assert run.status()["lag_records"] is None
                assert run.status()["lag_ms"] is None
                assert "cannot be reached" in run.status()["disconnected_reason"]
                producer.produce("clicks", value="c", partition=1)
            produce(producer, "clicks", ["d"])
            run.await_texts("abcd")
            assert run.status()["connected"] is True
            with broker.hung():
                until(lambda: run.status()["connected"] is False, "the report")
                assert run.end() < STOP_TIMEOUT_S
        produce(producer, "clicks", ["e"])
        build_scan = KafkaSource._scan

        def scan_and_pause(source: KafkaSource, ranges: Any) -> Any:
            scan = build_scan(source, ranges)
            if not paused.is_set():
                in_read.enter_context(broker.hung())
                paused.set()
            return scan

        monkeypatch.setattr(KafkaSource, "_scan", scan_and_pause)
        with running(topic) as run:
            assert paused.wait(60)
            # Spark is reading; the source has no topic metadata since the start.
            assert run.status()["lag_records"] is None
            assert run.end() < STOP_TIMEOUT_S
        in_read.close()
        topic.once()
        assert topic.seen() == topic.committed()
        assert len(topic.seen()) == 5
