"""Connection parameters of libpq: parsing, attempts per host, redaction of secrets."""

import contextlib
import os
import random
from collections.abc import Iterable, Mapping
from typing import Any, Final

import psycopg
from psycopg import conninfo, pq

from penstock.errors import UsageError

__all__ = [
    "SECRETS",
    "URL_HINT",
    "collect_secrets",
    "describe_server",
    "parse_conninfo",
    "per_host",
    "redact",
]

SECRETS: Final = frozenset(
    {"password", "sslpassword", "oauth_client_secret", "scram_client_key", "scram_server_key"}
)
"""Connection parameters that must never be printed."""

URL_HINT: Final = (
    "Write postgresql://user:password@host:5432/database; in a password, write @ as %40, : as %3A, "
    "/ as %2F, ? as %3F, % as %25."
)

_HOST_PARAMETERS: Final = ("host", "hostaddr", "port")


def parse_conninfo(conninfo_or_parameters: str | Mapping[str, str]) -> dict[str, str]:
    """Parse a URL, a connection string, or a mapping of parameters.

    Raises:
        UsageError: libpq cannot parse it, or the URL contains an unescaped `@`.
    """
    # SUBTLE: libpq quotes input that it cannot parse. That can be the end of a password which
    # contains "@" or "/". The message is therefore not shown, and not chained, because the context
    # of an error can be logged.
    parsed: dict[str, Any] | None = None
    with contextlib.suppress(psycopg.Error):
        if isinstance(conninfo_or_parameters, str):
            text = conninfo_or_parameters
        else:
            text = conninfo.make_conninfo("", **conninfo_or_parameters)
        parsed = conninfo.conninfo_to_dict(text)
    if parsed is None:
        raise UsageError(
            "connection parameters for postgres cannot be parsed",
            detail="The parameters are not printed, because they may contain a password.",
            hint=URL_HINT,
        )
    if isinstance(conninfo_or_parameters, str) and (
        "@" in str(parsed.get("host", "")) or _has_unescaped_at_sign(conninfo_or_parameters)
    ):
        raise UsageError('postgres URL contains an unescaped "@"', hint=URL_HINT)
    return {name: str(value) for name, value in parsed.items() if value is not None}


def _has_unescaped_at_sign(text: str) -> bool:
    """Return whether libpq would read a part of the password as host, port or database."""
    _, scheme_end, after_scheme = text.partition("://")
    authority, _, path = after_scheme.partition("?")[0].partition("/")
    return bool(scheme_end) and (authority.count("@") > 1 or "@" in path)


def per_host(parameters: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the parameters of one attempt per host, in the order of the attempts."""
    values = {name: parameters[name].split(",") for name in _HOST_PARAMETERS if name in parameters}
    host_count = max(map(len, values.values()), default=1)
    attempts = [
        {**parameters, **{name: hosts[min(i, len(hosts) - 1)] for name, hosts in values.items()}}
        for i in range(host_count)
    ]
    if parameters.get("load_balance_hosts") == "random":
        random.shuffle(attempts)
    return attempts


def describe_server(pgconn: pq.abc.PGconn, parameters: Mapping[str, str]) -> str:
    """Return the server and the database for messages, without secrets."""
    host = pgconn.host.decode(errors="replace") or parameters.get("host", "")
    port = pgconn.port.decode(errors="replace") or parameters.get("port", "")
    database = pgconn.db.decode(errors="replace") or parameters.get("dbname", "")
    return f'postgres database "{database}" at {host}:{port}'


def collect_secrets(pgconn: pq.abc.PGconn, parameters: Mapping[str, str]) -> frozenset[str]:
    """Return the secrets of a connection, from parameters, password file and environment."""
    secrets = {parameters.get(name, "") for name in SECRETS}
    secrets |= {pgconn.password.decode(errors="replace"), os.environ.get("PGPASSWORD", "")}
    return frozenset(secrets)


def redact(text: str, secrets: Iterable[str]) -> str:
    """Return `text` with secrets replaced by asterisks."""
    # The longest secret first, because one can be part of another.
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        text = text.replace(secret, "********")
    return text
