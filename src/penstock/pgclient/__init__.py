"""Postgres client that the source and the connector share.

libpq opens every connection through psycopg. Everything that works for `psql` works here: passwords
and `.pgpass`, TLS and client certificates, `PG*` variables, service files and multiple hosts.
"""

from penstock.pgclient.bounded_wait import SilenceWatch, poll_socket
from penstock.pgclient.connection import (
    Connection,
    Row,
    connect,
    inspect_backend,
    open_pgconn,
    shut_down,
)
from penstock.pgclient.conninfo import SECRETS, URL_HINT, parse_conninfo, redact
from penstock.pgclient.errors import error_fields, server_error, to_sentence
from penstock.pgclient.identifiers import quote_identifier, quote_literal
from penstock.pgclient.settings import SETTINGS, VALUE_SETTINGS, set_statement

__all__ = [
    "SECRETS",
    "SETTINGS",
    "URL_HINT",
    "VALUE_SETTINGS",
    "Connection",
    "Row",
    "SilenceWatch",
    "connect",
    "error_fields",
    "inspect_backend",
    "open_pgconn",
    "parse_conninfo",
    "poll_socket",
    "quote_identifier",
    "quote_literal",
    "redact",
    "server_error",
    "set_statement",
    "shut_down",
    "to_sentence",
]
