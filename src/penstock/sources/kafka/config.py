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
"""So many records are drawn in one tick while catching up."""

Start: TypeAlias = Literal["earliest", "latest"] | Mapping[int, int] | int
"""Where a new source begins: an end of the topic, offsets by partition, or a time in ms."""

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
    """Empty, if there are several."""

    value: Chosen
    key_format: Chosen | None = None
    envelope: Envelope = "none"
    key: tuple[str, ...] = ()
    """The columns that tell rows apart; without, what the envelope says."""

    topics: Mapping[str, str | None] = field(default_factory=dict)
    """Several, each with what Debezium calls its table, if the name does not tell."""

    transactions: str | None = None
    """The topic that tells when transactions begin and end."""

    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By topic, where each has its own key."""

    include: Mapping[str, str] = field(default_factory=dict)
    """What of a record besides its value becomes a column, and its name."""

    start: Start = "earliest"
    group: str | None = None
    """A consumer group that is told how far the source has come, for others to see."""

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
        """That records can become rows, as far as the file alone tells.

        Raises:
            UsageError: the file says what cannot be.
        """
        for each in map(self.of, self.topics) if self.topics else (self,):
            formats = filter(None, (each.value, each.key_format))
            if not any(one.asks for one in formats):
                each.layout(None, None)

    def of(self, topic: str) -> "KafkaConfig":
        """The same for one of several topics alone."""
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
        """What records become, with what was decided about their formats.

        Raises:
            UsageError: the file says what cannot be.
        """
        chosen = self.value
        made = chosen.made_debezium(value) if self.envelope == "debezium" else chosen.made(value)
        keys = None if self.key_format is None else self.key_format.made(key)
        layout = Layout(self.envelope, made, keys, self.include, self.key)
        _check_once(layout)
        return layout

    @property
    def where(self) -> str:
        """For people."""
        named = f'topic "{self.topic}"' if self.topic else f"topics {', '.join(self.topics)}"
        return f"{named} at {self.brokers}"

    @property
    def secrets(self) -> tuple[str, ...]:
        """What nobody may see."""
        found = [value for name, value in self._given() if not is_harmless(name, value)]
        if self.sasl is not None:
            found += [self.sasl.password, _quoted(self.sasl.password)[1:-1]]
        if self.tls is not None and self.tls.key is not None:
            with suppress(OSError):
                found.append(self.tls.key.read_text())
        return tuple(dict.fromkeys(filter(None, found)))

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
        found |= {
            **self.properties,
            **self.reader_properties,
            "isolation.level": "read_committed",
            # One that was deleted would be made again by being asked for.
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
    """That no column is there twice."""
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
