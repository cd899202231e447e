"""Pinned session settings.

A value is compared with a value read earlier, possibly over another connection by another process.
Every session therefore pins all settings that change how a server prints values. Settings of the
server, the database or the role have no effect (hazard B6).
"""

from collections.abc import Mapping
from typing import Final

from penstock.pgclient.identifiers import quote_literal

__all__ = ["SETTINGS", "VALUE_SETTINGS", "set_statement"]

VALUE_SETTINGS: Final[Mapping[str, str]] = {
    "DateStyle": "ISO, YMD",
    "IntervalStyle": "postgres",
    "TimeZone": "UTC",
    "extra_float_digits": "1",
    "bytea_output": "hex",
    "lc_monetary": "C",
    "standard_conforming_strings": "on",
    "statement_timeout": "0",
    "lock_timeout": "0",
}
"""Settings of every session: text of values, and no time limits. `client_encoding` is a parameter
of the connection."""

SETTINGS: Final[Mapping[str, str]] = {
    **VALUE_SETTINGS,
    "search_path": "",
    "quote_all_identifiers": "off",
    "row_security": "off",
    "jit": "off",
    "idle_in_transaction_session_timeout": "0",
}
"""Settings of a `Connection`."""

TIMEOUTS: Final[Mapping[str, int]] = {
    "idle_session_timeout": 14_00_00,
    "transaction_timeout": 17_00_00,
}
"""Further timeouts to disable, with the server version that introduced each."""


def set_statement(settings: Mapping[str, str], server_version: int) -> str:
    """Return the SQL that applies `settings` to a session and disables its timeouts."""
    timeouts = {name: "0" for name, since in TIMEOUTS.items() if server_version >= since}
    return "; ".join(
        f"SET SESSION {name} = {quote_literal(value)}"
        for name, value in {**settings, **timeouts}.items()
    )
