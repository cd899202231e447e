"""The section of a Kafka source."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from penstock.errors import UsageError
from penstock.pipeline.section import File, Section, with_config
from penstock.pipeline.units import Flag, FromOne, FromZero
from penstock.pipeline.validation_errors import to_value_error
from penstock.sources.formats import Registry
from penstock.sources.kafka.config import CHUNK_RECORDS, KafkaConfig, Sasl, Start, Tls
from penstock.sources.kafka.format_spec import FormatSpec, Kind

__all__ = ["SECTION", "KafkaSection", "build_kafka_config"]


class RegistrySection(Section):
    """A schema registry."""

    url: str
    """https://registry.example:8081"""

    user: str | None = None
    """User name."""

    password: str | None = Field(None, repr=False)
    """Password; write ${NAME}."""

    ca: File | None = None
    """CA file to verify the registry with."""


class JsonSection(Section):
    """JSON records."""

    columns: dict[str, Any] | Literal["infer"] | None = None
    """Type name of each member that becomes a column; `infer` derives them from a sample."""


class AvroSection(Section):
    """Avro records, with a schema registry or with a fixed schema."""

    document: File | None = Field(None, alias="schema")
    """Schema file for all records."""

    registry: RegistrySection | None = None
    """Registry of the schema ids that records start with."""

    subject: str | None = None
    """Subject whose newest schema is the reader schema. Default: the subject of the topic."""


class ProtobufSection(Section):
    """Protobuf records."""

    descriptor: File
    """Descriptor file of protoc --descriptor_set_out --include_imports."""

    message: str
    """Full name of the message type."""

    framed: Flag = False
    """Records start with a schema id, as with a registry."""


class CsvSection(Section):
    """CSV records."""

    columns: dict[str, Any] | tuple[str, ...]
    """Column names in order, optionally with type names."""

    delimiter: str = ","
    """Delimiter between values."""


class PlainSection(Section):
    """Records that consist of one value."""

    column: str | None = None
    """Name of the column."""


class FormatSection(Section):
    """Format of records: exactly one of these."""

    json_: JsonSection | None = Field(None, alias="json")
    """JSON. Without columns, the document is one column."""

    avro: AvroSection | None = None
    """Avro."""

    protobuf: ProtobufSection | None = None
    """Protocol Buffers."""

    csv: CsvSection | None = None
    """CSV."""

    text: PlainSection | None = None
    """UTF-8."""

    bytes_: PlainSection | None = Field(None, alias="bytes")
    """Bytes, unchanged."""

    @model_validator(mode="after")
    def _check_format(self) -> Self:
        if len(self.model_fields_set) != 1:
            raise ValueError("choose one format: json, avro, protobuf, csv, text or bytes")
        return self


def _format(value: object) -> object:
    return {value: {}} if isinstance(value, str) else value


FormatChoice = Annotated[
    FormatSection, BeforeValidator(_format, json_schema_input_type=str | FormatSection)
]


class SaslSection(Section):
    """SASL credentials."""

    mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]
    """SASL mechanism."""

    username: str
    """User name."""

    password: str = Field(repr=False)
    """Password; write ${NAME}."""


class KafkaTlsSection(Section):
    """TLS files for brokers; every Spark task must be able to read them."""

    ca: File | None = None
    """CA file to verify the brokers with."""

    certificate: File | None = None
    """Client certificate file."""

    key: File | None = None
    """Key file of the client certificate."""


def _reject_number(value: object) -> object:
    # pydantic would parse a number as a time soon after 1970.
    if isinstance(value, int | float) or (isinstance(value, str) and value.strip().isdecimal()):
        raise ValueError("give a time as 2026-01-31T12:00:00Z, or offsets by partition as {0: 5}")
    return value


Time = Annotated[datetime, BeforeValidator(_reject_number)]

Included = Literal["partition", "offset", "timestamp", "headers", "key"]


class KafkaSection(Section):
    """Topics to read."""

    brokers: str | tuple[str, ...]
    """Bootstrap brokers: broker-1:9092,broker-2:9092."""

    topic: str | None = None
    """Name of the topic."""

    topics: tuple[str, ...] | dict[str, str | None] = ()
    """Several topics instead of one, each optionally with its table name in Debezium."""

    transactions: str | None = None
    """Transaction metadata topic of Debezium."""

    format: FormatChoice
    """Format of values."""

    key_format: FormatChoice | None = None
    """Format of keys. Default: keys are not decoded; for envelope upsert they are text."""

    envelope: Literal["none", "upsert", "debezium"] = "none"
    """Meaning of a record: a row, the row of its key, or a change of a row."""

    key: tuple[str, ...] | dict[str, tuple[str, ...]] = ()
    """Key columns, for all topics or by topic."""

    include: tuple[Included, ...] | dict[Included, str] = ()
    """Other parts of a record that become columns, optionally with a column name."""

    start: Literal["earliest", "latest"] | dict[FromZero, FromZero] | Time = "earliest"
    """Start position: an end of the topic, offsets by partition, or a time."""

    group: Annotated[str, Field(min_length=1)] | None = None
    """Consumer group that receives the durable offsets, for lag monitors; it is never read."""

    on_bad_record: Literal["stop", "set_aside"] = "stop"
    """Handling of records that cannot be decoded: stop, or write them to SOURCE_errors."""

    bite: FromOne = CHUNK_RECORDS
    """Number of records per read during catch-up."""

    bites_of_compacted: Flag = False
    """Apply bite to a compacted topic too, whose older states are no longer available."""

    tls: KafkaTlsSection | None = None
    """TLS files. Default: no TLS."""

    sasl: SaslSection | None = None
    """SASL credentials for the brokers."""

    properties: dict[str, str] = Field({}, repr=False)
    """Kafka properties of all clients."""

    reader_properties: dict[str, str] = Field({}, repr=False)
    """Kafka properties of the clients in Spark tasks only."""


def build_kafka_config(section: KafkaSection) -> KafkaConfig:
    """Convert the section to the config of the source."""
    try:
        config = _config(section)
        config.check_columns()
        return config
    except UsageError as error:
        raise to_value_error(error) from None


def _config(section: KafkaSection) -> KafkaConfig:
    key_format = section.key_format
    if key_format is None and section.envelope == "upsert":
        key_format = FormatSection.model_validate({"text": {"column": "key"}})
    include = section.include
    named = include if isinstance(include, dict) else {column: column for column in include}
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
        value=_format_spec(section.format),
        key_format=None if key_format is None else _format_spec(key_format),
        envelope=section.envelope,
        key=() if isinstance(key, dict) else key,
        keys=key if isinstance(key, dict) else {},
        include={str(column): name for column, name in named.items()},
        start=start,
        group=section.group,
        on_bad_record=section.on_bad_record,
        chunk_records=section.bite,
        chunk_compacted=section.bites_of_compacted,
        tls=None if tls is None else Tls(tls.ca, tls.certificate, tls.key),
        sasl=None if sasl is None else Sasl(sasl.mechanism, sasl.username, sasl.password),
        properties=section.properties,
        reader_properties=section.reader_properties,
    )


def _format_spec(section: FormatSection) -> FormatSpec:
    (name,) = section.model_fields_set
    kind: Kind = name.rstrip("_")  # type: ignore[assignment]
    match getattr(section, name):
        case JsonSection(columns=columns) | CsvSection(columns=columns) as format_section:
            delimiter = format_section.delimiter if isinstance(format_section, CsvSection) else ","
            return FormatSpec(kind, columns=columns, delimiter=delimiter)
        case AvroSection() as format_section:
            return FormatSpec(
                kind,
                schema=None
                if format_section.document is None
                else _read_file(format_section.document).decode(),
                registry=None
                if format_section.registry is None
                else _registry(format_section.registry),
                subject=format_section.subject,
            )
        case ProtobufSection() as format_section:
            return FormatSpec(
                kind,
                descriptors=_read_file(format_section.descriptor),
                message=format_section.message,
                framed=format_section.framed,
            )
        case PlainSection(column=column):
            return FormatSpec(kind, name=column)
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
            hint="Check the path.",
        ) from None


SECTION: Final = with_config(KafkaSection, build_kafka_config)
