"""Identity of a server, and a check that its history contains the stored changes.

A connection can reach another server than the previous connection: a promoted standby that lost the
last transactions, a copy restored from a backup, or an unrelated server. A WAL position has no
meaning there. Every connection, including the probe's, is therefore checked against the stored
identity (hazard B5):

    system id     another            another server
    timeline      the same           valid, unless its WAL ends below the stored changes
                  a descendant       valid, if it left the stored one at or past the stored changes
                  anything else      the stored changes are not in its history

This check cannot detect a volume that was restored on the same timeline and has since been written
past the stored position. `stream_reader.py` detects that where the server repeats the last durable
transaction: it must be the same as before.
"""

from dataclasses import dataclass
from typing import TypeAlias

from penstock.errors import SourceError
from penstock.pgclient import Connection
from penstock.sources.postgres.lsn import Lsn

__all__ = [
    "Behind",
    "Fork",
    "ForkedAfter",
    "ForkedBefore",
    "Identity",
    "OtherServer",
    "Probe",
    "Same",
    "Verdict",
    "compare_history",
    "history_of",
    "identify",
    "parse_history",
    "probe",
    "strip_page_header",
]


@dataclass(frozen=True, slots=True)
class Fork:
    """End of a timeline, where the next timeline begins."""

    timeline: int
    at: Lsn


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity that a server reports."""

    system_id: int
    timeline: int
    xlogpos: Lsn
    """Position up to which the WAL is flushed."""

    database: str | None = None
    history: tuple[Fork, ...] = ()
    """Ends of all earlier timelines in the history of the server."""


@dataclass(frozen=True, slots=True)
class Same:
    """Known server, on the known timeline."""


@dataclass(frozen=True, slots=True)
class ForkedAfter:
    """Known server, on a new timeline that contains all stored changes; adopt the timeline."""

    timeline: int
    at: Lsn


@dataclass(frozen=True, slots=True)
class ForkedBefore:
    """Timeline without some of the stored changes; only a resync can repair this."""

    timeline: int
    at: Lsn | None
    """End of our timeline in the server's history; None if the history does not contain it."""

    durable: Lsn

    def __str__(self) -> str:
        if self.at is None:
            return (
                f"Changes up to {self.durable} are stored. The server is on timeline "
                f"{self.timeline}, and its history does not contain the timeline of these changes."
            )
        return (
            f"Timeline {self.timeline} of the server began at {self.at}. Changes up to "
            f"{self.durable} of the previous timeline are stored. The changes after {self.at} are "
            "not in the history of the server."
        )


@dataclass(frozen=True, slots=True)
class OtherServer:
    """Server with another system identifier."""

    expected: int
    actual: int

    def __str__(self) -> str:
        return f"The server's system identifier is {self.actual}, and was {self.expected}."


@dataclass(frozen=True, slots=True)
class Behind:
    """Known server with less WAL than the stored changes: it was restored to an earlier state."""

    at: Lsn
    durable: Lsn

    def __str__(self) -> str:
        return (
            f"The WAL of the server ends at {self.at}. Changes up to {self.durable} are stored. "
            "The server was restored to an earlier state."
        )


Verdict: TypeAlias = Same | ForkedAfter | ForkedBefore | OtherServer | Behind


def identify(replication: Connection) -> Identity:
    """Return the identity of the server and the history of its timeline."""
    system, timeline, position, database = replication.query("IDENTIFY_SYSTEM")[0]
    return Identity(
        int(system or 0),
        int(timeline or 0),
        Lsn.parse(position or ""),
        database,
        history_of(replication, int(timeline or 0)),
    )


def history_of(replication: Connection, timeline: int) -> tuple[Fork, ...]:
    """Return the ends of the timelines before `timeline`."""
    if timeline == 1:
        return ()  # Timeline 1 has no history file.
    try:
        _, content = replication.query(f"TIMELINE_HISTORY {timeline}")[0]
    except SourceError:
        if replication.closed:
            raise
        return ()  # The file was removed, so no shared history is known.
    return parse_history(content or "")


def parse_history(content: str) -> tuple[Fork, ...]:
    """Parse a timeline history file: on each line a timeline, its end, and a reason."""
    forks = []
    for line in content.splitlines():
        words = line.split("#", 1)[0].split(None, 2)
        if len(words) >= 2:
            forks.append(Fork(int(words[0]), Lsn.parse(words[1])))
    return tuple(forks)


def compare_history(stored: Identity, current: Identity, durable: Lsn) -> Verdict:
    """Return whether `current` has all commits of `stored` below `durable`, as a verdict."""
    if current.system_id != stored.system_id:
        return OtherServer(stored.system_id, current.system_id)
    if current.timeline == stored.timeline:
        return Behind(current.xlogpos, durable) if current.xlogpos < durable else Same()
    fork_point = next(
        (fork.at for fork in current.history if fork.timeline == stored.timeline), None
    )
    if fork_point is None or fork_point < durable:
        return ForkedBefore(current.timeline, fork_point, durable)
    if current.xlogpos < durable:
        return Behind(current.xlogpos, durable)
    return ForkedAfter(current.timeline, fork_point)


@dataclass(frozen=True, slots=True)
class Probe:
    """Progress of a server."""

    insert_lsn: Lsn
    """Upper bound: everything visible to SQL before the probe committed below this position."""

    flush_lsn: Lsn
    now_ms: int
    """Time on the server's clock, in milliseconds."""

    system_id: int
    timeline: int
    """Timeline; 0 on a standby, which has no timeline of its own."""

    standby: bool


def probe(connection: Connection) -> Probe:
    """Return the progress of the server, with one query over a plain connection.

    An asynchronous commit is visible before it is flushed. The insert position is therefore the
    upper bound of everything visible (hazard B7).
    """
    # The control file has the timeline of the last checkpoint, which is out of date after a
    # promotion. The name of the current WAL file has the current timeline.
    row = connection.query(
        """
        SELECT r.standby,
          CASE WHEN r.standby THEN pg_catalog.pg_last_wal_replay_lsn()
            ELSE pg_catalog.pg_current_wal_insert_lsn() END,
          CASE WHEN r.standby THEN pg_catalog.pg_last_wal_replay_lsn()
            ELSE pg_catalog.pg_current_wal_flush_lsn() END,
          (extract(epoch FROM pg_catalog.clock_timestamp()) * 1000)::int8,
          (SELECT system_identifier FROM pg_catalog.pg_control_system()),
          CASE WHEN r.standby THEN '0' ELSE substr(
            pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_insert_lsn()), 1, 8) END,
          pg_catalog.pg_size_bytes(pg_catalog.current_setting('wal_segment_size')),
          pg_catalog.current_setting('wal_block_size')
        FROM (SELECT pg_catalog.pg_is_in_recovery() AS standby OFFSET 0) r
        """
    )[0]
    standby, insert, flush, now, system, timeline, segment, page = (text or "" for text in row)
    return Probe(
        insert_lsn=strip_page_header(
            Lsn.parse(insert), segment_bytes=int(segment), page_bytes=int(page)
        ),
        flush_lsn=Lsn.parse(flush),
        now_ms=int(now),
        # The server uses an unsigned number, and SQL returns it as a signed one.
        system_id=int(system) % 2**64,
        timeline=int(timeline, 16),
        standby=standby == "t",
    )


def strip_page_header(lsn: Lsn, *, segment_bytes: int, page_bytes: int) -> Lsn:
    """Return `lsn`, or the start of its page if only the page header lies in between.

    The next record starts after the header, and the header is written only with that record. On an
    idle server, the stream would never reach `lsn`.
    """
    position = lsn.position
    if position % segment_bytes == FIRST_HEADER:
        return Lsn(position - FIRST_HEADER)
    if position % page_bytes == HEADER:
        return Lsn(position - HEADER)
    return lsn


HEADER = 24
"""Size of the header of a WAL page, in bytes."""

FIRST_HEADER = 40
"""Size of the header of the first page of a WAL file, in bytes."""
