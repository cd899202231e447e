"""Record formats: JSON, CSV, Avro, Protobuf, text and bytes, with a schema registry.

Each format decodes a column of bytes into rows of a fixed schema, one per record, and
returns the reason for each record that it cannot decode. All formats run in Spark tasks
and in the driver.
"""

from penstock.sources.formats.avro_format import AvroFormat
from penstock.sources.formats.column_types import Column, parse_columns
from penstock.sources.formats.csv_format import CsvFormat
from penstock.sources.formats.format import Bad, Decoded, Format
from penstock.sources.formats.json_format import JsonFormat
from penstock.sources.formats.protobuf_format import ProtobufFormat
from penstock.sources.formats.raw_format import BytesFormat, TextFormat
from penstock.sources.formats.schema_inference import infer_columns
from penstock.sources.formats.schema_registry import NoSuchSchema, Registered, Registry

__all__ = [
    "AvroFormat",
    "Bad",
    "BytesFormat",
    "Column",
    "CsvFormat",
    "Decoded",
    "Format",
    "JsonFormat",
    "NoSuchSchema",
    "ProtobufFormat",
    "Registered",
    "Registry",
    "TextFormat",
    "infer_columns",
    "parse_columns",
]
