"""The values of Postgres columns, as Arrow and back, none of them changed on the way."""

from penstock.sources.postgres.types.column import ColumnType, column_type, to_text

__all__ = ["ColumnType", "column_type", "to_text"]
