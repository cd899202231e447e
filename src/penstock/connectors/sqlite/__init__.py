"""Documents in the tables of one SQLite file; the file is authoritative."""

from penstock.connectors.sqlite.connector import SqliteConnector

__all__ = ["SqliteConnector", "connector"]


def connector() -> SqliteConnector:
    """One that can be served."""
    return SqliteConnector()
