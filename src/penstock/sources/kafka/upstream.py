"""What a cluster says of a topic: which it is, its partitions, and how far each has come.

Every question is a request of its own, so that nothing is answered from metadata that was
fetched before: a partition that was added is seen by the next probe, and a topic that was
deleted and made again has another id.

How far a partition has come is its last stable offset, below which every transaction has
ended. Above it there may be records already; as long as a transaction that touches them is
open, nobody knows whether they count.
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

# These are public, and not said to be.
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
"""Longest wait between two looks at the stop event."""

_ANY: Final[Any] = OffsetSpec  # It has no types.
_LATEST: Final = _ANY.latest()
_EARLIEST: Final = _ANY.earliest()

_said_by_client: Final = logging.getLogger("penstock.sources.kafka.client")
_said_by_client.setLevel(logging.CRITICAL)
"""What librdkafka prints by itself; what matters of it is in our errors."""

MISSING: Final = frozenset({KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC})
REFUSED: Final = frozenset(
    {
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError._AUTHENTICATION,
    }
)
"""What does not pass by itself."""


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic, and its partitions."""

    id: str
    partitions: tuple[int, ...]


class Upstream:
    """Asks a cluster."""

    def __init__(self, config: KafkaConfig) -> None:
        self._config = config
        self._admin: AdminClient | None = None
        self._heard: KafkaError | None = None
        """What the client said last of its brokers, beside its answers."""

        self.stop = threading.Event()
        """Ends waits for an answer, after a grace, once it is set."""

    def open(self) -> None:
        """Be ready to ask; nobody is asked yet."""
        self.close()
        self._heard = None
        properties: dict[str, Any] = {
            # Less than the deadline of a request, so that another broker can answer it. The client
            # rejects less than a second.
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
        """Ask nobody any more."""
        self._admin = None

    def topic(self, *, known: bool = False) -> Topic:
        """The topic as it is now; `known` if it was there before.

        Raises:
            TopicMissing: it is not there.
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
        """The last stable offset of each, below which all is committed or given up."""
        return self._offsets(partitions, _LATEST, IsolationLevel.READ_COMMITTED)

    def ends(self, partitions: Sequence[int]) -> dict[int, int]:
        """The offset of each after its last record, of open transactions too."""
        return self._offsets(partitions, _LATEST, IsolationLevel.READ_UNCOMMITTED)

    def beginnings(self, partitions: Sequence[int]) -> dict[int, int]:
        """The offset of each at which its records begin; those before it were removed."""
        return self._offsets(partitions, _EARLIEST, IsolationLevel.READ_COMMITTED)

    def at_time(self, partitions: Sequence[int], time_ms: int) -> dict[int, int]:
        """The offset of each of its first record at or after a time; its end, if there is none."""
        spec = _ANY.for_timestamp(time_ms)
        found = self._offsets(partitions, spec, IsolationLevel.READ_COMMITTED)
        late = [partition for partition, offset in found.items() if offset < 0]
        return {**found, **(self.stable_ends(late) if late else {})}

    def compacted(self) -> bool:
        """Whether old records of a key are removed from the topic."""
        resource = ConfigResource(ResourceType.TOPIC, self._config.topic)
        asked = self._ask(
            lambda admin: admin.describe_configs([resource], request_timeout=answer_timeout_s())
        )
        found = self._answer(asked[resource], known=True)
        return "compact" in str(found["cleanup.policy"].value)

    def tell_group(self, group: str, offsets: Mapping[int, int]) -> "Future[Any]":
        """Let a consumer group stand at these offsets; nobody waits for the answer."""
        places = [Place(self._config.topic, each, offset) for each, offset in offsets.items()]
        asked: Mapping[str, Future[Any]] = self._ask(
            lambda admin: admin.alter_consumer_group_offsets(
                [ConsumerGroupTopicPartitions(group, places)], request_timeout=answer_timeout_s()
            )
        )
        return asked[group]

    def sample(self, partitions: Sequence[int], count: int) -> pa.Table:
        """Keys and values of some of the first records that are kept, at most so many.

        Raises:
            TransientError: they do not come.
        """
        begins, ends = self.beginnings(partitions), self.stable_ends(partitions)
        share = -(-count // max(1, len(partitions)))
        keys, values = list[bytes | None](), list[bytes | None]()
        consumer = Consumer(
            {
                **self._config.client(),
                "group.id": "penstock-sample",  # It joins none; the client asks for a name.
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
            # That is how a partition is answered for whose leader is away.
            raise self._unreached("a partition has no leader that answers")
        return found

    def _ask(self, ask: Callable[[AdminClient], T]) -> T:
        assert self._admin is not None
        self._admin.poll(0)  # What it has to say of its brokers.
        return ask(self._admin)

    def _answer(self, answer: "Future[T]", *, known: bool) -> T:
        try:
            self._await(answer)
            answered = answer.result(0)
            # Whatever it said of its brokers before is over.
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
            TransientError: the process stops, and no answer came within the grace.
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
        """Let the client hear of brokers anew.

        It asks the one on and on that it took for the controller, even if that one was killed.
        """
        admin, answer = self._admin, Future[None]()
        assert admin is not None

        def list_topics() -> None:
            try:
                # SUBTLE: of all topics, since a broker may make one that it is asked for by name.
                admin.list_topics(timeout=answer_timeout_s())
            except KafkaException as error:
                self._heard = error.args[0]
            finally:
                answer.set_result(None)

        # The call blocks until its own timeout, also if the process stops.
        threading.Thread(target=list_topics, name="kafka metadata", daemon=True).start()
        self._await(answer)

    def _failed(self, error: KafkaError) -> PenstockError:
        """Whether to try again, or what somebody must do."""
        assert self._admin is not None
        self._admin.poll(0)
        heard = self._heard
        for each in (error, heard):
            # Who is not let in is told so beside the answer, which is a timeout.
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
        """Why it cannot reach a broker is told by the client beside its answers."""
        self._heard = error


def _told(error: KafkaError, secrets: Sequence[str]) -> str:
    """What an error says, as the beginning of a sentence without a secret."""
    text = error.str().rstrip(".")
    for secret in secrets:
        text = text.replace(secret, "…")
    return f"{text[:1].upper()}{text[1:]}"
