"""Consumer group that reports progress to tools that monitor consumer lag.

Offsets are committed to the group after the data is durable, and are never read back. The source
resumes from its position in the lake only. A failed or overwritten group commit therefore affects
monitoring and nothing else.
"""

from collections.abc import Mapping
from concurrent.futures import Future, wait
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException

from penstock.clock import Clock
from penstock.sources.kafka.upstream import Upstream
from penstock.telemetry import fields, logger

__all__ = ["Group"]

log = logger("sources.kafka")

AGAIN_MS: Final = 5_000
"""Delay before a failed commit is retried, in milliseconds."""

LAST_S: Final = 5
"""Longest wait for the final commit, in seconds."""


class Group:
    """Offset commits of one group, sent by the tick thread, which never waits for the answer."""

    def __init__(self, name: str, upstream: Upstream, clock: Clock) -> None:
        self._name = name
        self._upstream = upstream
        self._clock = clock
        self._reached: Mapping[int, int] = {}
        self._told: Mapping[int, int] = {}
        self._answer: Future[Any] | None = None
        self._failed_ms: int | None = None

    def tell(self, reached: Mapping[int, int]) -> None:
        """Report progress: by partition, the offset below which all records are durable."""
        self._reached = reached
        self._listen()
        if self._answer is None and reached != self._told and not self._rests():
            self._told = reached
            self._answer = self._upstream.tell_group(self._name, reached)

    def close(self) -> None:
        """Send the last progress, and wait at most `LAST_S` for each answer."""
        self._wait()
        if self._answer is None:
            self.tell(self._reached)
            self._wait()
        self._answer = None
        self._reached = self._told = {}

    def _wait(self) -> None:
        if self._answer is not None:
            wait([self._answer], timeout=LAST_S)
            self._listen()

    def _listen(self) -> None:
        if self._answer is None or not self._answer.done():
            return
        error, self._answer = _error_of(self._answer), None
        if error is None:
            self._failed_ms = None
            return
        if self._failed_ms is None:
            log.warning(
                "a consumer group cannot be told how far the source has come",
                extra=fields(group=self._name, reason=error.str()),
            )
        self._failed_ms = self._clock.boot_ms()
        self._told = {}

    def _rests(self) -> bool:
        failed_ms = self._failed_ms
        return failed_ms is not None and self._clock.boot_ms() - failed_ms < AGAIN_MS


def _error_of(answer: Future[Any]) -> KafkaError | None:
    """Return the error of a completed answer, or None."""
    try:
        places = answer.result().topic_partitions
    except KafkaException as error:
        found: KafkaError = error.args[0]
        return found
    return next((place.error for place in places if place.error is not None), None)
