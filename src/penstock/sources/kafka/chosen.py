"""The format that a file chooses, and what is decided about it once, when a source begins.

A collection's columns are fixed when it is made, so whatever they are taken from (a sample
of the topic, the newest schema of a registry) is looked at once and remembered; what comes
later is read into these columns, or is a bad record.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import msgspec
import pyarrow as pa

from penstock.errors import UsageError
from penstock.sources.kafka.formats import (
    AvroFormat,
    BytesFormat,
    CsvFormat,
    DebeziumAvro,
    DebeziumJson,
    Format,
    JsonFormat,
    MarkersAvro,
    MarkersJson,
    ProtobufFormat,
    Registered,
    Registry,
    TextFormat,
    inferred_words,
)

__all__ = ["Chosen", "Kind"]

Kind: TypeAlias = Literal["json", "avro", "protobuf", "csv", "text", "bytes"]


@dataclass(frozen=True, slots=True)
class Chosen:
    """A format, as the file has it."""

    kind: Kind
    columns: Mapping[str, Any] | Sequence[str] | Literal["infer"] | None = None
    """Of JSON and CSV: a word for the type of each; of CSV their names may do."""

    schema: str | None = None
    """Of Avro, instead of a registry."""

    registry: Registry | None = None
    subject: str | None = None
    descriptors: bytes = b""
    message: str = ""
    framed: bool = False
    """Of Protobuf: whether records begin with the id of a schema."""

    delimiter: str = ","
    name: str | None = None
    """Of text, bytes and whole documents: the column."""

    @property
    def asks(self) -> bool:
        """Whether something must be decided, so that the file does not say all."""
        inferred = self.kind == "json" and self.columns == "infer"
        return inferred or (self.kind == "avro" and self.registry is not None)

    def decided(self, sample: Callable[[], pa.ChunkedArray], subject: str) -> Any:
        """What must be remembered, as plain JSON; None if the file says all.

        Raises:
            DefiniteError: a registry has no such subject.
            TransientError: it does not answer.
            UsageError: the sample says nothing.
        """
        if not self.asks:
            return None
        if self.registry is not None:
            found = self.registry.latest(self.subject or subject)
            # By way of the text, since its tuples are none of JSON's.
            return msgspec.json.decode(msgspec.json.encode(found))
        return inferred_words(sample())

    def made(self, decided: Any) -> Format:
        """How records are decoded.

        Raises:
            UsageError: the file chose what cannot be.
        """
        if self.asks and decided is None:
            raise UsageError(
                "it began without "
                + ("a registry" if self.registry is not None else "columns that are inferred"),
                detail="Columns are decided when a source begins.",
                hint="Say its format as it was, or drop it and let it begin again.",
            )
        match self.kind:
            case "json":
                said = decided if self.columns == "infer" else self.columns
                assert said is None or isinstance(said, Mapping)
                return JsonFormat.of(said)
            case "avro":
                if self.registry is not None:
                    return AvroFormat.of(msgspec.convert(decided, Registered), self.registry)
                if self.schema is None:
                    raise UsageError(
                        "avro format has neither a schema nor a registry",
                        hint="Give one: {avro: {schema: FILE}} or {avro: {registry: {url: …}}}.",
                    )
                return AvroFormat(self.schema)
            case "protobuf":
                return ProtobufFormat(self.descriptors, self.message, framed=self.framed)
            case "csv":
                columns = self.columns
                if columns is None:
                    raise UsageError(
                        "csv format has no columns",
                        hint="Name them: {csv: {columns: {id: bigint}}}.",
                    )
                return CsvFormat.of(columns, delimiter=self.delimiter)
            case "text":
                return TextFormat(self.name) if self.name else TextFormat()
            case "bytes":
                return BytesFormat(self.name) if self.name else BytesFormat()

    def markers(self) -> "Chosen":
        """The same format, for the topic of transactions beside topics that have it.

        Raises:
            UsageError: there is none.
        """
        if self.kind == "json":
            return Chosen("json")
        if self.kind == "avro" and self.registry is not None:
            return Chosen("avro", registry=self.registry)
        raise UsageError(
            f"transactions do not go with format {self.kind}"
            + (" and a schema that is given" if self.kind == "avro" else ""),
            hint="Debezium tells of them as json, or as avro with a registry; choose what the "
            "connector writes.",
        )

    def made_markers(self, decided: Any) -> Format:
        """How records of a topic of transactions are decoded, of which this is the format."""
        made = self.made(decided)
        return MarkersAvro(made) if isinstance(made, AvroFormat) else MarkersJson()

    def made_debezium(self, decided: Any) -> Format:
        """How change events of Debezium are decoded, of which this is the format.

        Raises:
            UsageError: events do not come in this format.
        """
        if self.kind == "json" and self.columns is None:
            raise UsageError(
                "envelope debezium needs to know the columns of the table",
                hint="Name them: format: {json: {columns: {id: bigint}}}",
            )
        made = self.made(decided)
        if isinstance(made, JsonFormat):
            return DebeziumJson(made)
        if isinstance(made, AvroFormat):
            return DebeziumAvro(made)
        raise UsageError(
            f"envelope debezium does not go with format {self.kind}",
            hint="Change events come as json or avro; choose the one that the connector writes.",
        )
