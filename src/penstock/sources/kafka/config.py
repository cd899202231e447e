"""Configuration of a Kafka source.

    kafka:
      brokers: broker-1:9092,broker-2:9092
      topic: clicks
      format: json
      envelope: none
      sasl: {mechanism: SCRAM-SHA-512, username: penstock, password: "${KAFKA_PASSWORD}"}

Two clients use it. librdkafka requests the offsets of the topic. Spark's Java client reads the
records. The clients share the names of many properties but not of all. TLS and SASL are therefore
configured once, in Penstock's terms, and translated for each client.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import pyarrow as pa

from penstock.errors import UsageError
from penstock.sources.kafka.chosen import Chosen
from penstock.sources.kafka.layout import Envelope, Layout
from penstock.sources.kafka.properties import is_harmless

__all__ = ["BITE", "KafkaConfig", "Sasl", "Start", "Tls"]

BITE: Final = 2_000_000
"""Maximum number of records read in one tick during catch-up."""

Start: TypeAlias = Literal["earliest", "latest"] | Mapping[int, int] | int
"""Start of a new source: an end of the topic, offsets by partition, or a timestamp in ms."""

_TOPIC: Final = re.compile(r"[a-zA-Z0-9._-]{1,249}")

_OURS: Final = frozenset(
    {
        "allow.auto.create.topics",
        "bootstrap.servers",
        "enable.auto.commit",
        "group.id",
        "isolation.level",
        "auto.offset.reset",
        "key.deserializer",
        "value.deserializer",
        "interceptor.classes",
    }
)
"""Properties that determine the data read; the file must not set them."""


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS certificates, as PEM files that every Spark task can read."""

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None


@dataclass(frozen=True, slots=True)
class Sasl:
    """SASL credentials."""

    mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]
    username: str
    password: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class KafkaConfig:
    """Configuration of one Kafka source."""

    brokers: str
    topic: str
    """Name of the topic; empty if the source has several topics."""

    value: Chosen
    key_format: Chosen | None = None
    envelope: Envelope = "none"
    key: tuple[str, ...] = ()
    """Key columns of the collection; if empty, the envelope determines them."""

    topics: Mapping[str, str | None] = field(default_factory=dict)
    """Several topics, each with its Debezium table name if the topic name does not end with that.
    """

    transactions: str | None = None
    """Transaction metadata topic, with a BEGIN and an END record for each transaction."""

    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Key columns by topic, for topics with a key of their own."""

    include: Mapping[str, str] = field(default_factory=dict)
    """Column name by record part (such as `key` or `timestamp`) that is added to the value."""

    start: Start = "earliest"
    group: str | None = None
    """Consumer group to which progress is reported, for lag monitoring."""

    on_bad_record: Literal["stop", "set_aside"] = "stop"
    bite: int = BITE
    bites_of_compacted: bool = False
    """True if the backlog of a compacted topic may be read in chunks."""

    tls: Tls | None = None
    sasl: Sasl | None = None
    properties: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Properties of both clients."""

    reader_properties: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Properties of Spark's client only."""

    def __post_init__(self) -> None:
        self._check_topics()
        self._check_names()
        if self.tls is not None and (self.tls.certificate is None) != (self.tls.key is None):
            raise UsageError(
                "a certificate is shown with its key, and the file names one of the two",
                hint="Give both: tls: {certificate: FILE, key: FILE}; or neither.",
            )
        for name in (*self.properties, *self.reader_properties):
            if name in _OURS:
                raise UsageError(
                    f'property "{name}" of a kafka source is not for the file',
                    detail="It decides what is read, or it has a word of its own.",
                    hint="Take it out.",
                )

    def _check_topics(self) -> None:
        if bool(self.topic) == bool(self.topics):
            raise UsageError(
                "a kafka source has either a topic or several topics",
                hint="Give one of them: topic: NAME or topics: [NAME, NAME].",
            )
        if not self.topics:
            if self.transactions is not None or self.keys:
                raise UsageError(
                    "transactions, and a key for each topic, are of a source with several topics",
                    hint="Name the topics, even if it is one: topics: [NAME]",
                )
            return
        if self.transactions is not None and self.envelope != "debezium":
            raise UsageError(
                f"transactions do not go with envelope {self.envelope}",
                hint="Only Debezium tells of them: envelope: debezium",
            )
        if self.transactions in self.topics:
            raise UsageError(
                f'topic "{self.transactions}" is both one of transactions and one of events',
                hint="Take it out of topics.",
            )
        if unknown := sorted(set(self.keys) - set(self.topics)):
            raise UsageError(
                f'there is a key for topic "{unknown[0]}", which is not among topics',
                hint="Take it out, or add the topic.",
            )
        if self.transactions is not None and self.start != "earliest":
            raise UsageError(
                "a source with transactions starts where its topics begin",
                detail="One that starts elsewhere would wait for what is missing of the first "
                "transactions.",
                hint="Take start out.",
            )
        if not isinstance(self.start, int | str):
            raise UsageError(
                "offsets to start at are of one topic, and there are several",
                hint="Start at an end or at a time, or make a source of each topic.",
            )
        if self.value.subject is not None:
            raise UsageError(
                f'subject "{self.value.subject}" is of one topic, and there are several',
                hint="Take it out, for each topic's own; or make a source of each topic.",
            )
        if self.transactions is not None:
            self.value.markers()

    def _check_names(self) -> None:
        if not all(each.strip() for each in self.brokers.split(",")):
            raise UsageError(
                "brokers of a kafka source are not named",
                hint="Name some of the cluster: brokers: broker-1:9092,broker-2:9092",
            )
        named = (self.topic, *self.topics, self.transactions)
        for each in filter(None, named):
            if not _TOPIC.fullmatch(each) or each in (".", ".."):
                raise UsageError(
                    f'no topic can be called "{each}"',
                    detail="Names have 1 to 249 letters, digits, dots, _ and -.",
                    hint="Name one that is there.",
                )

    def check_columns(self) -> None:
        """Check that records can become rows, as far as the file alone determines that.

        Raises:
            UsageError: the configuration is invalid.
        """
        for each in map(self.of, self.topics) if self.topics else (self,):
            formats = filter(None, (each.value, each.key_format))
            if not any(one.asks for one in formats):
                each.layout(None, None)

    def of(self, topic: str) -> "KafkaConfig":
        """Return the configuration of one topic of several."""
        one = replace(self, topic=topic, topics={}, transactions=None, keys={})
        if topic == self.transactions:
            return replace(
                one,
                value=self.value.markers(),
                key_format=None,
                envelope="none",
                key=(),
                include={},
            )
        return replace(one, key=self.keys.get(topic, self.key))

    def layout(self, value: Any, key: Any) -> Layout:
        """Return the layout of rows, given the stored decisions about the formats.

        Raises:
            UsageError: the configuration is invalid.
        """
        chosen = self.value
        made = chosen.made_debezium(value) if self.envelope == "debezium" else chosen.made(value)
        keys = None if self.key_format is None else self.key_format.made(key)
        layout = Layout(self.envelope, made, keys, self.include, self.key)
        _check_once(layout)
        return layout

    @property
    def where(self) -> str:
        """Topic and brokers, as error messages and the status page name them."""
        named = f'topic "{self.topic}"' if self.topic else f"topics {', '.join(self.topics)}"
        return f"{named} at {self.brokers}"

    @property
    def secrets(self) -> tuple[str, ...]:
        """Values that must not appear in logs, messages or the status page."""
        found = [value for name, value in self._given() if not is_harmless(name, value)]
        if self.sasl is not None:
            found += [self.sasl.password, _quoted(self.sasl.password)[1:-1]]
        if self.tls is not None and self.tls.key is not None:
            with suppress(OSError):
                found.append(self.tls.key.read_text())
        return tuple(dict.fromkeys(filter(None, found)))

    def client(self) -> dict[str, str]:
        """Return the properties for librdkafka's clients."""
        found = {"bootstrap.servers": self.brokers, "security.protocol": self._protocol}
        if self.tls is not None:
            files = {
                "ssl.ca.location": self.tls.ca,
                "ssl.certificate.location": self.tls.certificate,
                "ssl.key.location": self.tls.key,
            }
            found |= {name: str(path) for name, path in files.items() if path is not None}
        if self.sasl is not None:
            found |= {
                "sasl.mechanism": self.sasl.mechanism,
                "sasl.username": self.sasl.username,
                "sasl.password": self.sasl.password,
            }
        return {**found, **self.properties}

    def reader(self) -> dict[str, str]:
        """Return the options for Spark's Kafka reader."""
        found = {"bootstrap.servers": self.brokers, "security.protocol": self._protocol}
        if self.tls is not None:
            if self.tls.ca is not None:
                found["ssl.truststore.type"] = "PEM"
                found["ssl.truststore.location"] = str(self.tls.ca)
            if self.tls.certificate is not None and self.tls.key is not None:
                # The Java client expects certificate and key in one store, and accepts the PEM text
                # as a value.
                found["ssl.keystore.type"] = "PEM"
                found["ssl.keystore.certificate.chain"] = self.tls.certificate.read_text()
                found["ssl.keystore.key"] = self.tls.key.read_text()
        if self.sasl is not None:
            plain = self.sasl.mechanism == "PLAIN"
            module = "plain.PlainLoginModule" if plain else "scram.ScramLoginModule"
            found["sasl.mechanism"] = self.sasl.mechanism
            found["sasl.jaas.config"] = (
                f"org.apache.kafka.common.security.{module} required"
                f" username={_quoted(self.sasl.username)} password={_quoted(self.sasl.password)};"
            )
        found |= {
            **self.properties,
            **self.reader_properties,
            "isolation.level": "read_committed",
            # Prevents a deleted topic from being created again by the request itself.
            "allow.auto.create.topics": "false",
        }
        return {f"kafka.{name}": value for name, value in found.items()}

    @property
    def _protocol(self) -> str:
        ssl = "SSL" if self.tls is not None else "PLAINTEXT"
        return f"SASL_{ssl}" if self.sasl is not None else ssl

    def _given(self) -> list[tuple[str, str]]:
        return [*self.properties.items(), *self.reader_properties.items()]


def _check_once(layout: Layout) -> None:
    """Raise UsageError if a column name occurs twice."""
    names = layout.schema.names
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is None:
        return
    row = layout.value.schema
    if layout.envelope == "debezium":
        row = pa.schema([*row.field("after").type])
    said = {
        "key_format": [] if layout.key is None else layout.key.schema.names,
        "format": row.names,
        "include": [*layout.include.values()],
    }
    by = [option for option, columns in said.items() for name in columns if name == twice]
    by += ["the place of a record"] if len(by) < 2 else []
    raise UsageError(
        f'column "{twice}" would be there twice, by {" and by ".join(by)}',
        hint="Give one of them another name, as in include: {key: of_record}",
    )


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
