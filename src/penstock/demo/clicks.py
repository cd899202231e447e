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

from penstock.demo.repeated_action import RepeatedAction
from penstock.demo.shop import CUSTOMERS, PRODUCTS
from penstock.engine import jars_folder, kafka_jars
from penstock.errors import UsageError
from penstock.servers import KafkaBroker

__all__ = [
    "COLUMNS",
    "PARTITIONS",
    "TOPIC",
    "ClickCounts",
    "ClickTraffic",
    "background_broker",
    "committed_clicks",
    "end_offsets",
    "missing_jars_note",
    "open_topic",
]

TOPIC: Final = "clicks"
PARTITIONS: Final = 3
COLUMNS: Final[Mapping[str, str]] = {"customer": "int", "page": "text", "product": "int"}
"""Columns of a click, with their types."""

PAGES: Final = ("/", "/basket", "/search?q=水車", "/help")
ABORTED: Final = 0.2
"""Share of transactions that are aborted."""

TIMEOUT_S: Final = 30.0

Row = tuple[str | None, ...]


def missing_jars_note() -> str:
    """Return a note on the downloads of the first start; empty if nothing is missing."""
    return "" if jars_folder().exists() else "; the jars of Kafka (54 MB) are downloaded first"


@contextmanager
def background_broker(folder: Path) -> Iterator[KafkaBroker]:
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
class ClickCounts:
    """Numbers of clicks in committed and in aborted visits."""

    clicks: int = 0
    aborted: int = 0


@dataclass(slots=True)
class ClickTraffic(RepeatedAction):
    """Visits of the shop; `url` contains the addresses of the brokers."""

    counts: ClickCounts = ClickCounts()

    @contextmanager
    def _connect(self) -> Iterator[Callable[[], None]]:
        try:
            producer = Producer(_client(self.url))
            transactional = Producer({**_client(self.url), "transactional.id": "shop"})
            transactional.init_transactions(TIMEOUT_S)
            yield lambda: self._visit(producer, transactional)
        except KafkaException as error:
            raise UsageError(
                "could not send clicks to Kafka", detail=f"Kafka reports: {error.args[0].str()}"
            ) from error

    def _visit(self, producer: Producer, transactional: Producer) -> None:
        clicks = self.rng.randint(1, 5)
        previous = self.counts
        if self.rng.random() < 0.2:
            self._click(producer, clicks)
        else:
            transactional.begin_transaction()
            self._click(transactional, clicks)
            if self.rng.random() < ABORTED:
                transactional.abort_transaction(TIMEOUT_S)
                self.counts = ClickCounts(previous.clicks, previous.aborted + clicks)
                return
            transactional.commit_transaction(TIMEOUT_S)
        self.counts = ClickCounts(previous.clicks + clicks, previous.aborted)

    def _click(self, producer: Producer, clicks: int) -> None:
        """Send this many clicks and wait until each is acknowledged.

        An abort would drop clicks that are not sent yet.
        """
        failed: list[KafkaError] = []
        customer = self.rng.randint(1, CUSTOMERS)
        for _ in range(clicks):
            producer.produce(
                TOPIC,
                json.dumps(_make_click(customer, self.rng), ensure_ascii=False),
                partition=self.rng.randrange(PARTITIONS),
                on_delivery=lambda error, _: failed.append(error) if error else None,
            )
        if producer.flush(TIMEOUT_S):
            raise KafkaException(KafkaError(KafkaError._MSG_TIMED_OUT))
        if failed:
            raise KafkaException(failed[0])


def end_offsets(brokers: str) -> dict[int, int]:
    """Return the end offset of each partition. There must be no concurrent producer."""
    with _consumer(brokers) as consumer:
        offsets = {}
        for partition in range(PARTITIONS):
            watermarks = consumer.get_watermark_offsets(
                TopicPartition(TOPIC, partition), timeout=TIMEOUT_S
            )
            if watermarks is None:
                raise _no_response()
            offsets[partition] = watermarks[1]
        return offsets


def committed_clicks(brokers: str) -> Counter[Row]:
    """Return all committed clicks: their columns, partition and offset."""
    clicks: Counter[Row] = Counter()
    unread = set(range(PARTITIONS))
    with _consumer(brokers) as consumer:
        consumer.assign([TopicPartition(TOPIC, partition, 0) for partition in unread])
        while unread:
            message = consumer.poll(TIMEOUT_S)
            if message is None:
                raise _no_response()
            error = message.error()
            if error is None:
                click = json.loads(message.value() or b"")
                row = (*map(click.get, COLUMNS), message.partition(), message.offset())
                clicks[tuple(None if value is None else str(value) for value in row)] += 1
            elif error.code() == KafkaError._PARTITION_EOF:
                unread.discard(message.partition() or 0)
            else:
                raise UsageError(
                    "could not read clicks from Kafka", detail=f"Kafka reports: {error.str()}"
                )
    return clicks


def _make_click(customer: int, rng: random.Random) -> dict[str, Any]:
    """Return a click on a product or on another page."""
    if rng.random() < 0.5:
        product = rng.randint(1, PRODUCTS)
        return {"customer": customer, "page": f"/product/{product}", "product": product}
    return {"customer": customer, "page": rng.choice(PAGES), "product": None}


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


def _no_response() -> UsageError:
    return UsageError(
        "could not read clicks from Kafka", detail=f"Kafka did not respond within {TIMEOUT_S:g} s."
    )


def main() -> None:
    """Fetch the missing jars of a broker; print the option, or the reason why it fails."""
    if note := missing_jars_note():
        sys.stderr.write(f"the demo has a Kafka topic{note} …\n")
    try:
        kafka_jars()
        KafkaBroker().close()
    except UsageError as missing:
        more = "`penstock demo --kafka` prints a hint"
        sys.stderr.write(f"the demo runs without Kafka: {missing}; {more}\n")
    else:
        sys.stdout.write("--kafka\n")


if __name__ == "__main__":
    main()
