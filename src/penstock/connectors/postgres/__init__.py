"""Documents in the tables of a Postgres database, 12 or newer; the database is authoritative."""

from penstock.connectors.postgres.connector import PostgresConnector

__all__ = ["PostgresConnector", "connector"]


def connector() -> PostgresConnector:
    """One that can be served."""
    return PostgresConnector()
