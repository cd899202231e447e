"""Format protocol: bytes of records to rows, with a reason for each invalid record.

A format is an immutable value that can be pickled. Its columns are fixed when it is created, and it
returns the same rows for the same bytes on every host. A bad record therefore stays bad, and the
caller decides its handling. A format never drops a record and never stops at one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import UsageError

__all__ = ["Bad", "Decoded", "Format", "blanked", "chunks_of", "shortened"]


@dataclass(frozen=True, slots=True)
class Bad:
    """A record that cannot be decoded."""

    row: int
    """Index of the record among the given values."""

    reason: str
    """Defect of the record, for people. It contains at most a few characters of the value."""

    def __post_init__(self) -> None:
        if not self.reason.isprintable():  # A column name may contain any character.
            escaped = (each if each.isprintable() else ascii(each)[1:-1] for each in self.reason)
            object.__setattr__(self, "reason", "".join(escaped))


@dataclass(frozen=True, slots=True)
class Decoded:
    """Result of decoding several values."""

    rows: pa.Table
    """One row for each value, in order. All columns are null where the value is null or bad."""

    bad: tuple[Bad, ...]
    """Bad records, in the order of their rows."""


class Format(Protocol):
    """Decoder of record bytes into columns."""

    @property
    def schema(self) -> pa.Schema:
        """Columns of a record; they never change."""
        ...

    def decode(self, values: pa.ChunkedArray) -> Decoded:
        """Decode the bytes of records, nulls included, into rows of `schema`.

        Raises:
            TransientError: a required external service could not answer.
        """
        ...


def chunks_of(values: pa.ChunkedArray | pa.Array) -> Iterable[tuple[int, pa.Array]]:
    """Yield the chunks of a binary column, each with the number of its first row."""
    at = 0
    for chunk in values.chunks if isinstance(values, pa.ChunkedArray) else [values]:
        if not pa.types.is_binary(chunk.type):
            if not (pa.types.is_large_binary(chunk.type) or pa.types.is_null(chunk.type)):
                raise UsageError(f"values of {chunk.type} are no bytes", hint="Give binary.")
            chunk = chunk.cast(pa.binary())
        yield at, chunk
        at += len(chunk)


def blanked(columns: Sequence[pa.Array], schema: pa.Schema, bad: Iterable[int]) -> pa.Table:
    """Return `columns` as rows of `schema`, with nulls in all columns of the rows in `bad`."""
    rows = sorted(bad)
    if rows and columns:
        good = [True] * len(columns[0])
        for row in rows:
            good[row] = False
        # By take: if_else does not support maps.
        where = pc.if_else(pa.array(good), pa.array(range(len(good)), pa.int64()), None)
        columns = [column.take(where) for column in columns]
    return pa.table(list(columns), schema=schema)


def shortened(text: str, most: int = 20) -> str:
    """Return the start of `text` for a message, in printable ASCII."""
    cut = text[:most]
    return ascii(cut)[1:-1] + ("…" if len(text) > most else "")
