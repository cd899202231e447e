"""What the bytes of Kafka's records say, as columns.

Each format turns a column of bytes into rows of a fixed schema, one for each
record, and says of each record that is no such row why. All of them run in
Spark's tasks as well as in the driver.
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
