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
from penstock.sources.kafka.cluster import Cluster
from penstock.telemetry import fields, logger

__all__ = ["ConsumerGroup"]

log = logger("sources.kafka")

RETRY_MS: Final = 5_000
"""Delay before a failed commit is retried, in milliseconds."""

CLOSE_TIMEOUT_S: Final = 5
"""Longest wait for the final commit, in seconds."""


class ConsumerGroup:
    """Offset commits of one group, sent by the tick thread, which never waits for the response."""

    def __init__(self, name: str, cluster: Cluster, clock: Clock) -> None:
        self._name = name
        self._cluster = cluster
        self._clock = clock
        self._offsets: Mapping[int, int] = {}
        self._sent: Mapping[int, int] = {}
        self._response: Future[Any] | None = None
        self._failed_ms: int | None = None

    def report(self, offsets: Mapping[int, int]) -> None:
        """Report progress: by partition, the offset below which all records are durable."""
        self._offsets = offsets
        self._check_response()
        if self._response is None and offsets != self._sent and not self._is_backing_off():
            self._sent = offsets
            self._response = self._cluster.commit_offsets(self._name, offsets)

    def close(self) -> None:
        """Send the last progress, and wait at most `CLOSE_TIMEOUT_S` for each response."""
        self._wait()
        if self._response is None:
            self.report(self._offsets)
            self._wait()
        self._response = None
        self._offsets = self._sent = {}

    def _wait(self) -> None:
        if self._response is not None:
            wait([self._response], timeout=CLOSE_TIMEOUT_S)
            self._check_response()

    def _check_response(self) -> None:
        if self._response is None or not self._response.done():
            return
        error, self._response = _error_of(self._response), None
        if error is None:
            self._failed_ms = None
            return
        if self._failed_ms is None:
            log.warning(
                "consumer group commit failed", extra=fields(group=self._name, reason=error.str())
            )
        self._failed_ms = self._clock.boot_ms()
        self._sent = {}

    def _is_backing_off(self) -> bool:
        failed_ms = self._failed_ms
        return failed_ms is not None and self._clock.boot_ms() - failed_ms < RETRY_MS


def _error_of(response: Future[Any]) -> KafkaError | None:
    """Return the error of a completed response, or None."""
    try:
        partitions = response.result().topic_partitions
    except KafkaException as error:
        kafka_error: KafkaError = error.args[0]
        return kafka_error
    return next((partition.error for partition in partitions if partition.error is not None), None)
