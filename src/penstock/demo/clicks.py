"""Clicks of the customers of the shop: a Kafka topic with continuous traffic.

A visit is a few clicks of one customer, usually in a transaction, sometimes without one. Some
transactions are aborted. Their clicks are in the topic too, but a reader with isolation level
`read_committed` must never see one.

Run as a program, it prints the option that adds the topic to a demo, or the reason why it cannot.
"""

import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from penstock.demo.shop import CUSTOMERS, PRODUCTS
from penstock.demo.steady import Steady
from penstock.engine.jars import jars_folder, kafka_jars
from penstock.errors import UsageError
from penstock.testing.kafka import KafkaBroker

__all__ = [
    "COLUMNS",
    "PARTITIONS",
    "TOPIC",
    "Clicking",
    "Sent",
    "broker_beside",
    "committed",
    "ends",
    "jars_to_fetch",
    "open_topic",
]

TOPIC: Final = "clicks"
PARTITIONS: Final = 3
COLUMNS: Final[Mapping[str, str]] = {"customer": "int", "page": "text", "product": "int"}
"""Columns of a click, with their types."""

PAGES: Final = ("/", "/basket", "/search?q=水車", "/help")
ABORTED: Final = 0.2
"""Share of transactions that are aborted."""

PATIENCE_S: Final = 30.0

Row = tuple[str | None, ...]


def jars_to_fetch() -> str:
    """Return a note on the downloads of the first start; empty if nothing is missing."""
    return "" if jars_folder().exists() else "; jars of Kafka are fetched first, 54 MB"


@contextmanager
def broker_beside(folder: Path) -> Iterator[KafkaBroker]:
    """Start a broker in the background of the block, and end it with the block.

    Raises:
        UsageError: the jars of the broker, or of Spark's Kafka reader, are not available.
    """
    kafka_jars()
    broker = KafkaBroker(folder=folder)
    try:
        broker.launch()
        yield broker
    finally:
        broker.close()


def open_topic(broker: KafkaBroker) -> None:
    """Wait for the broker, and create the topic with unlimited retention."""
    broker.start()
    broker.create_topic(TOPIC, partitions=PARTITIONS, settings={"retention.ms": -1})


@dataclass(frozen=True, slots=True)
class Sent:
    """Numbers of clicks in committed and in aborted visits."""

    clicks: int = 0
    aborted: int = 0


@dataclass(slots=True)
class Clicking(Steady):
    """Visits of the shop; `url` contains the addresses of the brokers."""

    sent: Sent = Sent()

    @contextmanager
    def _acting(self) -> Iterator[Callable[[], None]]:
        try:
            plain = Producer(_client(self.url))
            careful = Producer({**_client(self.url), "transactional.id": "shop"})
            careful.init_transactions(PATIENCE_S)
            yield lambda: self._visit(plain, careful)
        except KafkaException as error:
            raise UsageError(
                "clicks on the shop have ended", detail=f"Kafka says: {error.args[0].str()}"
            ) from error

    def _visit(self, plain: Producer, careful: Producer) -> None:
        clicks = self.chance.randint(1, 5)
        was = self.sent
        if self.chance.random() < 0.2:
            self._click(plain, clicks)
        else:
            careful.begin_transaction()
            self._click(careful, clicks)
            if self.chance.random() < ABORTED:
                careful.abort_transaction(PATIENCE_S)
                self.sent = Sent(was.clicks, was.aborted + clicks)
                return
            careful.commit_transaction(PATIENCE_S)
        self.sent = Sent(was.clicks + clicks, was.aborted)

    def _click(self, producer: Producer, clicks: int) -> None:
        """Send this many clicks and wait until each is acknowledged.

        An abort would drop clicks that are not sent yet.
        """
        failed: list[KafkaError] = []
        customer = self.chance.randint(1, CUSTOMERS)
        for _ in range(clicks):
            producer.produce(
                TOPIC,
                json.dumps(_click_of(customer, self.chance), ensure_ascii=False),
                partition=self.chance.randrange(PARTITIONS),
                on_delivery=lambda error, _: failed.append(error) if error else None,
            )
        if producer.flush(PATIENCE_S):
            raise KafkaException(KafkaError(KafkaError._MSG_TIMED_OUT))
        if failed:
            raise KafkaException(failed[0])


def ends(brokers: str) -> dict[int, int]:
    """Return the end offset of each partition. There must be no concurrent producer."""
    with _consumer(brokers) as consumer:
        found = {}
        for partition in range(PARTITIONS):
            place = TopicPartition(TOPIC, partition)
            watermarks = consumer.get_watermark_offsets(place, timeout=PATIENCE_S)
            if watermarks is None:
                raise _silent()
            found[partition] = watermarks[1]
        return found


def committed(brokers: str) -> Counter[Row]:
    """Return all committed clicks: their columns, partition and offset."""
    found: Counter[Row] = Counter()
    unread = set(range(PARTITIONS))
    with _consumer(brokers) as consumer:
        consumer.assign([TopicPartition(TOPIC, partition, 0) for partition in unread])
        while unread:
            message = consumer.poll(PATIENCE_S)
            if message is None:
                raise _silent()
            error = message.error()
            if error is None:
                click = json.loads(message.value() or b"")
                row = (*map(click.get, COLUMNS), message.partition(), message.offset())
                found[tuple(None if value is None else str(value) for value in row)] += 1
            elif error.code() == KafkaError._PARTITION_EOF:
                unread.discard(message.partition() or 0)
            else:
                raise UsageError("clicks cannot be read", detail=f"Kafka says: {error.str()}")
    return found


def _click_of(customer: int, chance: random.Random) -> dict[str, Any]:
    """Return a click on a product or on another page."""
    if chance.random() < 0.5:
        product = chance.randint(1, PRODUCTS)
        return {"customer": customer, "page": f"/product/{product}", "product": product}
    return {"customer": customer, "page": chance.choice(PAGES), "product": None}


@contextmanager
def _consumer(brokers: str) -> Iterator[Consumer]:
    consumer = Consumer(
        {
            **_client(brokers),
            "group.id": "penstock-demo",  # Required by the client; it joins no group.
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
            "isolation.level": "read_committed",
        }
    )
    try:
        yield consumer
    finally:
        consumer.close()


def _client(brokers: str) -> dict[str, Any]:
    return {"bootstrap.servers": brokers, "log_level": 0}


def _silent() -> UsageError:
    return UsageError("clicks cannot be read", detail=f"Kafka was silent for {PATIENCE_S:g} s.")


def main() -> None:
    """Fetch the missing jars of a broker; print the option, or the reason why it fails."""
    if fetched := jars_to_fetch():
        sys.stderr.write(f"the demo follows a topic, too{fetched} …\n")
    try:
        kafka_jars()
        KafkaBroker().close()
    except UsageError as missing:
        more = "`penstock demo --kafka` says what to do"
        sys.stderr.write(f"without Kafka: {missing}; {more}\n")
    else:
        sys.stdout.write("--kafka\n")


if __name__ == "__main__":
    main()
