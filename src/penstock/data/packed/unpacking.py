"""Unpacking to Arrow columns.

Every row has a cursor. Each column reads one element from every row and advances the cursors. A
compiled kernel returns only the number of a row that it rejects. The Python reader then finds the
reason.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.data.packed.cells import MOST_BYTES, Cells, packed_cells
from penstock.data.packed.element_kernels import (
    read_bools,
    read_doubles,
    read_fixed,
    read_integers,
    read_strings,
)
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
from penstock.errors import InternalError

__all__ = ["unpack", "unpack_rows"]

_WORD: Final = (1 << 64) - 1
_NO_CODE: Final = -1


def unpack(packed: pa.Array, types: Sequence[pa.DataType]) -> list[pa.Array]:
    """Return the elements of each tuple as columns of `types`.

    Every type accepts null. float64 also accepts an integer that it represents exactly, because
    1 and 1.0 are one number in JSON. Other types accept only elements of their own packed type.

    Raises:
        PackedError: the elements of a row do not have these types.
    """
    readers = [_reader(kind, element) for element, kind in enumerate(types)]
    tuples = _Tuples.of(packed)
    columns = []
    for element, (kind, read) in enumerate(zip(types, readers, strict=True)):
        try:
            columns.append(read(tuples, kind))
        except _RejectedRow as rejected:
            raise _explain_rejection(
                tuples.cells[rejected.row], rejected.row, element, types
            ) from None
    (longer,) = np.nonzero(tuples.cursor != tuples.ends)
    if len(longer):
        row = int(longer[0])
        raise _wrong_count_error(len(read_row(tuples.cells[row], _tuple_name(row))), row, types)
    return columns


def unpack_rows(packed: pa.Array) -> list[tuple[object, ...]]:
    """Return each tuple as `unpack_row` returns it.

    Raises:
        PackedError: a row is not a packed tuple.
    """
    cells = packed_cells(packed)
    return [read_row(cells[row], _tuple_name(row)) for row in range(len(cells))]


class _RejectedRow(Exception):
    """A row with an element that a kernel rejected."""

    def __init__(self, row: int) -> None:
        super().__init__(row)
        self.row = row


@dataclass(frozen=True, slots=True)
class _Tuples:
    """Packed tuples, read up to the cursors of the rows."""

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
        """Read one element of each row with `kernel`, and return a mask of those not null."""
        present = np.empty(len(self), np.bool_)
        row = kernel(self.cells.data, self.cursor, self.ends, present, *args)
        if row >= 0:
            raise _RejectedRow(int(row))
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
        hint="Unpack the element with its packed type, and cast the column.",
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
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    large = pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
    held = np.empty(int((tuples.ends - tuples.cursor).sum()), np.uint8)
    offsets = np.empty(len(tuples) + 1, np.int64)
    present = tuples.read(read_strings, TEXT if text else BYTES, held, offsets)
    if offsets[-1] > MOST_BYTES and not large:
        raise PackedError(
            f"{offsets[-1]} bytes do not fit a column of type {kind}",
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
                raise _RejectedRow(row) from None
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


def _explain_rejection(
    data: bytes, row: int, element: int, types: Sequence[pa.DataType]
) -> PackedError:
    """Return the error for an element that a kernel rejected."""
    at, value = 0, None
    for number in range(element + 1):
        if at == len(data):
            return _wrong_count_error(number, row, types)
        try:
            value, at = read_element(data, at)
        except Malformed as error:
            return PackedError(
                f"element {number} of {_tuple_name(row)} is malformed",
                detail=f"{error.reason} at byte {error.offset} of {len(data)}.",
                hint="Give all bytes of the packed tuple, unchanged.",
            )
    if value is None:
        raise InternalError(f"element {element} of {_tuple_name(row)} is null and was rejected")
    return PackedError(
        f"element {element} of {_tuple_name(row)} is {kind_of(value)}, "
        f"which {types[element]} cannot hold",
        hint="Unpack with the packed types, or use unpack_rows, which needs no types.",
    )


def _wrong_count_error(number: int, row: int, types: Sequence[pa.DataType]) -> PackedError:
    return PackedError(
        f"{_tuple_name(row)} has {number} elements, not {len(types)}",
        hint="Give one type for each packed element.",
    )


def _tuple_name(row: int) -> str:
    return f"the packed tuple in row {row}"
