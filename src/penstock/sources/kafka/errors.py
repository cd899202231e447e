"""Errors of Kafka topics, each with a hint for the operator."""

from collections.abc import Mapping
from typing import Final

from penstock.errors import DefiniteError, TransientError

__all__ = [
    "BEGIN_AGAIN",
    "BadRecord",
    "NoRecords",
    "NotOfTransaction",
    "OffsetsGone",
    "TopicChanged",
    "TopicMissing",
]

BEGIN_AGAIN: Final = "To follow what is there now, drop the source and let it begin again."


class NoRecords(TransientError):
    """Topic without records yet, whose columns cannot be inferred."""


class TopicMissing(DefiniteError):
    """Topic that does not exist, or that was deleted after it was read."""

    def __init__(self, topic: str, *, known: bool) -> None:
        if known:
            super().__init__(
                f'topic was deleted: "{topic}"',
                detail="What was read of it is kept, and can be read.",
                hint=BEGIN_AGAIN,
            )
        else:
            super().__init__(
                f'topic "{topic}" does not exist',
                hint="Create it, or name another one under topic.",
            )


class TopicChanged(DefiniteError):
    """Topic that was deleted and created again under the same name."""

    def __init__(self, topic: str, *, detail: str) -> None:
        super().__init__(f'topic was recreated: "{topic}"', detail=detail, hint=BEGIN_AGAIN)


class OffsetsGone(DefiniteError):
    """Records that the broker removed before they were read."""

    def __init__(self, topic: str, gone: Mapping[int, tuple[int, int]]) -> None:
        told = ", ".join(
            f"{first} to {upper - 1} of partition {partition}"
            for partition, (first, upper) in sorted(gone.items())
        )
        super().__init__(
            f'records of topic "{topic}" were removed before they were read: offsets {told}',
            detail="The topic keeps its records for less time than nobody read it.",
            hint=f"Give it a longer retention. {BEGIN_AGAIN}",
        )


class BadRecord(DefiniteError):
    """Record that cannot be decoded or that is invalid in its envelope."""

    def __init__(
        self, topic: str, partition: int, offset: int, reason: str, *, others: int
    ) -> None:
        more = f" There are {others} more in the same range." if others else ""
        super().__init__(
            f'record at offset {offset} of partition {partition} of topic "{topic}" cannot be '
            f"taken: {reason}",
            detail=f"Nothing at or after it was taken.{more}",
            hint="Mend what sends such records and begin after them with a new source, or take "
            "the others and keep such ones apart: on_bad_record: set_aside.",
        )


class NotOfTransaction(DefiniteError):
    """Event of a transaction whose END does not count events of the event's topic."""

    def __init__(self, topic: str, transaction: str) -> None:
        super().__init__(
            f'topic "{topic}" has events of transaction "{transaction}", whose END does not '
            "count them",
            detail="No data collection that the END names is that of the topic, as far as its "
            "name tells.",
            hint=f"Say which it is: topics: {{{topic}: SCHEMA.TABLE}}",
        )
