"""Errors about collections, holds and the writer's lock.

    UsageError
    ├── LockHeld            another writer      → stop that writer, or use --take-over
    ├── Closed              client closed       → open again
    ├── CollectionMissing   no such name        → use a listed name, or create_or_load
    ├── SinceError          below since         → read at since or later
    ├── CollectionReplaced  the name moved      → read as of that time or later
    └── NotYetComplete      at or past upper    → read earlier, or wait for a seal
    DefiniteError
    └── CollectionErrored   a recorded error    → read as of an earlier time; follow the hint
    PenstockError
    ├── AlreadyFailed       not attempted       → resolve the first failure, then repeat both
    └── HoldLost            lease expired       → open again, read from a retained time

Each class has a caller that handles it differently from its parent.
"""

from datetime import UTC, datetime

from penstock.errors import DefiniteError, PenstockError, UsageError
from penstock.persist.records import Writer
from penstock.progress.time import describe_time

__all__ = [
    "AlreadyFailed",
    "Closed",
    "CollectionErrored",
    "CollectionMissing",
    "CollectionReplaced",
    "HoldLost",
    "LockHeld",
    "NotYetComplete",
    "SinceError",
]


class LockHeld(UsageError):
    """Writer's lock held by another process, `error.holder`, that may not be replaced."""

    sqlstate = "55006"

    def __init__(self, held: Writer, *, where: str, writer: str) -> None:
        if held.id == writer:
            super().__init__(
                f'location "{where}" is being written by another process of "{writer}"',
                detail=f"Process {held.pid} of this host runs. It took the lock at "
                f"{format_ms(held.taken_ms)}.",
                hint=f"Stop it: kill {held.pid}. Or replace it: --take-over.",
            )
        else:
            super().__init__(
                f'location "{where}" is being written by "{held.id}"',
                detail=f'"{held.id}" took the lock at {format_ms(held.taken_ms)}, process '
                f'{held.pid} on "{held.host}". "{writer}" may not take it over; only the same id '
                "may.",
                hint=f'Stop that writer, or, if it is dead, run: penstock release "{where}"',
            )
        self.holder = held.id
        self.host = held.host
        self.pid = held.pid


class Closed(UsageError):
    """Call on a closed client."""

    sqlstate = "55000"

    def __init__(self, where: str) -> None:
        super().__init__(
            f'client of location "{where}" is closed',
            hint="Open the location again with penstock.persist.open.",
        )


class CollectionMissing(UsageError):
    """Name to which no collection belongs."""

    sqlstate = "42P01"

    def __init__(self, name: str, *, where: str, known: list[str]) -> None:
        shown = ", ".join(f'"{k}"' for k in known[:20]) or "none"
        super().__init__(
            f'collection "{name}" does not exist in location "{where}"',
            detail=f"Collections there: {shown}.",
            hint="Name one of these. A table's is there once its source has copied it; a"
            " program makes one with create_or_load.",
        )
        self.name = name


class SinceError(UsageError):
    """Read, listener or hold below `error.since`, where history has been compacted.

    The collection begins at `error.begins`.
    """

    sqlstate = "22023"

    def __init__(
        self, name: str, *, as_of: int, since: int, begins: int = 0, lower: int | None = None
    ) -> None:
        """Describe a read of contents as of a time or, with `lower`, of changes from there on."""
        compacted = (
            f"Its since is {describe_time(since)}: earlier contents have been compacted away."
        )
        before = (
            f"It begins at {describe_time(begins)}: there was nothing to read before that time."
        )
        what = f"as of {describe_time(as_of)}"
        hint = f"Read as of {describe_time(since)} or later."
        if lower is not None:
            what = f"from {describe_time(lower)} on"
            hint = f"Read changes from {since + 1} on, after the contents as of {since}."
        super().__init__(
            f'collection "{name}" cannot be read {what}',
            detail=before if as_of < begins else compacted,
            hint=hint if since < 2**63 - 1 else "Its history was given up for good.",
        )
        self.since = since
        self.begins = begins


class CollectionErrored(DefiniteError):
    """Read as of a time that a recorded error of the collection covers.

    The error covers times from `error.since` on, and ends at `error.until`. `error.kind` is the
    class of its cause, `error.reason` the message.
    """

    def __init__(
        self,
        name: str,
        *,
        as_of: int,
        since: int,
        kind: str,
        reason: str,
        detail: str,
        hint: str,
        until: int | None = None,
    ) -> None:
        """Describe an error; `until` is the end of an error that needs no further action."""
        told = f"It has been in error since {describe_time(since)}."
        # The hint is last, because it may end in a command that users copy to the end of
        # the line.
        todo = (
            f"Read as of {describe_time(since - 1)} or earlier. {hint}".strip() if since else hint
        )
        if until is not None:
            told = (
                f"It was in error from {describe_time(since)} on; that ended at "
                f"{describe_time(until)}."
            )
            todo = f"Read as of {describe_time(until)} or later. A listener must start again there."
            if since:
                todo += f" As of {since - 1} or earlier it can be read too."
        super().__init__(
            f'collection "{name}" cannot be read as of {describe_time(as_of)}: {reason}',
            detail=f"{told} {detail}".rstrip(),
            hint=todo.strip(),
        )
        self.collection = name
        self.since = since
        """Start of the error: the first time that cannot be read."""

        self.until = until
        """End of the error: the first time that can be read again; None while it lasts."""

        self.kind = kind
        self.reason = reason


class CollectionReplaced(UsageError):
    """End of a collection whose name refers to another one from `error.at` on."""

    sqlstate = "55000"

    def __init__(self, name: str, *, at: int) -> None:
        super().__init__(
            f'collection "{name}" was replaced at {describe_time(at)}',
            detail="From that time on its name refers to a new collection, whose columns or key "
            "may differ. All changes before it have been delivered.",
            hint=f"Read the contents as of {at} or later, and the changes from there on.",
        )
        self.at = at


class NotYetComplete(UsageError):
    """Read at or past `error.upper`, where more updates may still be written."""

    sqlstate = "22023"

    def __init__(self, name: str, *, as_of: int, upper: int) -> None:
        super().__init__(
            f'collection "{name}" is not complete as of {describe_time(as_of)}',
            detail=f"Its upper is {describe_time(upper)}: only times below it are complete.",
            hint=f"Read as of {describe_time(upper - 1)} or earlier, or wait for a later upper."
            if upper > 0
            else "Wait until the writer seals a first time.",
        )
        self.upper = upper


class AlreadyFailed(PenstockError):
    """Operation that was not attempted because one queued before it failed. Nothing was written."""

    sqlstate = "25P02"

    def __init__(self, name: str) -> None:
        super().__init__(
            f'operation on collection "{name}" was not tried',
            detail="An operation queued before it on the same collection failed. To continue "
            "could have sealed a hole.",
            hint="Resolve the first failure, then repeat both operations.",
        )


class HoldLost(PenstockError):
    """Hold that expired or was taken over; the retained history may have been deleted."""

    sqlstate = "57P05"

    def __init__(self, owner: str, *, where: str, detail: str) -> None:
        super().__init__(
            f'hold of "{owner}" on location "{where}" is lost',
            detail=detail,
            hint="Open the location again and read from a time that is still kept.",
        )


def format_ms(ms: int) -> str:
    """Format milliseconds since the epoch as an ISO 8601 time in UTC."""
    return datetime.fromtimestamp(ms / 1_000, UTC).isoformat(timespec="milliseconds")
