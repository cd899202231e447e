"""What the file says about a Kafka source.

    kafka:
      brokers: broker-1:9092,broker-2:9092
      topic: clicks
      format: json
      envelope: none
      sasl: {mechanism: SCRAM-SHA-512, username: penstock, password: "${KAFKA_PASSWORD}"}

Two clients read it: librdkafka, which asks how far the topic has come, and Spark's, which
is Java's and brings the records. They call many properties alike and some otherwise, so
TLS and SASL are said once, in our words, and told to each in its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from penstock.errors import UsageError
from penstock.sources.kafka.chosen import Chosen
from penstock.sources.kafka.scan import Envelope, Layout

__all__ = ["BITE", "KafkaConfig", "Sasl", "Start", "Tls"]

BITE: Final = 2_000_000
"""So many records are drawn in one tick while catching up."""

Start: TypeAlias = Literal["earliest", "latest"] | Mapping[int, int] | int
"""Where a new source begins: an end of the topic, offsets by partition, or a time in ms."""

_OURS: Final = frozenset(
    {
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
"""Properties that decide what is read, and are not for the file."""


@dataclass(frozen=True, slots=True)
class Tls:
    """Certificates, as PEM files that every task sees."""

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None


@dataclass(frozen=True, slots=True)
class Sasl:
    """Who we say we are."""

    mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]
    username: str
    password: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class KafkaConfig:
    """A Kafka source."""

    brokers: str
    topic: str
    value: Chosen
    key_format: Chosen | None = None
    envelope: Envelope = "none"
    key: tuple[str, ...] = ()
    """The columns that tell rows apart; without, what the envelope says."""

    include: Mapping[str, str] = field(default_factory=dict)
    """What of a record besides its value becomes a column, and its name."""

    start: Start = "earliest"
    on_bad_record: Literal["stop", "set_aside"] = "stop"
    bite: int = BITE
    bites_of_compacted: bool = False
    """Whether the backlog of a compacted topic may be drawn in bites."""

    tls: Tls | None = None
    sasl: Sasl | None = None
    properties: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Of both clients."""

    reader_properties: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Of Spark's alone."""

    def __post_init__(self) -> None:
        for name in (*self.properties, *self.reader_properties):
            if name in _OURS:
                raise UsageError(
                    f'property "{name}" of a kafka source is not for the file',
                    detail="It decides what is read, or it has a word of its own.",
                    hint="Take it out.",
                )

    def layout(self, value: Any, key: Any) -> Layout:
        """What records become, with what was decided about their formats.

        Raises:
            UsageError: the file says what cannot be.
        """
        chosen = self.value
        made = chosen.made_debezium(value) if self.envelope == "debezium" else chosen.made(value)
        keys = None if self.key_format is None else self.key_format.made(key)
        return Layout(self.envelope, made, keys, self.include, self.key)

    @property
    def where(self) -> str:
        """For people."""
        return f'topic "{self.topic}" at {self.brokers}'

    @property
    def secrets(self) -> tuple[str, ...]:
        """What nobody may see."""
        given = (self.sasl.password,) if self.sasl is not None else ()
        told = (value for name, value in self._given() if _secret(name))
        return tuple(filter(None, (*given, *told)))

    def client(self) -> dict[str, str]:
        """The properties of librdkafka's clients."""
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
        """The options of Spark's reader."""
        found = {"bootstrap.servers": self.brokers, "security.protocol": self._protocol}
        if self.tls is not None:
            if self.tls.ca is not None:
                found["ssl.truststore.type"] = "PEM"
                found["ssl.truststore.location"] = str(self.tls.ca)
            if self.tls.certificate is not None and self.tls.key is not None:
                # Java wants both in one, and takes it as a value.
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
        found |= {**self.properties, **self.reader_properties, "isolation.level": "read_committed"}
        return {f"kafka.{name}": value for name, value in found.items()}

    @property
    def _protocol(self) -> str:
        ssl = "SSL" if self.tls is not None else "PLAINTEXT"
        return f"SASL_{ssl}" if self.sasl is not None else ssl

    def _given(self) -> list[tuple[str, str]]:
        return [*self.properties.items(), *self.reader_properties.items()]


def _secret(name: str) -> bool:
    return any(word in name for word in ("password", "secret", "jaas", ".key", "token"))


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
