"""Sessions of older streams: how they are called, found and ended.

A stream that was cut off may still hold its locks, and its server need not have
noticed. Its session is known by its name, which is that of its materialization and its
range of keys.
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

__all__ = ["SessionNames", "end_older", "in_the_way", "overlapping"]

log = logger("connectors")


class SessionNames:
    """What the sessions of a materialization are called; Postgres cuts names, so it is hashed."""

    def __init__(self, schema: str, materialization: str) -> None:
        whole = f"{schema}\0{materialization}".encode()
        self.prefix: Final = f"penstock:{xxhash.xxh64_hexdigest(whole)}:"

    def of(self, key_range: KeyRange) -> str:
        """That of the stream of a range of keys."""
        return f"{self.prefix}{key_range}"

    def range_of(self, name: str) -> KeyRange | None:
        """The range of keys of the stream whose session is called so."""
        found = re.fullmatch(r"([0-9a-f]{8})-([0-9a-f]{8})", name.removeprefix(self.prefix))
        return KeyRange(int(found[1], 16), int(found[2], 16)) if found else None


def overlapping(
    session: PostgresSession, names: SessionNames, key_range: KeyRange
) -> list[tuple[int, KeyRange]]:
    """The processes and ranges of other sessions that write some of the same keys."""
    found = session.query(
        "SELECT pid, application_name FROM pg_stat_activity WHERE datname = current_database() "
        "AND pid <> pg_backend_pid() AND starts_with(application_name, ?)",
        [names.prefix],
    )
    ranges = [(pid, names.range_of(name)) for pid, name in found]
    return [(pid, other) for pid, other in ranges if other and other.overlaps(key_range)]


def end_older(session: PostgresSession, names: SessionNames, key_range: KeyRange) -> list[int]:
    """End the sessions that write some of the same keys; those that we may not."""
    left: list[int] = []
    for pid, other in overlapping(session, names, key_range):
        try:
            session.connection.execute("SELECT pg_terminate_backend($1)", [pid])
        except errors.InsufficientPrivilege:
            left.append(pid)
        else:
            log.info(
                "ended the session of an older stream", extra=fields(pid=pid, range=str(other))
            )
    return left


def in_the_way(
    session: PostgresSession, materialization: str, checkpoints: tuple[str, ...], left: list[int]
) -> PenstockError:
    """Who holds what Open waited for."""
    found = session.query(
        "SELECT DISTINCT pid FROM pg_locks "
        "WHERE relation = to_regclass(?) AND granted AND pid <> pg_backend_pid()",
        [PostgresDialect().quoted_path(checkpoints)],
    )
    pids = [pid for (pid,) in found] or left
    shown = ", ".join(map(str, pids)) or "one that we cannot see"
    return PenstockError(
        f'an older session of materialization "{materialization}" holds its fence',
        detail=f"It is process {shown} of the server, which this role could not end.",
        hint="".join(f"SELECT pg_terminate_backend({pid}); " for pid in pids).strip(),
    )
