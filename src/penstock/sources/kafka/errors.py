"""Errors of Kafka topics, each with a hint for the operator.

    TransientError
    └── NoRecords       columns cannot be inferred    → send a record, or list the columns
    DefiniteError
    ├── TopicMissing    no such topic                 → create it, or drop the source
    ├── TopicRecreated  another topic id              → recreate the source
    ├── OffsetsRemoved  retention was too short       → increase it, recreate the source
    └── BadRecord       cannot be decoded             → set on_bad_record, or start after it

To recreate a source, drop it and start it again.
"""

from collections.abc import Mapping
from typing import Final

from penstock.errors import DefiniteError, TransientError

__all__ = ["BadRecord", "NoRecords", "OffsetsRemoved", "TopicMissing", "TopicRecreated"]

_RESTART_HINT: Final = "To replicate the current topic, drop the source and start it again."


class NoRecords(TransientError):
    """Topic without records yet, whose columns cannot be inferred."""


class TopicMissing(DefiniteError):
    """Topic that does not exist, or that was deleted after it was read."""

    def __init__(self, topic: str, *, known: bool) -> None:
        if known:
            super().__init__(
                f'topic was deleted: "{topic}"',
                detail="The records that were read remain readable.",
                hint=_RESTART_HINT,
            )
        else:
            super().__init__(
                f'topic "{topic}" does not exist',
                hint="Create the topic, or name another one under topic.",
            )


class TopicRecreated(DefiniteError):
    """Topic that was deleted and created again under the same name."""

    def __init__(self, topic: str, *, detail: str) -> None:
        super().__init__(f'topic was recreated: "{topic}"', detail=detail, hint=_RESTART_HINT)


class OffsetsRemoved(DefiniteError):
    """Records that the broker removed before they were read."""

    def __init__(self, topic: str, removed: Mapping[int, tuple[int, int]]) -> None:
        ranges = ", ".join(
            f"{first} to {upper - 1} of partition {partition}"
            for partition, (first, upper) in sorted(removed.items())
        )
        super().__init__(
            f'records of topic "{topic}" were removed before they were read: offsets {ranges}',
            detail="The source was stopped for longer than the topic retains its records.",
            hint=f"Configure a longer retention. {_RESTART_HINT}",
        )


class BadRecord(DefiniteError):
    """Record that cannot be decoded or that is invalid in its envelope."""

    def __init__(
        self, topic: str, partition: int, offset: int, reason: str, *, others: int
    ) -> None:
        more = f" The same range has {others} more bad records." if others else ""
        super().__init__(
            f'record at offset {offset} of partition {partition} of topic "{topic}" cannot be '
            f"decoded: {reason}",
            detail=f"No record at or after this one was committed.{more}",
            hint="Repair the producer and start a new source after the bad records. Or continue "
            "without them, and dead-letter them: on_bad_record: set_aside.",
        )
