"""Format selected in the configuration, and the decisions made when a source starts.

The columns of a collection are fixed when it is created. The input that determines them (a sample
of the topic, or the latest schema of a registry) is therefore read once and stored in the source
state. Later records are decoded into these columns or are bad records.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import msgspec
import pyarrow as pa

from penstock.errors import UsageError
from penstock.sources.debezium.envelope import DebeziumAvro, DebeziumJson
from penstock.sources.debezium.markers import MarkersAvro, MarkersJson
from penstock.sources.formats import (
    AvroFormat,
    BytesFormat,
    CsvFormat,
    Format,
    JsonFormat,
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
    """A format, as the configuration file specifies it."""

    kind: Kind
    columns: Mapping[str, Any] | Sequence[str] | Literal["infer"] | None = None
    """JSON and CSV: the type name of each column. For CSV, a list of column names is enough."""

    schema: str | None = None
    """Avro: schema text, instead of a registry."""

    registry: Registry | None = None
    subject: str | None = None
    descriptors: bytes = b""
    message: str = ""
    framed: bool = False
    """Protobuf: true if each record starts with a schema id."""

    delimiter: str = ","
    name: str | None = None
    """Text, bytes and undivided documents: the name of the only column."""

    @property
    def asks(self) -> bool:
        """Return whether the columns depend on a sample or a registry, not on the file alone."""
        inferred = self.kind == "json" and self.columns == "infer"
        return inferred or (self.kind == "avro" and self.registry is not None)

    def decided(self, sample: Callable[[], pa.ChunkedArray], subject: str) -> Any:
        """Return the decision to store, as plain JSON; None if the file determines the columns.

        Raises:
            DefiniteError: the registry does not have the subject.
            TransientError: the registry does not answer.
            UsageError: the sample holds no JSON object.
        """
        if not self.asks:
            return None
        if self.registry is not None:
            found = self.registry.latest(self.subject or subject)
            # Encode and decode: JSON has no tuples, and the stored state must equal this value.
            return msgspec.json.decode(msgspec.json.encode(found))
        return inferred_words(sample())

    def made(self, decided: Any) -> Format:
        """Return the decoder of records, given the stored decision.

        Raises:
            UsageError: the configured format is invalid.
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
        """Return the same format for the transaction metadata topic of such topics.

        Raises:
            UsageError: Debezium does not write transaction metadata in this format.
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
        """Return the decoder of the transaction metadata topic that has this format."""
        made = self.made(decided)
        return MarkersAvro(made) if isinstance(made, AvroFormat) else MarkersJson()

    def made_debezium(self, decided: Any) -> Format:
        """Return the decoder of Debezium change events in this format.

        Raises:
            UsageError: Debezium does not write change events in this format.
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
