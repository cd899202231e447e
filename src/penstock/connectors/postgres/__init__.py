"""Connector that stores documents in Postgres 12 or newer, which is authoritative."""

from penstock.connectors.postgres.connector import PostgresConnector

__all__ = ["PostgresConnector", "connector"]


def connector() -> PostgresConnector:
    """Return the connector."""
    return PostgresConnector()
