"""Lossless conversion of Postgres column values to Arrow and back."""

from penstock.sources.postgres.types.column import ColumnType, column_type, to_text

__all__ = ["ColumnType", "column_type", "to_text"]
