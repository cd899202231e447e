"""Errors of a server and of libpq in the error tree of Penstock.

A server error becomes a `DefiniteError` if it is about the request or the data, and a
`TransientError` otherwise. `sqlstate` holds the code of the server. For some codes it is uncertain
whether a retry can succeed. They are transient if a change outside Penstock, such as a GRANT,
resolves them.
"""

import re
from collections.abc import Mapping
from typing import Final

from psycopg import pq

from penstock.errors import DefiniteError, SourceError, TransientError

__all__ = ["connection_error", "error_fields", "server_error", "to_sentence"]

DEFINITE: Final = frozenset({"0A", "22", "26", "34", "3F", "42", "54", "55000"})
"""SQLSTATE codes, and classes of codes, about the request or the data."""

TRANSIENT: Final = frozenset({"42501"})
"""Codes of those classes that a change outside Penstock, such as a GRANT, can resolve."""

HINTS: Final[Mapping[str, str]] = {
    "42501": "Grant the missing privilege to the role of this connection.",
    "53300": "Raise max_connections of the server, or close connections to it.",
    "55006": "Another connection uses the object. Retry when that connection has ended.",
}

_FIELDS: Final = {
    "C": pq.DiagnosticField.SQLSTATE,
    "M": pq.DiagnosticField.MESSAGE_PRIMARY,
    "D": pq.DiagnosticField.MESSAGE_DETAIL,
    "H": pq.DiagnosticField.MESSAGE_HINT,
}

_SQLSTATE: Final = re.compile(r":  ([0-9A-Z]{5}): ")
_LOCATION: Final = re.compile(r"\n[^\n]+:  \w+, [\w./-]+:\d+$", re.MULTILINE)


def server_error(where: str, fields: Mapping[str, str]) -> SourceError:
    """Return the error for the fields of an ErrorResponse of the server."""
    code = fields.get("C") or "XX000"
    definite = code in DEFINITE or (code[:2] in DEFINITE and code not in TRANSIENT)
    kind = DefiniteError if definite else TransientError
    message = fields.get("M", "").strip().rstrip(".") or "no message"
    error = kind(
        f"{where} reported: {message}",
        detail=f"{to_sentence(fields.get('D', ''))} The SQLSTATE is {code}.".strip(),
        hint=to_sentence(fields.get("H", "")) or HINTS.get(code, ""),
    )
    _set_sqlstate(error, code)
    return error


def error_fields(result: pq.abc.PGresult) -> dict[str, str]:
    """Return the error fields of a result, by the letters of ErrorResponse."""
    return {
        letter: (result.error_field(field) or b"").decode(errors="replace")
        for letter, field in _FIELDS.items()
    }


def connection_error(message: str, libpq_message: str, *, sqlstate: str = "") -> TransientError:
    """Return the error for a failed or lost connection.

    `libpq_message` is a redacted message of any verbosity. The error has its last SQLSTATE, or
    `sqlstate` if that is given.
    """
    # libpq has no function for the SQLSTATE of a failed connection. Its verbose message contains
    # the code, in the same form for every language: "FATAL:  28P01: password …".
    codes = _SQLSTATE.findall(libpq_message)
    text = _SQLSTATE.sub(":  ", _LOCATION.sub("", libpq_message.strip()))
    error = TransientError(
        message,
        detail=to_sentence(text),
        hint="Check host, port, database, user and password. Running tasks retry.",
    )
    if code := sqlstate or (codes[-1] if codes else ""):
        _set_sqlstate(error, code)
    return error


def to_sentence(text: str) -> str:
    """Return `text` on one line, with a capital and a final period; empty if it is empty."""
    text = " ".join(text.split())
    return f"{text[0].upper()}{text[1:].rstrip('.')}." if text else ""


def _set_sqlstate(error: SourceError, code: str) -> None:
    # `sqlstate` of the class is a default; the instance has the code of the server.
    error.__dict__["sqlstate"] = code
