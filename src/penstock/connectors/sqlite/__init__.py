"""Connector that stores documents in the tables of a SQLite file, which is authoritative."""

from penstock.connectors.sqlite.connector import SqliteConnector

__all__ = ["SqliteConnector", "connector"]


def connector() -> SqliteConnector:
    """Return the connector."""
    return SqliteConnector()
