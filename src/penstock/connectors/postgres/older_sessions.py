"""Sessions of older streams: names, search and termination.

A stream whose connection was lost may still hold locks until the server notices. Its session is
found by its name, which contains the materialization and the key range.
"""

import re
from typing import Final

import xxhash
from psycopg import errors

from penstock.connectors.postgres.dialect import PostgresDialect
from penstock.connectors.postgres.session import PostgresSession
from penstock.errors import PenstockError
from penstock.protocol.key_range import KeyRange
from penstock.telemetry import fields, logger

__all__ = ["SessionNames", "end_older", "fence_lock_error", "overlapping"]

log = logger("connectors")


class SessionNames:
    """Session names of a materialization. Postgres truncates names, so they contain a hash."""

    def __init__(self, schema: str, materialization: str) -> None:
        identity = f"{schema}\0{materialization}".encode()
        self.prefix: Final = f"penstock:{xxhash.xxh64_hexdigest(identity)}:"

    def of(self, key_range: KeyRange) -> str:
        """Return the session name of a key range."""
        return f"{self.prefix}{key_range}"

    def range_of(self, name: str) -> KeyRange | None:
        """Parse the key range of a session name; None for other sessions."""
        match = re.fullmatch(r"([0-9a-f]{8})-([0-9a-f]{8})", name.removeprefix(self.prefix))
        return KeyRange(int(match[1], 16), int(match[2], 16)) if match else None


def overlapping(
    session: PostgresSession, names: SessionNames, key_range: KeyRange
) -> list[tuple[int, KeyRange]]:
    """Return pids and key ranges of other sessions with an overlapping key range."""
    rows = session.query(
        "SELECT pid, application_name FROM pg_stat_activity WHERE datname = current_database() "
        "AND pid <> pg_backend_pid() AND starts_with(application_name, ?)",
        [names.prefix],
    )
    ranges = [(pid, names.range_of(name)) for pid, name in rows]
    return [(pid, other) for pid, other in ranges if other and other.overlaps(key_range)]


def end_older(session: PostgresSession, names: SessionNames, key_range: KeyRange) -> list[int]:
    """Terminate overlapping sessions, and return the pids that this role may not terminate."""
    left: list[int] = []
    for pid, other in overlapping(session, names, key_range):
        try:
            session.connection.execute("SELECT pg_terminate_backend($1)", [pid])
        except errors.InsufficientPrivilege:
            left.append(pid)
        else:
            log.info("older session terminated", extra=fields(pid=pid, range=str(other)))
    return left


def fence_lock_error(
    session: PostgresSession, materialization: str, checkpoints: tuple[str, ...], left: list[int]
) -> PenstockError:
    """Return the error that names the sessions with a lock on the fences."""
    rows = session.query(
        "SELECT DISTINCT pid FROM pg_locks "
        "WHERE relation = to_regclass(?) AND granted AND pid <> pg_backend_pid()",
        [PostgresDialect().quoted_path(checkpoints)],
    )
    pids = [pid for (pid,) in rows] or left
    listed = ", ".join(map(str, pids)) or "unknown"
    return PenstockError(
        f'older session of materialization "{materialization}" locks the fence',
        detail=f"This role cannot terminate the session. Its pid on the server: {listed}.",
        hint="".join(f"SELECT pg_terminate_backend({pid}); " for pid in pids).strip(),
    )
