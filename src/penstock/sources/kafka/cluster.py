"""Metadata of a topic from its cluster: topic id, partitions, and offsets.

Every call sends a request of its own, and none uses cached metadata. The next probe therefore sees
an added partition, and a topic that was deleted and created again has another id.

The end of a partition is its last stable offset, below which every transaction has ended. Records
above it may exist already. Whether they count is undetermined while a transaction that wrote some
of them is open.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import pyarrow as pa
from confluent_kafka import (
    Consumer,
    ConsumerGroupTopicPartitions,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Message,
    TopicCollection,
    TopicPartition,
)

# These names are public, but the package does not export them to type checkers.
from confluent_kafka.admin import (
    AdminClient,
    ConfigResource,  # pyright: ignore[reportPrivateImportUsage]
    OffsetSpec,  # pyright: ignore[reportPrivateImportUsage]
    ResourceType,  # pyright: ignore[reportPrivateImportUsage]
)

from penstock.clock import SYSTEM_CLOCK
from penstock.deadlines import STOP_GRACE_S, answer_timeout_s
from penstock.errors import DefiniteError, PenstockError, TransientError
from penstock.sources.kafka.config import KafkaConfig
from penstock.sources.kafka.errors import TopicMissing

__all__ = ["Cluster", "Topic"]

T = TypeVar("T")

STOP_CHECK_S: Final = 0.2
"""Longest wait between two checks of the stop event, in seconds."""

_ANY: Final[Any] = OffsetSpec  # The class has no type annotations.
_LATEST: Final = _ANY.latest()
_EARLIEST: Final = _ANY.earliest()

_client_log: Final = logging.getLogger("penstock.sources.kafka.client")
_client_log.setLevel(logging.CRITICAL)
"""Silent logger of librdkafka's own messages, which the errors of this module include."""

MISSING: Final = frozenset({KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC})
REJECTED: Final = frozenset(
    {
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError._AUTHENTICATION,
    }
)
"""Errors that do not resolve without a change by the operator."""


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic id and the partitions of the topic."""

    id: str
    partitions: tuple[int, ...]


class Cluster:
    """Client of a cluster, for requests about one topic."""

    def __init__(self, config: KafkaConfig) -> None:
        self._config = config
        self._admin: AdminClient | None = None
        self._broker_error: KafkaError | None = None
        """Last error from the client's callback, which is separate from its responses."""

        self.stop = threading.Event()
        """Stop event, which ends waits for a response after a grace period."""

    def open(self) -> None:
        """Create the client; no request is sent."""
        self.close()
        self._broker_error = None
        properties: dict[str, Any] = {
            # Shorter than the deadline of a request, which leaves time for another broker to
            # respond. The client rejects values below one second.
            "socket.connection.setup.timeout.ms": max(1_000, int(answer_timeout_s() * 2_000 / 3)),
            **self._config.client(),
            "error_cb": self._note_error,
        }
        try:
            self._admin = AdminClient(properties, logger=_client_log)
        except KafkaException as error:
            raise DefiniteError(
                f"client configuration of {self._config.where} is invalid",
                detail=f"{_sentence(error.args[0], self._config.secrets)}.",
                hint="Correct tls, sasl or properties of the source.",
            ) from None

    def close(self) -> None:
        """Drop the client."""
        self._admin = None

    def topic(self, *, known: bool = False) -> Topic:
        """Return the topic as it is now; `known` is true if it existed before.

        Raises:
            TopicMissing: the topic does not exist.
        """
        name = self._config.topic
        responses = self._request(
            lambda admin: admin.describe_topics(
                TopicCollection([name]), request_timeout=answer_timeout_s()
            )
        )
        description = self._result(responses[name], known=known)
        partitions = sorted(partition.id for partition in description.partitions)
        return Topic(str(description.topic_id), tuple(partitions))

    def stable_ends(self, partitions: Sequence[int]) -> dict[int, int]:
        """Return the last stable offset of each partition; all transactions below it have ended."""
        return self._offsets(partitions, _LATEST, IsolationLevel.READ_COMMITTED)

    def ends(self, partitions: Sequence[int]) -> dict[int, int]:
        """Return the log end offset of each partition, open transactions included."""
        return self._offsets(partitions, _LATEST, IsolationLevel.READ_UNCOMMITTED)

    def beginnings(self, partitions: Sequence[int]) -> dict[int, int]:
        """Return the first retained offset of each partition."""
        return self._offsets(partitions, _EARLIEST, IsolationLevel.READ_COMMITTED)

    def offsets_at(self, partitions: Sequence[int], time_ms: int) -> dict[int, int]:
        """Return the offset of the first record at or after a time, by partition; else the end."""
        spec = _ANY.for_timestamp(time_ms)
        offsets = self._offsets(partitions, spec, IsolationLevel.READ_COMMITTED)
        without_record = [partition for partition, offset in offsets.items() if offset < 0]
        return {**offsets, **(self.stable_ends(without_record) if without_record else {})}

    def is_compacted(self) -> bool:
        """Return whether the cleanup policy of the topic includes compaction."""
        resource = ConfigResource(ResourceType.TOPIC, self._config.topic)
        responses = self._request(
            lambda admin: admin.describe_configs([resource], request_timeout=answer_timeout_s())
        )
        settings = self._result(responses[resource], known=True)
        return "compact" in str(settings["cleanup.policy"].value)

    def commit_offsets(self, group: str, offsets: Mapping[int, int]) -> "Future[Any]":
        """Commit offsets to a consumer group, without waiting for the response."""
        partitions = [
            TopicPartition(self._config.topic, partition, offset)
            for partition, offset in offsets.items()
        ]
        responses: Mapping[str, Future[Any]] = self._request(
            lambda admin: admin.alter_consumer_group_offsets(
                [ConsumerGroupTopicPartitions(group, partitions)],
                request_timeout=answer_timeout_s(),
            )
        )
        return responses[group]

    def sample(self, partitions: Sequence[int], count: int) -> pa.Table:
        """Return keys and values of at most about `count` of the first retained records.

        Raises:
            TransientError: the records do not arrive before the deadline.
        """
        begins, ends = self.beginnings(partitions), self.stable_ends(partitions)
        share = -(-count // max(1, len(partitions)))
        keys, values = list[bytes | None](), list[bytes | None]()
        consumer = Consumer(
            {
                **self._config.client(),
                "group.id": "penstock-sample",  # Required by the client; no group is joined.
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "auto.offset.reset": "earliest",
                "isolation.level": "read_committed",
                "allow.auto.create.topics": False,
            },
            logger=_client_log,
        )
        try:
            for partition in partitions:
                if begins[partition] == ends[partition]:
                    continue
                consumer.assign([TopicPartition(self._config.topic, partition, begins[partition])])
                sampled = 0
                while sampled < share:
                    message = self._poll(consumer)
                    if (error := message.error()) is not None:
                        if error.code() == KafkaError._PARTITION_EOF:
                            break
                        raise self._failed(error)
                    keys.append(message.key())
                    values.append(message.value())
                    sampled += 1
        finally:
            consumer.close()
        return pa.table(
            {"key": pa.array(keys, pa.binary()), "value": pa.array(values, pa.binary())}
        )

    def _poll(self, consumer: Consumer) -> Message:
        until = SYSTEM_CLOCK.boot_ms() + int(answer_timeout_s() * 1_000)
        while (message := consumer.poll(STOP_CHECK_S)) is None:
            if self.stop.is_set():
                raise self._stopped()
            if SYSTEM_CLOCK.boot_ms() >= until:
                raise self._unreachable("no record arrives")
        return message

    def _offsets(
        self, partitions: Sequence[int], spec: Any, isolation: IsolationLevel
    ) -> dict[int, int]:
        if not partitions:
            return {}
        specs = {TopicPartition(self._config.topic, partition): spec for partition in partitions}
        responses: Mapping[TopicPartition, Future[Any]] = self._request(
            lambda admin: admin.list_offsets(
                specs, isolation_level=isolation, request_timeout=answer_timeout_s()
            )
        )
        offsets = {
            partition.partition: int(self._result(response, known=True).offset)
            for partition, response in responses.items()
        }
        if spec in (_EARLIEST, _LATEST) and min(offsets.values()) < 0:
            # The broker reports this for a partition without an available leader.
            raise self._unreachable("a partition has no leader that responds")
        return offsets

    def _request(self, send: Callable[[AdminClient], T]) -> T:
        assert self._admin is not None
        self._admin.poll(0)  # Delivers pending broker errors to the callback.
        return send(self._admin)

    def _result(self, response: "Future[T]", *, known: bool) -> T:
        try:
            self._await(response)
            result = response.result(0)
            # A response supersedes earlier broker errors.
            self._broker_error = None
            return result
        except KafkaException as error:
            kafka_error: KafkaError = error.args[0]
            if kafka_error.code() in MISSING:
                raise TopicMissing(self._config.topic, known=known) from None
            raise self._failed(kafka_error) from None
        except TimeoutError:
            raise self._unreachable("no broker responds") from None

    def _await(self, response: "Future[T]") -> None:
        """Wait for a response; return without one after the deadline.

        Raises:
            TransientError: the process stops, and no response arrived within the grace period.
        """
        until = SYSTEM_CLOCK.boot_ms() + int(2 * answer_timeout_s() * 1_000)
        stopping = False
        while not wait([response], STOP_CHECK_S).done:
            now = SYSTEM_CLOCK.boot_ms()
            if self.stop.is_set() and not stopping:
                stopping, until = True, min(until, now + int(STOP_GRACE_S * 1_000))
            if now >= until:
                if stopping:
                    raise self._stopped()
                return

    def _refresh_brokers(self) -> None:
        """Refresh the client's metadata of brokers.

        The client continues to send requests to the broker that it knows as the controller, even
        after that broker is killed.
        """
        admin, done = self._admin, Future[None]()
        assert admin is not None

        def list_topics() -> None:
            try:
                # SUBTLE: request all topics. A broker may create a topic that is requested by name.
                admin.list_topics(timeout=answer_timeout_s())
            except KafkaException as error:
                self._broker_error = error.args[0]
            finally:
                done.set_result(None)

        # The call blocks until its own timeout, even if the process stops.
        threading.Thread(target=list_topics, name="kafka metadata", daemon=True).start()
        self._await(done)

    def _failed(self, error: KafkaError) -> PenstockError:
        """Return a transient error, or a definite error with a hint for the operator."""
        assert self._admin is not None
        self._admin.poll(0)
        for reported in (error, self._broker_error):
            # The client reports a failed authentication by the callback; the response is a timeout.
            if reported is not None and reported.code() in REJECTED:
                return DefiniteError(
                    f"access to {self._config.where} was denied",
                    detail=f"{_sentence(reported, self._config.secrets)}.",
                    hint="Allow Describe, DescribeConfigs and Read of the topic, or correct sasl "
                    "of the source.",
                )
        if error.code() == KafkaError._TIMED_OUT and not self.stop.is_set():
            self._refresh_brokers()
        return self._unreachable(_sentence(error, self._config.secrets))

    def _stopped(self) -> TransientError:
        return TransientError(
            f"stopped while waiting for {self._config.where}",
            detail="The brokers have not responded. Records that are not durable are read again "
            "at the next start.",
        )

    def _unreachable(self, reason: str) -> TransientError:
        error = self._broker_error
        broker_text = "" if error is None else f" {_sentence(error, self._config.secrets)}."
        return TransientError(
            f"{self._config.where} cannot be reached",
            detail=f"{reason[:1].upper()}{reason[1:]}.{broker_text}",
            hint="Check brokers, tls and sasl of the source, and the network.",
        )

    def _note_error(self, error: KafkaError) -> None:
        """Store a broker error, which the client reports separately from its responses."""
        self._broker_error = error


def _sentence(error: KafkaError, secrets: Sequence[str]) -> str:
    """Return the text of an error as the start of a sentence, with secrets removed."""
    text = error.str().rstrip(".")
    for secret in secrets:
        text = text.replace(secret, "…")
    return f"{text[:1].upper()}{text[1:]}"
