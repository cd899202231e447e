"""Whether a server is the one we know, and its history holds what we hold.

A connection may lead elsewhere than the one before: to a standby that was
promoted and has lost the last transactions, to a copy restored from a backup,
to another server altogether. A position in the log means nothing there. So
every connection, the probe's too, is compared with what was stored (hazard B5):

    system id     another            another server
    timeline      the same           fine, unless the log ends below what we hold
                  a descendant       fine, if it left ours at or past what we hold
                  anything else      what we hold is not in its history

A restore of a volume on the same timeline that has since been written past our
position cannot be seen here; that the last transaction comes again as it was
can (see the tail).
"""

from dataclasses import dataclass
from typing import TypeAlias

from penstock.errors import SourceError
from penstock.sources.postgres.connect import Connection
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
    "history_of",
    "identify",
    "judge",
    "less_page_header",
    "parse_history",
    "probe",
]


@dataclass(frozen=True, slots=True)
class Fork:
    """Where a timeline was left for the next one."""

    timeline: int
    at: Lsn


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a server says it is."""

    system_id: int
    timeline: int
    xlogpos: Lsn
    """How far its log is flushed."""

    database: str | None = None
    history: tuple[Fork, ...] = ()
    """Where each earlier timeline of its history was left."""


@dataclass(frozen=True, slots=True)
class Same:
    """The server we know, on the timeline we know."""


@dataclass(frozen=True, slots=True)
class ForkedAfter:
    """The server we know, on a timeline that shares all we hold. From now on it is ours."""

    timeline: int
    at: Lsn


@dataclass(frozen=True, slots=True)
class ForkedBefore:
    """A timeline that lacks some of what we hold. Only a resync helps."""

    timeline: int
    at: Lsn | None
    """Where it left ours; None if it never was on ours."""

    durable: Lsn

    def __str__(self) -> str:
        if self.at is None:
            return (
                f"The server is on timeline {self.timeline}, whose history does not hold the "
                f"timeline from which changes up to {self.durable} are stored."
            )
        return (
            f"The server's timeline {self.timeline} began at {self.at}, and changes up to "
            f"{self.durable} of the timeline before are stored; those past {self.at} never "
            "happened there."
        )


@dataclass(frozen=True, slots=True)
class OtherServer:
    """Another server altogether."""

    expected: int
    found: int

    def __str__(self) -> str:
        return f"The server's system identifier is {self.found}, and was {self.expected}."


@dataclass(frozen=True, slots=True)
class Behind:
    """The server we know, with less log than we hold: it was restored to an earlier state."""

    at: Lsn
    durable: Lsn

    def __str__(self) -> str:
        return (
            f"The server's log ends at {self.at}, and changes up to {self.durable} are stored; it "
            "was set back to an earlier state."
        )


Verdict: TypeAlias = Same | ForkedAfter | ForkedBefore | OtherServer | Behind


def identify(replication: Connection) -> Identity:
    """Ask a replication connection who is there, with the history of its timeline."""
    system, timeline, position, database = replication.query("IDENTIFY_SYSTEM")[0]
    return Identity(
        int(system or 0),
        int(timeline or 0),
        Lsn.parse(position or ""),
        database,
        history_of(replication, int(timeline or 0)),
    )


def history_of(replication: Connection, timeline: int) -> tuple[Fork, ...]:
    """Where the timelines before `timeline` were left."""
    if timeline == 1:
        return ()  # There is no file for it.
    try:
        _, content = replication.query(f"TIMELINE_HISTORY {timeline}")[0]
    except SourceError:
        if replication.closed:
            raise
        return ()  # The file was removed; then nothing is known to be shared.
    return parse_history(content or "")


def parse_history(content: str) -> tuple[Fork, ...]:
    """Read a timeline history file: a timeline, where it was left, and why, on each line."""
    forks = []
    for line in content.splitlines():
        words = line.split("#", 1)[0].split(None, 2)
        if len(words) >= 2:
            forks.append(Fork(int(words[0]), Lsn.parse(words[1])))
    return tuple(forks)


def judge(stored: Identity, found: Identity, durable: Lsn) -> Verdict:
    """Whether `found` has in its history all that committed below `durable` on `stored`."""
    if found.system_id != stored.system_id:
        return OtherServer(stored.system_id, found.system_id)
    if found.timeline == stored.timeline:
        return Behind(found.xlogpos, durable) if found.xlogpos < durable else Same()
    left = next((fork.at for fork in found.history if fork.timeline == stored.timeline), None)
    if left is None or left < durable:
        return ForkedBefore(found.timeline, left, durable)
    if found.xlogpos < durable:
        return Behind(found.xlogpos, durable)
    return ForkedAfter(found.timeline, left)


@dataclass(frozen=True, slots=True)
class Probe:
    """How far a server has come."""

    insert_lsn: Lsn
    """Everything that was visible to SQL before the probe committed below this."""

    flush_lsn: Lsn
    now_ms: int
    """The server's clock."""

    system_id: int
    timeline: int
    """0 on a standby, which has none of its own."""

    standby: bool

    @property
    def identity(self) -> Identity:
        """Who answered. Without a history, another timeline than before is for `identify`."""
        return Identity(self.system_id, self.timeline, self.flush_lsn)


def probe(connection: Connection) -> Probe:
    """How far the server has come, in one question on a plain connection.

    An asynchronous commit can be seen before it is flushed, so it is the
    position of insertion that bounds what could be seen (hazard B7).
    """
    # The control file knows the timeline of the last checkpoint, which after a
    # promotion is not yet the new one; the name of the current file does.
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
        insert_lsn=less_page_header(
            Lsn.parse(insert), segment_bytes=int(segment), page_bytes=int(page)
        ),
        flush_lsn=Lsn.parse(flush),
        now_ms=int(now),
        # The server counts it without a sign, and SQL has no such number.
        system_id=int(system) % 2**64,
        timeline=int(timeline, 16),
        standby=standby == "t",
    )


def less_page_header(lsn: Lsn, *, segment_bytes: int, page_bytes: int) -> Lsn:
    """`lsn`, or where its page begins if there is only the page's header between the two.

    The next record starts after the header, which is not written before the
    record is: on an idle server nothing would ever reach it.
    """
    at = lsn.position
    if at % segment_bytes == FIRST_HEADER:
        return Lsn(at - FIRST_HEADER)
    if at % page_bytes == HEADER:
        return Lsn(at - HEADER)
    return lsn


HEADER = 24
"""Bytes of the header of a page of the log."""

FIRST_HEADER = 40
"""Bytes of the header of the first page of a file of the log."""
