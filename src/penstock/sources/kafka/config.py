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

from penstock.errors import UsageError
from penstock.sources.kafka.client_properties import is_harmless
from penstock.sources.kafka.format_spec import FormatSpec
from penstock.sources.kafka.output_schema import Envelope, OutputSchema

__all__ = ["CHUNK_RECORDS", "KafkaConfig", "Sasl", "Start", "Tls"]

CHUNK_RECORDS: Final = 2_000_000
"""Maximum number of records read in one tick during catch-up."""

Start: TypeAlias = Literal["earliest", "latest"] | Mapping[int, int] | int
"""Start of a new source: an end of the topic, offsets by partition, or a timestamp in ms."""

_TOPIC_NAME: Final = re.compile(r"[a-zA-Z0-9._-]{1,249}")

_RESERVED: Final = frozenset(
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

    value: FormatSpec
    key_format: FormatSpec | None = None
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
    chunk_records: int = CHUNK_RECORDS
    chunk_compacted: bool = False
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
                "tls of a kafka source has only one of certificate and key",
                hint="Add the other: tls: {certificate: FILE, key: FILE}; or remove both.",
            )
        for name in (*self.properties, *self.reader_properties):
            if name in _RESERVED:
                raise UsageError(
                    f'property "{name}" of a kafka source cannot be set',
                    detail="Penstock sets the property, or has an option for it.",
                    hint="Remove the property.",
                )

    def _check_topics(self) -> None:
        if bool(self.topic) == bool(self.topics):
            raise UsageError(
                "a kafka source needs either topic or topics",
                hint="Use one of them: topic: NAME or topics: [NAME, NAME].",
            )
        if not self.topics:
            if self.transactions is not None or self.keys:
                raise UsageError(
                    "transactions, and a key for each topic, need topics",
                    hint="Use topics, also for one topic: topics: [NAME]",
                )
            return
        if self.transactions is not None and self.envelope != "debezium":
            raise UsageError(
                f"transactions need envelope debezium, not {self.envelope}",
                hint="Set envelope: debezium",
            )
        if self.transactions in self.topics:
            raise UsageError(
                f'transaction metadata topic "{self.transactions}" is also in topics',
                hint="Remove the topic from topics.",
            )
        if missing := sorted(set(self.keys) - set(self.topics)):
            raise UsageError(
                f'key for topic "{missing[0]}", which is not in topics',
                hint="Remove the key, or add the topic.",
            )
        if self.transactions is not None and self.start != "earliest":
            raise UsageError(
                "a source with transactions must start at the beginning of its topics",
                detail="From another start, the first transactions would miss events.",
                hint="Remove start.",
            )
        if not isinstance(self.start, int | str):
            raise UsageError(
                "start has offsets of one topic, and the source has several",
                hint="Start at an end or at a time, or add a source for each topic.",
            )
        if self.value.subject is not None:
            raise UsageError(
                f'subject "{self.value.subject}" is for one topic, and the source has several',
                hint="Remove subject to use the subject of each topic, or add a source for each "
                "topic.",
            )
        if self.transactions is not None:
            self.value.for_markers()

    def _check_names(self) -> None:
        if not all(broker.strip() for broker in self.brokers.split(",")):
            raise UsageError(
                "a kafka source has an empty broker name",
                hint="Name brokers of the cluster: brokers: broker-1:9092,broker-2:9092",
            )
        for topic in filter(None, (self.topic, *self.topics, self.transactions)):
            if not _TOPIC_NAME.fullmatch(topic) or topic in (".", ".."):
                raise UsageError(
                    f'topic name "{topic}" is invalid',
                    detail="A topic name has 1 to 249 letters, digits, dots, _ and -.",
                    hint="Use the name of an existing topic.",
                )

    def check_columns(self) -> None:
        """Check that records can become rows, as far as the file alone determines that.

        Raises:
            UsageError: the configuration is invalid.
        """
        for config in map(self.for_topic, self.topics) if self.topics else (self,):
            formats = filter(None, (config.value, config.key_format))
            if not any(spec.needs_lookup for spec in formats):
                config.output_schema(None, None)

    def for_topic(self, topic: str) -> "KafkaConfig":
        """Return the configuration of one topic of several."""
        config = replace(self, topic=topic, topics={}, transactions=None, keys={})
        if topic == self.transactions:
            return replace(
                config,
                value=self.value.for_markers(),
                key_format=None,
                envelope="none",
                key=(),
                include={},
            )
        return replace(config, key=self.keys.get(topic, self.key))

    def output_schema(self, value: Any, key: Any) -> OutputSchema:
        """Return the columns of rows, given the stored decisions about the formats.

        Raises:
            UsageError: the configuration is invalid.
        """
        spec = self.value
        is_debezium = self.envelope == "debezium"
        value_format = spec.build_debezium(value) if is_debezium else spec.build(value)
        key_format = None if self.key_format is None else self.key_format.build(key)
        output = OutputSchema(self.envelope, value_format, key_format, self.include, self.key)
        _check_unique_columns(output)
        return output

    @property
    def where(self) -> str:
        """Topic and brokers, as error messages and the status page name them."""
        topics = f'topic "{self.topic}"' if self.topic else f"topics {', '.join(self.topics)}"
        return f"{topics} at {self.brokers}"

    @property
    def secrets(self) -> tuple[str, ...]:
        """Values that must not appear in logs, messages or the status page."""
        properties = (*self.properties.items(), *self.reader_properties.items())
        secrets = [value for name, value in properties if not is_harmless(name, value)]
        if self.sasl is not None:
            secrets += [self.sasl.password, _quote(self.sasl.password)[1:-1]]
        if self.tls is not None and self.tls.key is not None:
            with suppress(OSError):
                secrets.append(self.tls.key.read_text())
        return tuple(dict.fromkeys(filter(None, secrets)))

    def client(self) -> dict[str, str]:
        """Return the properties for librdkafka's clients."""
        properties = {"bootstrap.servers": self.brokers, "security.protocol": self._protocol}
        if self.tls is not None:
            files = {
                "ssl.ca.location": self.tls.ca,
                "ssl.certificate.location": self.tls.certificate,
                "ssl.key.location": self.tls.key,
            }
            properties |= {name: str(path) for name, path in files.items() if path is not None}
        if self.sasl is not None:
            properties |= {
                "sasl.mechanism": self.sasl.mechanism,
                "sasl.username": self.sasl.username,
                "sasl.password": self.sasl.password,
            }
        return {**properties, **self.properties}

    def reader(self) -> dict[str, str]:
        """Return the options for Spark's Kafka reader."""
        properties = {"bootstrap.servers": self.brokers, "security.protocol": self._protocol}
        if self.tls is not None:
            if self.tls.ca is not None:
                properties["ssl.truststore.type"] = "PEM"
                properties["ssl.truststore.location"] = str(self.tls.ca)
            if self.tls.certificate is not None and self.tls.key is not None:
                # The Java client expects certificate and key in one store, and accepts the PEM text
                # as a value.
                properties["ssl.keystore.type"] = "PEM"
                properties["ssl.keystore.certificate.chain"] = self.tls.certificate.read_text()
                properties["ssl.keystore.key"] = self.tls.key.read_text()
        if self.sasl is not None:
            plain = self.sasl.mechanism == "PLAIN"
            module = "plain.PlainLoginModule" if plain else "scram.ScramLoginModule"
            properties["sasl.mechanism"] = self.sasl.mechanism
            properties["sasl.jaas.config"] = (
                f"org.apache.kafka.common.security.{module} required"
                f" username={_quote(self.sasl.username)} password={_quote(self.sasl.password)};"
            )
        properties |= {
            **self.properties,
            **self.reader_properties,
            "isolation.level": "read_committed",
            # Prevents a deleted topic from being created again by the request itself.
            "allow.auto.create.topics": "false",
        }
        return {f"kafka.{name}": value for name, value in properties.items()}

    @property
    def _protocol(self) -> str:
        ssl = "SSL" if self.tls is not None else "PLAINTEXT"
        return f"SASL_{ssl}" if self.sasl is not None else ssl


def _check_unique_columns(output: OutputSchema) -> None:
    """Raise UsageError if a column name occurs twice."""
    names = output.schema.names
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is None:
        return
    columns_by_option = {
        "key_format": [] if output.key is None else output.key.schema.names,
        "format": output.value_schema.names,
        "include": [*output.include.values()],
    }
    options = [
        option
        for option, columns in columns_by_option.items()
        for name in columns
        if name == duplicate
    ]
    if len(options) < 2:
        options.append("the place of a record")
    raise UsageError(
        f'column "{duplicate}" is defined twice, by {" and by ".join(options)}',
        hint="Rename one of them, as in include: {key: record_key}",
    )


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
