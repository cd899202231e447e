"""What is it made of: columns, schemas that grow, codecs, and rows as Arrow.

Nothing here knows where rows are kept; it knows what they are. Consolidation
lives here because two rows are the same exactly when their columns are.
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
