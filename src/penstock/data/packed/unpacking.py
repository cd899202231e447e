"""Packed tuples into columns.

Every row has a cursor. A column reads one element from each row and moves the
cursors on. The compiled readers only tell which row they do not take; what is
wrong with it, the plain reader finds out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.data.packed.cells import MOST_BYTES, Cells, packed_cells
from penstock.data.packed.elements import (
    BYTES,
    FLOAT,
    TEXT,
    UUIDS,
    Malformed,
    PackedError,
    kind_of,
    read_element,
    read_row,
)
from penstock.data.packed.reading import (
    read_bools,
    read_doubles,
    read_fixed,
    read_integers,
    read_strings,
)
from penstock.errors import InternalError

__all__ = ["unpack", "unpack_rows"]

_WORD: Final = (1 << 64) - 1
_NO_CODE: Final = -1


def unpack(packed: pa.Array, types: Sequence[pa.DataType]) -> list[pa.Array]:
    """The elements of each tuple, as columns of `types`.

    A null is taken by every type. An integer is also taken by float64 if that
    holds it exactly, because JSON's 1 and 1.0 are one number; no other type
    takes elements of a kind that it is not packed as.

    Raises:
        PackedError: a row has other elements than these.
    """
    readers = [_reader(kind, element) for element, kind in enumerate(types)]
    tuples = _Tuples.of(packed)
    columns = []
    for element, (kind, read) in enumerate(zip(types, readers, strict=True)):
        try:
            columns.append(read(tuples, kind))
        except _Refused as refused:
            raise _explained(tuples.cells[refused.row], refused.row, element, types) from None
    (longer,) = np.nonzero(tuples.cursor != tuples.ends)
    if len(longer):
        row = int(longer[0])
        raise _other_number(len(read_row(tuples.cells[row], _named(row))), row, types)
    return columns


def unpack_rows(packed: pa.Array) -> list[tuple[object, ...]]:
    """Each tuple as `unpack_row` has it.

    Raises:
        PackedError: a row is not a packed tuple.
    """
    cells = packed_cells(packed)
    return [read_row(cells[row], _named(row)) for row in range(len(cells))]


class _Refused(Exception):
    """A row whose element cannot be taken."""

    def __init__(self, row: int) -> None:
        super().__init__(row)
        self.row = row


@dataclass(frozen=True, slots=True)
class _Tuples:
    """Packed tuples, read up to the cursors."""

    cells: Cells
    cursor: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]

    @classmethod
    def of(cls, packed: pa.Array) -> "_Tuples":
        cells = packed_cells(packed)
        return cls(cells, cells.offsets[:-1].copy(), cells.offsets[1:])

    def __len__(self) -> int:
        return len(self.ends)

    def read(self, kernel: Callable[..., int], *args: Any) -> npt.NDArray[np.bool_]:
        """Let `kernel` read an element of each row. False where it is null."""
        present = np.empty(len(self), np.bool_)
        row = kernel(self.cells.data, self.cursor, self.ends, present, *args)
        if row >= 0:
            raise _Refused(int(row))
        return present


_Reader = Callable[[_Tuples, pa.DataType], pa.Array]


def _reader(kind: pa.DataType, element: int) -> _Reader:
    if pa.types.is_null(kind):
        return _nulls
    if pa.types.is_boolean(kind):
        return _bools
    if pa.types.is_integer(kind) or (pa.types.is_decimal128(kind) and kind.scale == 0):
        return _integers
    if pa.types.is_float64(kind):
        return _doubles
    if pa.types.is_float32(kind):
        return _floats
    if isinstance(kind, pa.UuidType):
        return _uuids
    if (
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
    ):
        return _strings
    raise PackedError(
        f"element {element} cannot be unpacked as {kind}, which has no packed form",
        hint="Unpack it as it was packed, and cast the column.",
    )


def _nulls(tuples: _Tuples, kind: pa.DataType) -> pa.Array:
    tuples.read(read_fixed, _NO_CODE, np.empty((len(tuples), 0), np.uint8))
    return pa.nulls(len(tuples), kind)


def _bools(tuples: _Tuples, kind: pa.DataType) -> pa.Array:
    held = np.empty(len(tuples), np.bool_)
    present = tuples.read(read_bools, held)
    return _column(kind, np.packbits(held, bitorder="little"), present)


def _integers(tuples: _Tuples, kind: pa.DataType) -> pa.Array:
    if pa.types.is_decimal128(kind):
        least, most = 1 - 10**kind.precision, 10**kind.precision - 1
    else:
        limits = np.iinfo(kind.to_pandas_dtype())
        least, most = int(limits.min), int(limits.max)
    words = np.empty((len(tuples), 2), np.uint64)
    halves = (np.uint64(part) for whole in (-least, most) for part in (whole >> 64, whole & _WORD))
    present = tuples.read(read_integers, *halves, words)
    if pa.types.is_decimal128(kind):
        return _column(kind, words, present)
    return _column(kind, words[:, 0].astype(kind.to_pandas_dtype()), present)


def _doubles(tuples: _Tuples, kind: pa.DataType) -> pa.Array:
    held = np.empty(len(tuples), np.uint64)
    present = tuples.read(read_doubles, held, held.view(np.float64))
    return _column(kind, held, present)


def _floats(tuples: _Tuples, kind: pa.DataType) -> pa.Array:
    held = np.empty((len(tuples), 4), np.uint8)
    present = tuples.read(read_fixed, FLOAT, held)
    bits = held.view(">u4").astype(np.uint32)
    top = np.uint32(1 << 31)
    return _column(kind, np.where(bits & top, bits ^ top, ~bits), present)


def _uuids(tuples: _Tuples, kind: pa.DataType) -> pa.Array:
    held = np.empty((len(tuples), 16), np.uint8)
    present = tuples.read(read_fixed, UUIDS, held)
    return pa.ExtensionArray.from_storage(kind, _column(kind.storage_type, held, present))


def _strings(tuples: _Tuples, kind: pa.DataType) -> pa.Array:
    """Text or bytes."""
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    large = pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
    held = np.empty(int((tuples.ends - tuples.cursor).sum()), np.uint8)
    offsets = np.empty(len(tuples) + 1, np.int64)
    present = tuples.read(read_strings, TEXT if text else BYTES, held, offsets)
    if offsets[-1] > MOST_BYTES and not large:
        raise PackedError(
            f"{offsets[-1]} bytes are too many for a column of {kind}",
            hint="Unpack fewer rows at once, or unpack as large_string or large_binary.",
        )
    bounds = pa.py_buffer(offsets if large else offsets.astype(np.int32))
    plain = pa.large_binary() if large else pa.binary()
    buffers = [_bitmap(present), bounds, pa.py_buffer(held[: offsets[-1]])]
    column = pa.Array.from_buffers(plain, len(tuples), buffers)
    try:
        return column.cast(kind)
    except pa.ArrowInvalid:
        for row in range(len(column)):
            if not _casts(column.slice(row, 1), kind):
                raise _Refused(row) from None
        raise


def _casts(column: pa.Array, kind: pa.DataType) -> bool:
    try:
        column.cast(kind)
    except pa.ArrowInvalid:
        return False
    return True


def _column(kind: pa.DataType, held: npt.NDArray[Any], present: npt.NDArray[np.bool_]) -> pa.Array:
    data = pa.py_buffer(np.ascontiguousarray(held))
    return pa.Array.from_buffers(kind, len(present), [_bitmap(present), data])


def _bitmap(present: npt.NDArray[np.bool_]) -> pa.Buffer | None:
    return None if present.all() else pa.py_buffer(np.packbits(present, bitorder="little"))


def _explained(data: bytes, row: int, element: int, types: Sequence[pa.DataType]) -> PackedError:
    """What is wrong with an element that a kernel did not take."""
    at, value = 0, None
    for number in range(element + 1):
        if at == len(data):
            return _other_number(number, row, types)
        try:
            value, at = read_element(data, at)
        except Malformed as error:
            return PackedError(
                f"element {number} of {_named(row)} is malformed",
                detail=f"{error.why} at byte {error.at} of {len(data)}.",
                hint="Give the bytes as they were packed, whole.",
            )
    if value is None:
        raise InternalError(f"element {element} of {_named(row)} was not read, and is null")
    return PackedError(
        f"element {element} of {_named(row)} is {kind_of(value)} that {types[element]} cannot hold",
        hint="Unpack with the types that were packed, or use unpack_rows, which needs none.",
    )


def _other_number(number: int, row: int, types: Sequence[pa.DataType]) -> PackedError:
    return PackedError(
        f"{_named(row)} has {number} elements, not {len(types)}",
        hint="Name a type for each element that was packed.",
    )


def _named(row: int) -> str:
    return f"the packed tuple in row {row}"
