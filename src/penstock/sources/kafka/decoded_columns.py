"""Names of the internal columns of decoded records.

A record is decoded by the task that reads it, and written by the task that has all records of its
key. Between the two it is a row with the columns of its collection and these columns. The NUL
prefix prevents a conflict with a column of a record.
"""

from typing import Final

__all__ = [
    "AGE",
    "BAD_RECORD",
    "DELETED",
    "DUPLICATE",
    "HAPPENED_MS",
    "KEY",
    "OFFSET",
    "ORDER",
    "ORIGIN",
    "PARTITION",
    "POSITION",
    "REASON",
    "TIMESTAMP",
    "TOPIC",
    "TOTAL_ORDER",
    "TRANSACTION",
    "VALUE",
]

TOPIC: Final = "\0topic"
PARTITION: Final = "\0partition"
OFFSET: Final = "\0offset"
TIMESTAMP: Final = "\0timestamp"
"""Topic, partition, offset and timestamp of the record."""

KEY: Final = "\0key"
VALUE: Final = "\0value"
REASON: Final = "\0reason"
"""Key, value and defect of a bad record; null for any other."""

DELETED: Final = "\0deleted"
"""True if the record deletes the row of its key."""

ORIGIN: Final = "\0origin"
AGE: Final = "\0age"
HAPPENED_MS: Final = "\0happened_ms"
POSITION: Final = "\0position"
"""Log of the event, its age, latest time and highest position up to the event; null if unknown."""

DUPLICATE: Final = "\0duplicate"
"""True if the event is a duplicate."""

TRANSACTION: Final = "\0transaction"
TOTAL_ORDER: Final = "\0total_order"
ORDER: Final = "\0order"
"""Transaction of the event, its order in the transaction, and its order among the events of the
topic. These columns exist only in a source with transaction metadata.
"""

BAD_RECORD: Final = (TOPIC, PARTITION, OFFSET, TIMESTAMP, KEY, VALUE, REASON)
"""Columns of a dead-lettered record."""
