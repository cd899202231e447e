"""Formats: decoding of the bytes of Kafka records into columns.

Each format turns a column of bytes into rows of a fixed schema, one for each record. For a record
that is not a valid row, it returns the reason. All formats run in Spark tasks and in the driver.
"""

from penstock.sources.kafka.formats.avro import AvroFormat
from penstock.sources.kafka.formats.debezium import DebeziumAvro, DebeziumJson
from penstock.sources.kafka.formats.delimited import CsvFormat
from penstock.sources.kafka.formats.documents import JsonFormat
from penstock.sources.kafka.formats.format import Bad, Decoded, Format
from penstock.sources.kafka.formats.inferring import infer, inferred_words
from penstock.sources.kafka.formats.markers import MarkersAvro, MarkersJson
from penstock.sources.kafka.formats.plain import BytesFormat, TextFormat
from penstock.sources.kafka.formats.protobuf import ProtobufFormat
from penstock.sources.kafka.formats.registry import NoSuchSchema, Registered, Registry
from penstock.sources.kafka.formats.schema import Column, columns_of

__all__ = [
    "AvroFormat",
    "Bad",
    "BytesFormat",
    "Column",
    "CsvFormat",
    "DebeziumAvro",
    "DebeziumJson",
    "Decoded",
    "Format",
    "JsonFormat",
    "MarkersAvro",
    "MarkersJson",
    "NoSuchSchema",
    "ProtobufFormat",
    "Registered",
    "Registry",
    "TextFormat",
    "columns_of",
    "infer",
    "inferred_words",
]
