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
)
from confluent_kafka import TopicPartition as Place

# These names are public, but the package does not export them to type checkers.
from confluent_kafka.admin import (  # type: ignore[attr-defined]
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

__all__ = ["Topic", "Upstream"]

T = TypeVar("T")

SLICE_S: Final = 0.2
"""Longest wait between two checks of the stop event, in seconds."""

_ANY: Final[Any] = OffsetSpec  # The class has no type annotations.
_LATEST: Final = _ANY.latest()
_EARLIEST: Final = _ANY.earliest()

_said_by_client: Final = logging.getLogger("penstock.sources.kafka.client")
_said_by_client.setLevel(logging.CRITICAL)
"""Logger of librdkafka's own messages. It is silent: the errors of this module include them."""

MISSING: Final = frozenset({KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC})
REFUSED: Final = frozenset(
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


class Upstream:
    """Client of a cluster, for requests about one topic."""

    def __init__(self, config: KafkaConfig) -> None:
        self._config = config
        self._admin: AdminClient | None = None
        self._heard: KafkaError | None = None
        """Last broker error from the client's callback, which is separate from its answers."""

        self.stop = threading.Event()
        """Stop event; it ends waits for an answer, after a grace period."""

    def open(self) -> None:
        """Create the client; no request is sent."""
        self.close()
        self._heard = None
        properties: dict[str, Any] = {
            # Shorter than the deadline of a request, which leaves time for another broker to
            # answer. The client rejects values below one second.
            "socket.connection.setup.timeout.ms": max(1_000, int(answer_timeout_s() * 2_000 / 3)),
            **self._config.client(),
            "error_cb": self._hear,
        }
        try:
            self._admin = AdminClient(properties, logger=_said_by_client)
        except KafkaException as error:
            raise DefiniteError(
                f"{self._config.where} cannot be reached as the file says",
                detail=f"{_told(error.args[0], self._config.secrets)}.",
                hint="Mend tls, sasl or properties of the source.",
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
        asked = self._ask(
            lambda admin: admin.describe_topics(
                TopicCollection([name]), request_timeout=answer_timeout_s()
            )
        )
        found = self._answer(asked[name], known=known)
        partitions = sorted(each.id for each in found.partitions)
        return Topic(str(found.topic_id), tuple(partitions))

    def stable_ends(self, partitions: Sequence[int]) -> dict[int, int]:
        """Return the last stable offset of each partition; all transactions below it have ended."""
        return self._offsets(partitions, _LATEST, IsolationLevel.READ_COMMITTED)

    def ends(self, partitions: Sequence[int]) -> dict[int, int]:
        """Return the log end offset of each partition, open transactions included."""
        return self._offsets(partitions, _LATEST, IsolationLevel.READ_UNCOMMITTED)

    def beginnings(self, partitions: Sequence[int]) -> dict[int, int]:
        """Return the first retained offset of each partition."""
        return self._offsets(partitions, _EARLIEST, IsolationLevel.READ_COMMITTED)

    def at_time(self, partitions: Sequence[int], time_ms: int) -> dict[int, int]:
        """Return the offset of the first record at or after a time, by partition; else the end."""
        spec = _ANY.for_timestamp(time_ms)
        found = self._offsets(partitions, spec, IsolationLevel.READ_COMMITTED)
        late = [partition for partition, offset in found.items() if offset < 0]
        return {**found, **(self.stable_ends(late) if late else {})}

    def compacted(self) -> bool:
        """Return whether the cleanup policy of the topic includes compaction."""
        resource = ConfigResource(ResourceType.TOPIC, self._config.topic)
        asked = self._ask(
            lambda admin: admin.describe_configs([resource], request_timeout=answer_timeout_s())
        )
        found = self._answer(asked[resource], known=True)
        return "compact" in str(found["cleanup.policy"].value)

    def tell_group(self, group: str, offsets: Mapping[int, int]) -> "Future[Any]":
        """Commit offsets to a consumer group, without waiting for the answer."""
        places = [Place(self._config.topic, each, offset) for each, offset in offsets.items()]
        asked: Mapping[str, Future[Any]] = self._ask(
            lambda admin: admin.alter_consumer_group_offsets(
                [ConsumerGroupTopicPartitions(group, places)], request_timeout=answer_timeout_s()
            )
        )
        return asked[group]

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
            logger=_said_by_client,
        )
        try:
            for each in partitions:
                if begins[each] == ends[each]:
                    continue
                consumer.assign([Place(self._config.topic, each, begins[each])])
                found = 0
                while found < share:
                    message = self._poll(consumer)
                    if (error := message.error()) is not None:
                        if error.code() == KafkaError._PARTITION_EOF:
                            break
                        raise self._failed(error)
                    keys.append(message.key())
                    values.append(message.value())
                    found += 1
        finally:
            consumer.close()
        return pa.table(
            {"key": pa.array(keys, pa.binary()), "value": pa.array(values, pa.binary())}
        )

    def _poll(self, consumer: Consumer) -> Message:
        until = SYSTEM_CLOCK.boot_ms() + int(answer_timeout_s() * 1_000)
        while (message := consumer.poll(SLICE_S)) is None:
            if self.stop.is_set():
                raise self._stopped()
            if SYSTEM_CLOCK.boot_ms() >= until:
                raise self._unreached("no record comes")
        return message

    def _offsets(
        self, partitions: Sequence[int], spec: Any, isolation: IsolationLevel
    ) -> dict[int, int]:
        if not partitions:
            return {}
        places = {Place(self._config.topic, each): spec for each in partitions}
        asked: Mapping[Place, Future[Any]] = self._ask(
            lambda admin: admin.list_offsets(
                places, isolation_level=isolation, request_timeout=answer_timeout_s()
            )
        )
        found = {
            place.partition: int(self._answer(answer, known=True).offset)
            for place, answer in asked.items()
        }
        if spec in (_EARLIEST, _LATEST) and min(found.values()) < 0:
            # The broker reports this for a partition without an available leader.
            raise self._unreached("a partition has no leader that answers")
        return found

    def _ask(self, ask: Callable[[AdminClient], T]) -> T:
        assert self._admin is not None
        self._admin.poll(0)  # Delivers pending broker errors to the callback.
        return ask(self._admin)

    def _answer(self, answer: "Future[T]", *, known: bool) -> T:
        try:
            self._await(answer)
            answered = answer.result(0)
            # An answer supersedes earlier broker errors.
            self._heard = None
            return answered
        except KafkaException as error:
            found: KafkaError = error.args[0]
            if found.code() in MISSING:
                raise TopicMissing(self._config.topic, known=known) from None
            raise self._failed(found) from None
        except TimeoutError:
            raise self._unreached("nobody answers") from None

    def _await(self, answer: "Future[T]") -> None:
        """Wait for an answer; return without one after the deadline.

        Raises:
            TransientError: the process stops, and no answer arrived within the grace period.
        """
        until = SYSTEM_CLOCK.boot_ms() + int(2 * answer_timeout_s() * 1_000)
        stopping = False
        while not wait([answer], SLICE_S).done:
            now = SYSTEM_CLOCK.boot_ms()
            if self.stop.is_set() and not stopping:
                stopping, until = True, min(until, now + int(STOP_GRACE_S * 1_000))
            if now >= until:
                if stopping:
                    raise self._stopped()
                return

    def _look_around(self) -> None:
        """Refresh the client's metadata of brokers.

        The client continues to send requests to the broker that it knows as the controller, even
        after that broker is killed.
        """
        admin, answer = self._admin, Future[None]()
        assert admin is not None

        def list_topics() -> None:
            try:
                # SUBTLE: request all topics. A broker may create a topic that is requested by name.
                admin.list_topics(timeout=answer_timeout_s())
            except KafkaException as error:
                self._heard = error.args[0]
            finally:
                answer.set_result(None)

        # The call blocks until its own timeout, even if the process stops.
        threading.Thread(target=list_topics, name="kafka metadata", daemon=True).start()
        self._await(answer)

    def _failed(self, error: KafkaError) -> PenstockError:
        """Return a transient error, or a definite error with a hint for the operator."""
        assert self._admin is not None
        self._admin.poll(0)
        heard = self._heard
        for each in (error, heard):
            # The client reports a failed authentication by the callback; the answer is a timeout.
            if each is not None and each.code() in REFUSED:
                return DefiniteError(
                    f"{self._config.where} may not be read by us",
                    detail=f"{_told(each, self._config.secrets)}.",
                    hint="Allow Describe, DescribeConfigs and Read of the topic, or mend sasl of "
                    "the source.",
                )
        if error.code() == KafkaError._TIMED_OUT and not self.stop.is_set():
            self._look_around()
        return self._unreached(_told(error, self._config.secrets))

    def _stopped(self) -> TransientError:
        return TransientError(
            f"stopped while waiting for {self._config.where}",
            detail="The brokers have not answered. What is not durable is read again at the next "
            "start.",
        )

    def _unreached(self, reason: str) -> TransientError:
        heard = self._heard
        said = "" if heard is None else f" {_told(heard, self._config.secrets)}."
        return TransientError(
            f"{self._config.where} cannot be reached",
            detail=f"{reason[:1].upper()}{reason[1:]}.{said}",
            hint="Check brokers, tls and sasl of the source, and the network; what runs keeps "
            "trying.",
        )

    def _hear(self, error: KafkaError) -> None:
        """Store a broker error, which the client reports apart from its answers."""
        self._heard = error


def _told(error: KafkaError, secrets: Sequence[str]) -> str:
    """Return the text of an error as the start of a sentence, with secrets removed."""
    text = error.str().rstrip(".")
    for secret in secrets:
        text = text.replace(secret, "…")
    return f"{text[:1].upper()}{text[1:]}"
