"""Records of a collection: batches, schema versions and errors. Pure values.

A collection is a bag of batches and two times:

            since                    upper
    ──────────┼────────────────────────┼──────────────► time
              │ readable, definite     │ written, not yet sealed

A write that is not sealed is an ordinary batch with times at or past upper. Readers see
only times below upper. Therefore `seal` changes one number, and unsealed updates need no
second place.

Where the contents are not known, an *error span* covers the times. Every read that meets
the span fails with the error stored in it.

The records are msgspec structs because they are exactly the stored bytes; `encoding.py`
frames them.
"""

from functools import lru_cache
from typing import Final

import pyarrow as pa
from msgspec import Struct

from penstock.data import stored_schema
from penstock.data.collection_name import without_quoted
from penstock.durable import ProcessIdentity
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
"""Bound above all times. An upper of END closes a collection; a since of END drops its history."""


class Inline(Struct, frozen=True, tag="inline"):
    """Rows stored inside the log, as one Arrow IPC record-batch message."""

    rows: bytes


class Stored(Struct, frozen=True, tag="stored"):
    """Rows stored in a Parquet object."""

    key: str
    size: int
    checksum: int
    """XXH64 (seed 0) of the complete object."""

    footer: int
    """Size in bytes from the start of the Parquet footer to the end of the object."""

    footer_checksum: int
    """XXH64 (seed 0) of the footer, for readers that verify pages by the page checksums."""


Part = Inline | Stored


class Batch(Struct, frozen=True, omit_defaults=True):
    """Updates that were written or merged together."""

    schema: int
    """Index of the schema version of the parts."""

    lower: int
    """Lowest time among the updates."""

    upper: int
    """Highest time among the updates, plus one."""

    rows: int
    size: int
    """Size of the stored parts in bytes."""

    parts: tuple[Part, ...]
    memory: int = 0
    """Size of the rows in memory as Arrow, in bytes."""

    since: int = 0
    """Time up to which earlier times have been advanced."""

    until: int = END
    """Bound of discarded updates: updates at or past it do not count."""

    merged: bool = False
    """Flag of a merged batch: its rows are sorted and consolidated."""

    distinct: bool = False
    """Flag of a merged batch: its rows at `since` have multiplicity 1 and distinct keys."""

    id: int = 0
    """Id that is unique in the location, assigned when the batch is linked."""


class SchemaVersion(Struct, frozen=True, omit_defaults=True):
    """One version of the schema of a collection."""

    version: int
    since: int
    """First read time that uses this version."""

    columns: bytes
    """User's columns, as an Arrow IPC schema message."""

    key: tuple[str, ...] = ()
    defaults: bytes = b""
    """Values of older rows in the columns added here, as an Arrow IPC stream of one row."""

    codecs: tuple[tuple[str, int], ...] = ()
    """Name and version of the key codec and the value codec; empty for rows."""


class Writer(Struct, frozen=True, omit_defaults=True):
    """Holder of the writer's lock, for messages and notifications."""

    id: str
    host: str = ""
    pid: int = 0
    taken_ms: int = 0
    address: str = ""
    """Address (host:port) of the notifier that announces new entries to readers."""

    start: int = 0
    boot: str = ""
    machine: str = ""
    """Remaining fields of its `ProcessIdentity`, which processes of the same host compare."""

    @property
    def process(self) -> ProcessIdentity:
        """Process that holds the lock."""
        return ProcessIdentity(self.pid, self.start, self.boot, self.machine)


class StoredError(Struct, frozen=True, omit_defaults=True):
    """Stored form of an error about the data."""

    kind: str
    """Class name of the error."""

    message: str
    detail: str = ""
    hint: str = ""

    @staticmethod
    def of(error: PenstockError) -> "StoredError":
        """Return the stored form of `error`."""
        return StoredError(type(error).__name__, str(error), error.detail, error.hint)


class ErrorSpan(Struct, frozen=True, omit_defaults=True):
    """Interval of times that cannot be read, with the reason."""

    lower: int
    error: StoredError
    upper: int = END
    """Exclusive end of the interval; END while the error lasts."""


class CollectionState(Struct, frozen=True, omit_defaults=True):
    """State of one named collection."""

    id: int
    name: str
    schemas: tuple[SchemaVersion, ...]
    owner: str = ""
    """Name of the only writer, such as a source; empty for a user collection."""

    since: int = 0
    upper: int = 0
    allowed: int = 0
    """Bound up to which the writer allows since to advance; holds may keep since lower."""

    intended: int | None = None
    """Next since, announced and not yet settled; None without an announcement."""

    batches: tuple[Batch, ...] = ()
    begins: int = 0
    """First time of the history; there was nothing to read before it."""

    errors: tuple[ErrorSpan, ...] = ()
    """Disjoint error spans in ascending order; only the last may be open."""

    predecessors: tuple[int, ...] = ()
    """Ids of the collections that had this name before, oldest first; some may be destroyed."""

    successor: int = 0
    """Id of the collection that has the name from `upper` on; 0 while this one has it."""

    @property
    def whole(self) -> bool:
        """Return whether the complete history is retained."""
        return self.since == self.begins

    @property
    def first_exact_time(self) -> int:
        """Lower bound of the times that compaction has not changed."""
        return self.since + 1 if self.since else 0


def schema_as_of(collection: CollectionState, as_of: int) -> SchemaVersion:
    """Return the schema version that readers as of a time see.

    Keys and values always use the newest codecs. Only the columns of rows are part of the
    guarantee as of a time.
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
    """Return the keys of the objects that hold a batch's rows."""
    return [part.key for part in batch.parts if isinstance(part, Stored)]


def staging_of(key: str) -> str:
    """Return the staging id of a file."""
    return key.split("/")[1]


@lru_cache(maxsize=4096)
def columns_of(schema: SchemaVersion) -> pa.Schema:
    """Return the user's columns of a schema version."""
    return pa.ipc.read_schema(pa.py_buffer(schema.columns))


@lru_cache(maxsize=4096)
def types_of(schema: SchemaVersion) -> tuple[pa.DataType, ...]:
    """Return the types of the stored columns, cached because Arrow computes them slowly."""
    return tuple(stored_columns_of(schema).types)


@lru_cache(maxsize=4096)
def stored_columns_of(schema: SchemaVersion) -> pa.Schema:
    """Return the columns of a schema version in stored form, with time and diff."""
    return stored_schema(columns_of(schema))
