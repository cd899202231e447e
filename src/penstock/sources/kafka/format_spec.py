"""Format of the configuration, and the decisions made when a source starts.

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
    infer_columns,
)

__all__ = ["FormatSpec", "Kind"]

Kind: TypeAlias = Literal["json", "avro", "protobuf", "csv", "text", "bytes"]


@dataclass(frozen=True, slots=True)
class FormatSpec:
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
    def needs_lookup(self) -> bool:
        """Return whether the columns depend on a sample or a registry, not on the file alone."""
        inferred = self.kind == "json" and self.columns == "infer"
        return inferred or (self.kind == "avro" and self.registry is not None)

    def resolve(self, sample: Callable[[], pa.ChunkedArray], subject: str) -> Any:
        """Return the decision to store, as plain JSON; None if the file determines the columns.

        Raises:
            DefiniteError: the registry does not have the subject.
            TransientError: the registry does not answer.
            UsageError: the sample holds no JSON object.
        """
        if not self.needs_lookup:
            return None
        if self.registry is not None:
            schema = self.registry.latest(self.subject or subject)
            # Encode and decode: JSON has no tuples, and the stored state must equal this value.
            return msgspec.json.decode(msgspec.json.encode(schema))
        return infer_columns(sample())

    def build(self, decision: Any) -> Format:
        """Return the decoder of records, given the stored decision.

        Raises:
            UsageError: the configured format is invalid.
        """
        if self.needs_lookup and decision is None:
            raise UsageError(
                "the source started without "
                + ("a registry" if self.registry is not None else "inferred columns"),
                detail="Columns are fixed when a source starts for the first time.",
                hint="Restore the format, or drop the source and start it again.",
            )
        match self.kind:
            case "json":
                columns = decision if self.columns == "infer" else self.columns
                assert columns is None or isinstance(columns, Mapping)
                return JsonFormat.of(columns)
            case "avro":
                if self.registry is not None:
                    return AvroFormat.of(msgspec.convert(decision, Registered), self.registry)
                if self.schema is None:
                    raise UsageError(
                        "avro format has neither a schema nor a registry",
                        hint="Add one: {avro: {schema: FILE}} or {avro: {registry: {url: …}}}.",
                    )
                return AvroFormat(self.schema)
            case "protobuf":
                return ProtobufFormat(self.descriptors, self.message, framed=self.framed)
            case "csv":
                if self.columns is None:
                    raise UsageError(
                        "csv format has no columns",
                        hint="Name them: {csv: {columns: {id: bigint}}}.",
                    )
                return CsvFormat.of(self.columns, delimiter=self.delimiter)
            case "text":
                return TextFormat(self.name) if self.name else TextFormat()
            case "bytes":
                return BytesFormat(self.name) if self.name else BytesFormat()

    def for_markers(self) -> "FormatSpec":
        """Return the same format for the transaction metadata topic of such topics.

        Raises:
            UsageError: Debezium does not write transaction metadata in this format.
        """
        if self.kind == "json":
            return FormatSpec("json")
        if self.kind == "avro" and self.registry is not None:
            return FormatSpec("avro", registry=self.registry)
        raise UsageError(
            f"transactions need another format than {self.kind}"
            + (" with a schema in the file" if self.kind == "avro" else ""),
            hint="Debezium writes transaction metadata as json, or as avro with a registry. Use "
            "the format that the connector writes.",
        )

    def build_markers(self, decision: Any) -> Format:
        """Return the decoder of the transaction metadata topic that has this format."""
        built = self.build(decision)
        return MarkersAvro(built) if isinstance(built, AvroFormat) else MarkersJson()

    def build_debezium(self, decision: Any) -> Format:
        """Return the decoder of Debezium change events in this format.

        Raises:
            UsageError: Debezium does not write change events in this format.
        """
        if self.kind == "json" and self.columns is None:
            raise UsageError(
                "envelope debezium needs the columns of the table",
                hint="Name them: format: {json: {columns: {id: bigint}}}",
            )
        built = self.build(decision)
        if isinstance(built, JsonFormat):
            return DebeziumJson(built)
        if isinstance(built, AvroFormat):
            return DebeziumAvro(built)
        raise UsageError(
            f"envelope debezium does not support format {self.kind}",
            hint="Debezium writes change events as json or avro. Use the format that the "
            "connector writes.",
        )
