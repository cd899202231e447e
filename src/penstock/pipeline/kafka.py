"""The section of a topic, or of several."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from penstock.errors import UsageError
from penstock.pipeline.measures import Flag, FromOne, FromZero
from penstock.pipeline.problems import told
from penstock.pipeline.section import File, Section
from penstock.sources.kafka.chosen import Chosen, Kind
from penstock.sources.kafka.config import BITE, KafkaConfig, Sasl, Start, Tls
from penstock.sources.kafka.formats import Registry

__all__ = ["KafkaSection", "kafka_of"]


class RegistrySection(Section):
    """A registry of schemas."""

    url: str
    """https://registry.example:8081"""

    user: str | None = None
    """Who asks."""

    password: str | None = Field(None, repr=False)
    """The password, best as ${NAME}."""

    ca: File | None = None
    """A file: who must have signed its certificate."""


class JsonSection(Section):
    """Records that are JSON."""

    columns: dict[str, Any] | Literal["infer"] | None = None
    """A word for the type of each member that is a column; `infer` for those of a sample."""


class AvroSection(Section):
    """Records that are Avro, with a registry or with a schema that is given."""

    document: File | None = Field(None, alias="schema")
    """A file: the schema that all records have."""

    registry: RegistrySection | None = None
    """Where schemas are known by the ids that records begin with."""

    subject: str | None = None
    """Whose newest schema is read; without it, the topic's."""


class ProtobufSection(Section):
    """Records that are messages of Protocol Buffers."""

    descriptor: File
    """A file: what protoc --descriptor_set_out --include_imports wrote."""

    message: str
    """The full name of the message."""

    framed: Flag = False
    """Whether records begin with the id of a schema, as with a registry."""


class CsvSection(Section):
    """Records that are lines of CSV."""

    columns: dict[str, Any] | tuple[str, ...]
    """Their names in order, with a word for the type of each or without."""

    delimiter: str = ","
    """What stands between two."""


class PlainSection(Section):
    """Records that are one value."""

    column: str | None = None
    """What its column is called."""


class FormatSection(Section):
    """How records are decoded: one of these."""

    json_: JsonSection | None = Field(None, alias="json")
    """JSON; without columns, the whole document in one."""

    avro: AvroSection | None = None
    """Avro."""

    protobuf: ProtobufSection | None = None
    """Protocol Buffers."""

    csv: CsvSection | None = None
    """CSV."""

    text: PlainSection | None = None
    """UTF-8."""

    bytes_: PlainSection | None = Field(None, alias="bytes")
    """Anything."""

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if len(self.model_fields_set) != 1:
            raise ValueError("choose one format: json, avro, protobuf, csv, text or bytes")
        return self


def _format(value: object) -> object:
    return {value: {}} if isinstance(value, str) else value


SaidFormat = Annotated[
    FormatSection, BeforeValidator(_format, json_schema_input_type=str | FormatSection)
]


class SaslSection(Section):
    """Who we say we are."""

    mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]
    """How it is said."""

    username: str
    """The name."""

    password: str = Field(repr=False)
    """The password, best as ${NAME}."""


class KafkaTlsSection(Section):
    """Certificates for the line to brokers, as files that every task sees."""

    ca: File | None = None
    """Who must have signed theirs."""

    certificate: File | None = None
    """Our own."""

    key: File | None = None
    """Its key."""


def _no_number(value: object) -> object:
    # Of which pydantic would make a time soon after 1970.
    if isinstance(value, int | float) or (isinstance(value, str) and value.strip().isdecimal()):
        raise ValueError("give a time as 2026-01-31T12:00:00Z, or offsets by partition as {0: 5}")
    return value


Time = Annotated[datetime, BeforeValidator(_no_number)]

Included = Literal["partition", "offset", "timestamp", "headers", "key"]


class KafkaSection(Section):
    """A topic to follow."""

    brokers: str | tuple[str, ...]
    """Some of the cluster: broker-1:9092,broker-2:9092."""

    topic: str | None = None
    """Its name."""

    topics: tuple[str, ...] | dict[str, str | None] = ()
    """Instead of one, several; each may have what Debezium calls its table."""

    transactions: str | None = None
    """The topic in which Debezium tells of the transactions that topics have events of."""

    format: SaidFormat
    """How values are decoded."""

    key_format: SaidFormat | None = None
    """How keys are; without it they are not, but for envelope upsert, where they are text."""

    envelope: Literal["none", "upsert", "debezium"] = "none"
    """What a record means: a row, the row of its key, or a change of a row."""

    key: tuple[str, ...] | dict[str, tuple[str, ...]] = ()
    """The columns that tell rows apart; of several topics, those of each, or of all."""

    include: tuple[Included, ...] | dict[Included, str] = ()
    """What else of a record becomes a column, and its name if that is to be another."""

    start: Literal["earliest", "latest"] | dict[FromZero, FromZero] | Time = "earliest"
    """Where to begin: an end of the topic, offsets by partition, or a time."""

    group: Annotated[str, Field(min_length=1)] | None = None
    """A consumer group that is told what is durable, for those who watch lags; never read."""

    on_bad_record: Literal["stop", "set_aside"] = "stop"
    """What to do about a record that cannot be decoded: stop, or keep it in SOURCE_errors."""

    bite: FromOne = BITE
    """How many records are drawn at once while catching up."""

    bites_of_compacted: Flag = False
    """Whether that goes for a compacted topic, too, whose older states cannot be told any more."""

    tls: KafkaTlsSection | None = None
    """Certificates; without it, there is no TLS."""

    sasl: SaslSection | None = None
    """Who we say we are, if the brokers ask."""

    properties: dict[str, str] = Field({}, repr=False)
    """Of the clients, by Kafka's own names."""

    reader_properties: dict[str, str] = Field({}, repr=False)
    """Of the client alone by which Spark reads."""


def kafka_of(section: KafkaSection) -> KafkaConfig:
    """What the section means."""
    try:
        config = _config(section)
        config.check_columns()
        return config
    except UsageError as error:
        raise told(error) from None


def _config(section: KafkaSection) -> KafkaConfig:
    key_format = section.key_format
    if key_format is None and section.envelope == "upsert":
        key_format = FormatSection.model_validate({"text": {"column": "key"}})
    include = section.include
    named = include if isinstance(include, dict) else {each: each for each in include}
    start: Start
    match section.start:
        case datetime() as time:
            zoned = time if time.tzinfo is not None else time.replace(tzinfo=UTC)
            start = int(zoned.timestamp() * 1_000)
        case other:
            start = other
    tls, sasl = section.tls, section.sasl
    topics, key = section.topics, section.key
    return KafkaConfig(
        brokers=section.brokers if isinstance(section.brokers, str) else ",".join(section.brokers),
        topic=section.topic or "",
        topics=topics if isinstance(topics, dict) else dict.fromkeys(topics),
        transactions=section.transactions,
        value=_chosen(section.format),
        key_format=None if key_format is None else _chosen(key_format),
        envelope=section.envelope,
        key=() if isinstance(key, dict) else key,
        keys=key if isinstance(key, dict) else {},
        include={str(each): name for each, name in named.items()},
        start=start,
        group=section.group,
        on_bad_record=section.on_bad_record,
        bite=section.bite,
        bites_of_compacted=section.bites_of_compacted,
        tls=None if tls is None else Tls(tls.ca, tls.certificate, tls.key),
        sasl=None if sasl is None else Sasl(sasl.mechanism, sasl.username, sasl.password),
        properties=section.properties,
        reader_properties=section.reader_properties,
    )


def _chosen(section: FormatSection) -> Chosen:
    (name,) = section.model_fields_set
    kind: Kind = name.rstrip("_")  # type: ignore[assignment]
    match getattr(section, name):
        case JsonSection(columns=columns) | CsvSection(columns=columns) as said:
            delimiter = said.delimiter if isinstance(said, CsvSection) else ","
            return Chosen(kind, columns=columns, delimiter=delimiter)
        case AvroSection() as said:
            return Chosen(
                kind,
                schema=None if said.document is None else _read_file(said.document).decode(),
                registry=None if said.registry is None else _registry(said.registry),
                subject=said.subject,
            )
        case ProtobufSection() as said:
            return Chosen(
                kind,
                descriptors=_read_file(said.descriptor),
                message=said.message,
                framed=said.framed,
            )
        case PlainSection(column=column):
            return Chosen(kind, name=column)
        case other:
            raise ValueError(f"no format {other}")


def _registry(section: RegistrySection) -> Registry:
    ca = None if section.ca is None else _read_file(section.ca).decode()
    return Registry(section.url, section.user, section.password, ca)


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(
            f'file "{path}" cannot be read',
            detail=f"{error.strerror}.",
            hint="Name one that is there.",
        ) from None
