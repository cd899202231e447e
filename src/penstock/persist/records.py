"""What is kept of a collection: its batches, its schema versions, its errors. Pure values.

A collection is a bag of batches and two times:

            since                    upper
    ──────────┼────────────────────────┼──────────────► time
              │ readable, definite     │ written, not yet sealed

A write that is not sealed is an ordinary batch whose times lie at or past
upper; readers look only at times below it. So `seal` moves one number, and
there is no second place to look.

Where its contents are not known, an *error span* says so: every reading that
meets the span fails with the error that is kept in it.

These are msgspec structs because they are exactly what the bytes hold;
`encoding.py` frames them.
"""

from functools import lru_cache
from typing import Final

import pyarrow as pa
from msgspec import Struct

from penstock.data import stored_schema
from penstock.data.collection_name import without_quoted
from penstock.durable.process import ProcessIdentity
from penstock.errors import PenstockError

__all__ = [
    "END",
    "Batch",
    "CollectionState",
    "ErrorSpan",
    "Inline",
    "Part",
    "SchemaVersion",
    "Stored",
    "StoredError",
    "Writer",
    "columns_of",
    "files_of",
    "is_hidden",
    "schema_as_of",
    "staging_of",
    "stored_columns_of",
    "types_of",
]

END: Final = 2**63 - 1
"""After all times. An upper of END closes a collection; a since of END gives up its history."""


class Inline(Struct, frozen=True, tag="inline"):
    """Rows that travel inside the log: one Arrow IPC record-batch message."""

    rows: bytes


class Stored(Struct, frozen=True, tag="stored"):
    """Rows in a Parquet object."""

    key: str
    size: int
    checksum: int
    """XXH64, seed 0, of the whole object."""

    footer: int
    """Bytes of the Parquet footer, from its first to the end of the object."""

    footer_checksum: int
    """XXH64, seed 0, of the footer, for readers that check pages by their own checksums."""


Part = Inline | Stored


class Batch(Struct, frozen=True, omit_defaults=True):
    """Updates that were written, or merged, together."""

    schema: int
    """Which of the collection's schema versions the parts have."""

    lower: int
    """The least time among the updates."""

    upper: int
    """The greatest time among the updates, plus one."""

    rows: int
    size: int
    """Bytes of the parts at rest."""

    parts: tuple[Part, ...]
    memory: int = 0
    """Bytes of the rows as Arrow has them in memory."""

    since: int = 0
    """Times below it have been advanced to it."""

    until: int = END
    """Updates at or past it were discarded and do not count."""

    merged: bool = False
    """Sorted and consolidated, by a merge."""

    distinct: bool = False
    """Of a merge: its rows at `since` are there once each, and no two have the same key."""

    id: int = 0
    """Unique in the location; given when the batch is linked."""


class SchemaVersion(Struct, frozen=True, omit_defaults=True):
    """One version of what a collection's rows are."""

    version: int
    since: int
    """The first time whose readers see this version."""

    columns: bytes
    """The user's columns, as an Arrow IPC schema message."""

    key: tuple[str, ...] = ()
    defaults: bytes = b""
    """An Arrow IPC stream of one row: what older rows hold in columns added here."""

    codecs: tuple[tuple[str, int], ...] = ()
    """Name and version of the key's and the value's codec; empty for rows."""


class Writer(Struct, frozen=True, omit_defaults=True):
    """Who holds the writer's lock, for people and for notifications."""

    id: str
    host: str = ""
    pid: int = 0
    taken_ms: int = 0
    address: str = ""
    """Where the writer tells readers of new entries, as host:port."""

    start: int = 0
    boot: str = ""
    machine: str = ""
    """The rest of its `ProcessIdentity`, by which processes of the same host know it."""

    @property
    def process(self) -> ProcessIdentity:
        """The process that holds the lock."""
        return ProcessIdentity(self.pid, self.start, self.boot, self.machine)


class StoredError(Struct, frozen=True, omit_defaults=True):
    """An error about the data, as it is kept: what happened, what is known, what to do."""

    kind: str
    """The class of the error."""

    message: str
    detail: str = ""
    hint: str = ""

    @staticmethod
    def of(error: PenstockError) -> "StoredError":
        """What is kept of `error`."""
        return StoredError(type(error).__name__, str(error), error.detail, error.hint)


class ErrorSpan(Struct, frozen=True, omit_defaults=True):
    """Times as of which a collection cannot be read, and why."""

    lower: int
    error: StoredError
    upper: int = END
    """END while it lasts."""


class CollectionState(Struct, frozen=True, omit_defaults=True):
    """One named collection."""

    id: int
    name: str
    schemas: tuple[SchemaVersion, ...]
    owner: str = ""
    """Who alone writes it, such as a source; empty if it is the user's own."""

    since: int = 0
    upper: int = 0
    allowed: int = 0
    """How far the writer allowed since to go; holds may keep it behind."""

    intended: int | None = None
    """Where since is about to go: announced, and not yet settled."""

    batches: tuple[Batch, ...] = ()
    begins: int = 0
    """The first time of its history; before it there was nothing to read."""

    errors: tuple[ErrorSpan, ...] = ()
    """In order, and apart from each other; only the last may still last."""

    predecessors: tuple[int, ...] = ()
    """Ids of the collections that had this name before, oldest first; some may be destroyed."""

    successor: int = 0
    """Id of the collection that has the name from `upper` on; 0 while this one has it."""

    @property
    def whole(self) -> bool:
        """Whether nothing of its history has been given up."""
        return self.since == self.begins

    @property
    def first_exact_time(self) -> int:
        """From which time on updates have the times they were written at."""
        return self.since + 1 if self.since else 0


def schema_as_of(collection: CollectionState, as_of: int) -> SchemaVersion:
    """The version that readers as of a time see.

    Keys and values always come through the newest codecs; only the columns of
    rows are part of what was promised as of a time.
    """
    if collection.schemas[-1].codecs:
        return collection.schemas[-1]
    seen = collection.schemas[0]
    for version in collection.schemas:
        if version.since <= as_of:
            seen = version
    return seen


def is_hidden(name: str) -> bool:
    """Return whether a collection belongs to a task's own state and is left out of listings."""
    return "/" in without_quoted(name)


def files_of(batch: Batch) -> list[str]:
    """The objects that hold a batch's rows."""
    return [part.key for part in batch.parts if isinstance(part, Stored)]


def staging_of(key: str) -> str:
    """The staging id under which a file was written."""
    return key.split("/")[1]


@lru_cache(maxsize=4096)
def columns_of(schema: SchemaVersion) -> pa.Schema:
    """The user's columns of a schema version."""
    return pa.ipc.read_schema(pa.py_buffer(schema.columns))


@lru_cache(maxsize=4096)
def types_of(schema: SchemaVersion) -> tuple[pa.DataType, ...]:
    """The types of those columns and of time and diff; Arrow takes its time to tell them."""
    return tuple(stored_columns_of(schema).types)


@lru_cache(maxsize=4096)
def stored_columns_of(schema: SchemaVersion) -> pa.Schema:
    """The columns of a schema version as they are in a batch."""
    return stored_schema(columns_of(schema))
