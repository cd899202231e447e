"""Quoting of identifiers and string literals for SQL and replication commands."""

__all__ = ["quote_identifier", "quote_literal"]


def quote_identifier(name: str) -> str:
    """Return `name` as a quoted identifier."""
    return '"' + name.replace('"', '""') + '"'


def quote_literal(text: str) -> str:
    """Return `text` as a string literal, for `standard_conforming_strings = on`."""
    return "'" + text.replace("'", "''") + "'"
