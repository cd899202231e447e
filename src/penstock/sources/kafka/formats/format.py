"""What a format is: bytes of records in, rows out, and a reason for each that is no row.

A format is a value. It can be pickled, gives the same rows for the same bytes
wherever it runs, and its columns are fixed when it is made. So a record that
cannot be read today cannot be read tomorrow, and whoever asked decides what
becomes of it; a format never drops one and never stops at one.
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
    """Its index among the values that were given."""

    reason: str
    """For a person: what is wrong with it. It holds no more than a few characters of the value."""

    def __post_init__(self) -> None:
        if not self.reason.isprintable():  # A column's name may hold any character.
            escaped = (each if each.isprintable() else ascii(each)[1:-1] for each in self.reason)
            object.__setattr__(self, "reason", "".join(escaped))


@dataclass(frozen=True, slots=True)
class Decoded:
    """What became of some values."""

    rows: pa.Table
    """One row for each value, in order; where the value is null or bad, all columns are null."""

    bad: tuple[Bad, ...]
    """In the order of their rows."""


class Format(Protocol):
    """How the bytes of records become columns."""

    @property
    def schema(self) -> pa.Schema:
        """The columns that a record becomes; they never change."""
        ...

    def decode(self, values: pa.ChunkedArray) -> Decoded:
        """Rows of `schema`, from the bytes of records, some of which may be null.

        Raises:
            TransientError: something that is needed could not be had at this moment.
        """
        ...


def chunks_of(values: pa.ChunkedArray | pa.Array) -> Iterable[tuple[int, pa.Array]]:
    """The chunks of a column of bytes, each with the number of its first row."""
    at = 0
    for chunk in values.chunks if isinstance(values, pa.ChunkedArray) else [values]:
        if not pa.types.is_binary(chunk.type):
            if not (pa.types.is_large_binary(chunk.type) or pa.types.is_null(chunk.type)):
                raise UsageError(f"values of {chunk.type} are no bytes", hint="Give binary.")
            chunk = chunk.cast(pa.binary())
        yield at, chunk
        at += len(chunk)


def blanked(columns: Sequence[pa.Array], schema: pa.Schema, bad: Iterable[int]) -> pa.Table:
    """`columns` as rows of `schema`, the rows in `bad` null throughout."""
    rows = sorted(bad)
    if rows and columns:
        good = [True] * len(columns[0])
        for row in rows:
            good[row] = False
        # By take, since if_else knows no maps.
        where = pc.if_else(pa.array(good), pa.array(range(len(good)), pa.int64()), None)
        columns = [column.take(where) for column in columns]
    return pa.table(list(columns), schema=schema)


def shortened(text: str, most: int = 20) -> str:
    """The beginning of `text`, for a message: printable, and never long."""
    cut = text[:most]
    return ascii(cut)[1:-1] + ("…" if len(text) > most else "")
