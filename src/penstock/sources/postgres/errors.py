"""Errors of a Postgres source.

    SourceError
    └── NotReady            a prerequisite is missing    → apply the statements of the detail
    DefiniteError
    ├── SlotLost            no slot                      → resync
    ├── SlotInvalidated     WAL was removed              → change the setting, then resync
    ├── SlotPassed          another reader               → find the reader, then resync
    ├── PublicationMissing  no publication               → create it again, then resync
    ├── TableMissing        dropped, or not published    → remove it, or restore it and resync
    ├── TableUntrackable    no collection can hold it    → follow the hint; no restart is needed
    ├── SchemaChanged       incompatible change          → resync, or undo the change
    └── OtherHistory        another server               → correct the address; see the hint
        └── HistoryRewound  restored or promoted         → resync
    ComparisonFailed
    └── ComparisonRaced     altered at each attempt      → resync when no such statement runs
    UsageError
    └── SlotForeign         a slot of others             → drop it if it has no reader
    TransientError
    └── SlotBusy            another connection           → end that server process, or wait

Each class here is an error that a caller handles differently from its parent class. `pgclient` has
the errors of a connection.
"""

from collections.abc import Sequence

from penstock.errors import DefiniteError, Problem, SourceError, TransientError, UsageError
from penstock.sources.postgres.lsn import Lsn
from penstock.sources.postgres.names import TableName
from penstock.sources.source import ComparisonFailed

__all__ = [
    "ComparisonRaced",
    "HistoryRewound",
    "NotReady",
    "OtherHistory",
    "PublicationMissing",
    "SchemaChanged",
    "SlotBusy",
    "SlotForeign",
    "SlotInvalidated",
    "SlotLost",
    "SlotPassed",
    "TableMissing",
    "TableUntrackable",
    "resync_command",
]


class NotReady(SourceError):
    """Server without a prerequisite, until an administrator acts."""

    sqlstate = "55000"

    def __init__(self, *, where: str, problems: Sequence[Problem]) -> None:
        first, *others = problems
        more = f", and {len(others)} more" if others else ""
        super().__init__(
            f"{where} is not ready: {first.message}{more}",
            detail=first.detail,
            hint="" if others else first.hint,
            problems=problems,
        )


class SlotLost(DefiniteError):
    """Missing replication slot. The changes it retained are lost."""

    sqlstate = "42704"

    def __init__(self, *, location: str, source: str, slot: str, resume_from: Lsn) -> None:
        super().__init__(
            f'replication slot "{slot}" of postgres source "{source}" does not exist',
            detail=f"The slot retained changes from {resume_from} on, which are lost.",
            hint=f"To compare the tables and continue from a new slot, run: "
            f"{resync_command(location, source)}",
        )


class SlotInvalidated(DefiniteError):
    """Replication slot that the server invalidated, with the loss of changes it retained."""

    sqlstate = "55000"

    def __init__(
        self, *, location: str, source: str, slot: str, reason: str, resume_from: Lsn
    ) -> None:
        remedy = _REMEDIES.get(reason, "")
        super().__init__(
            f'replication slot "{slot}" of postgres source "{source}" was invalidated',
            detail=f"The server's reason is {reason}. Changes from {resume_from} on are lost.",
            hint=f"{remedy}To compare the tables and continue from a new slot, run: "
            f"{resync_command(location, source)}",
        )


class SlotPassed(DefiniteError):
    """Slot with a confirmed position beyond the stored changes: another reader consumed it."""

    sqlstate = "55000"

    def __init__(
        self, *, location: str, source: str, slot: str, confirmed: Lsn, resume_from: Lsn
    ) -> None:
        super().__init__(
            f'replication slot "{slot}" of postgres source "{source}" was read by another client',
            detail=f"The confirmed position of the slot is {confirmed}, and changes are stored up "
            f"to {resume_from}. The changes in between were sent to another reader.",
            hint=f"Find the other reader, then run: {resync_command(location, source)}",
        )


class SlotForeign(UsageError):
    """Slot that Penstock did not create, and therefore does not touch."""

    sqlstate = "42501"

    def __init__(self, *, slot: str, nonce: str) -> None:
        super().__init__(
            f'replication slot "{slot}" does not belong to this source',
            detail=f'The name of the slot of this source ends in "_{nonce}".',
            hint="If the slot has no reader, drop it with: "
            f"SELECT pg_drop_replication_slot('{slot}');",
        )


class SlotBusy(TransientError):
    """Slot that another connection is reading."""

    sqlstate = "55006"

    def __init__(self, *, slot: str, pid: int) -> None:
        super().__init__(
            f'replication slot "{slot}" is in use by server process {pid}',
            hint=f"To end that process, run: SELECT pg_terminate_backend({pid});",
        )


class PublicationMissing(DefiniteError):
    """Missing publication. The stream cannot continue."""

    sqlstate = "42704"

    def __init__(self, *, location: str, source: str, publication: str, statement: str) -> None:
        super().__init__(
            f'publication "{publication}" of postgres source "{source}" does not exist',
            detail="Changes made without the publication cannot be read from the slot, even after "
            "it is created again.",
            hint=f"Create it with: {statement} Then run: {resync_command(location, source)}",
        )


class TableMissing(DefiniteError):
    """Table that was dropped, or is no longer published."""

    sqlstate = "42P01"

    def __init__(
        self, *, location: str, source: str, table: TableName, publication: str, dropped: bool
    ) -> None:
        if dropped:
            super().__init__(
                f'table {table} of postgres source "{source}" was dropped',
                detail="A table created under the same name is another table.",
                hint="To remove it from the source, remove it from tables in the file. To track "
                "it again, restore it or create one of that name. Unless the publication is FOR "
                f"ALL TABLES, run: ALTER PUBLICATION {publication} ADD TABLE {table}; Then run: "
                f"{resync_command(location, source, table)}",
            )
        else:
            super().__init__(
                f'table {table} of postgres source "{source}" was removed from '
                f'publication "{publication}"',
                hint=f"Add it again with: ALTER PUBLICATION {publication} ADD TABLE {table}; "
                f"Then run: {resync_command(location, source, table)}",
            )


class TableUntrackable(DefiniteError):
    """Table that no collection can hold, because of its name or its columns."""

    sqlstate = "0A000"

    def __init__(self, *, source: str, table: TableName, cause: UsageError) -> None:
        # The name may contain control characters, and the message is one line.
        name = str(table).encode("unicode_escape").decode()
        super().__init__(
            f'table {name} of postgres source "{source}" cannot be tracked',
            detail=f"Its collection cannot be created: {cause}. {cause.detail}".rstrip(),
            hint=f"{cause.hint} The table is tracked as soon as that is done. To omit it, "
            "list the other tables under tables in the file.",
        )


class SchemaChanged(DefiniteError):
    """Change of a table that its collection cannot adopt without an explicit request."""

    sqlstate = "42804"

    def __init__(
        self,
        *,
        location: str,
        source: str,
        table: TableName,
        reason: str,
        accepted: str | None = "",
        replaceable: bool = False,
    ) -> None:
        """Create the error; `accepted` explains the new form, None if it cannot be adopted.

        With `replaceable`, a resync reads the table into a new collection.
        """
        command = resync_command(location, source, table)
        super().__init__(
            f'table {table} of postgres source "{source}" has changed: {reason}',
            detail=accepted or "",
            hint=f"To read a new snapshot in its new form, run: {command}"
            if replaceable
            else f"Undo the change on the server, then run: {command}"
            if accepted is None
            else f"To compare it and continue in its new form, run: {command}",
        )


class ComparisonRaced(ComparisonFailed):
    """Comparison that failed because the table was altered or rewritten in every attempt."""

    sqlstate = "40001"

    def __init__(self, *, location: str, source: str, table: TableName, attempts: int) -> None:
        super().__init__(
            f'table {table} of postgres source "{source}" could not be compared: it was altered '
            f"during each of {attempts} attempts",
            detail="A statement such as ALTER TABLE or TRUNCATE ran while the table was read. The "
            "comparison then has no single state to compare with.",
            hint=f"When no such statement runs, run: {resync_command(location, source, table)}",
        )


class OtherHistory(DefiniteError):
    """Server whose history does not contain the stored changes."""

    sqlstate = "55000"

    def __init__(self, *, location: str, source: str, reason: str) -> None:
        super().__init__(
            f'postgres source "{source}" is connected to a server with another history',
            detail=reason,
            hint=f"If the server is the right one, run: {resync_command(location, source)}",
        )


class HistoryRewound(OtherHistory):
    """The history of the known server was rewound: it was restored, or a standby was promoted."""


def resync_command(location: str, source: str, *tables: TableName) -> str:
    """Return the command that compares tables with upstream and repairs the differences."""
    return " ".join(["penstock resync", location, source, *(f"'{table}'" for table in tables)])


_REMEDIES = {
    "wal_removed": "Raise max_slot_wal_keep_size of the server, or keep the source running. ",
    "wal_level_insufficient": "Set wal_level = logical on the server. ",
    "idle_timeout": "Raise idle_replication_slot_timeout of the server. ",
}
