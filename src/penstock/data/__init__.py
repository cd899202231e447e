"""Rows, schemas, codecs, and updates as Arrow tables.

arrow         updates as Arrow tables: consolidate, advance, sort
schema        row schemas and their evolution
codec         key and value codecs
lossless      Python values as Arrow columns, exact or rejected
spark_types   Arrow types as Spark types
packed/       FoundationDB tuples, key hash
jit           compilation of kernels
"""

from penstock.data.arrow import (
    DIFF,
    TIME,
    advance,
    consolidate,
    from_ipc,
    negate,
    sort_rows,
    to_ipc,
)
from penstock.data.codec import BIGINT, BYTES, INT64, JSON, TEXT, UNIT, Codec, UserCodec
from penstock.data.lossless import exact_array
from penstock.data.schema import check_row_schema, conform, evolve, stored_schema

__all__ = [
    "BIGINT",
    "BYTES",
    "DIFF",
    "INT64",
    "JSON",
    "TEXT",
    "TIME",
    "UNIT",
    "Codec",
    "UserCodec",
    "advance",
    "check_row_schema",
    "conform",
    "consolidate",
    "evolve",
    "exact_array",
    "from_ipc",
    "negate",
    "sort_rows",
    "stored_schema",
    "to_ipc",
]
