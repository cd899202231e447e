"""Prepared records: what their columns are called, besides those of the collection.

A record is prepared where it is read, and finished where it meets the others of its key. In
between it is a row with the columns of its collection and with these. No column of a record
has such a name.
"""

from typing import Final

__all__ = [
    "AGAIN",
    "AGE",
    "BAD",
    "GONE",
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
"""The place and the time of the record."""

KEY: Final = "\0key"
VALUE: Final = "\0value"
REASON: Final = "\0reason"
"""Why the record cannot be taken, and its bytes; null of any other."""

GONE: Final = "\0gone"
"""Whether the row of this key is gone."""

ORIGIN: Final = "\0origin"
AGE: Final = "\0age"
HAPPENED_MS: Final = "\0happened_ms"
POSITION: Final = "\0position"
"""In which database's log the event stands, and how far that had come; nulls if it does not say."""

AGAIN: Final = "\0again"
"""Whether the event was sent before."""

TRANSACTION: Final = "\0transaction"
TOTAL_ORDER: Final = "\0total_order"
ORDER: Final = "\0order"
"""The transaction that the event waits for, its place among all events of that, and among
those of the topic; only where transactions count."""

BAD: Final = (TOPIC, PARTITION, OFFSET, TIMESTAMP, KEY, VALUE, REASON)
"""What is kept of a record that cannot be taken."""
