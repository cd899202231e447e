"""Arrays, stored as their elements in order and, if it is not the default, their shape.

    {1,2}              elements [1, 2]         shape null
    {}                 elements []             shape null
    {{1,2},{3,4}}      elements [1, 2, 3, 4]   shape [1:2][1:2]
    [0:1]={1,2}        elements [1, 2]         shape [0:1]

The server enforces neither dimensions nor bounds: every value has its own. An element is
quoted if its text is empty, is `null` in any letter case, or contains a delimiter, brace,
quote, backslash or space. `NULL` without quotes is null.
"""

import re
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.data.jit import compiled
from penstock.errors import InternalError
from penstock.sources.postgres.types.cells import (
    READ,
    Cells,
    Refused,
    Why,
    accept,
    bits_of,
    strings,
)

__all__ = ["array_of", "parse_arrays", "print_arrays"]

_MALFORMED: Final = int(Why.MALFORMED)
_DEEPEST: Final = 6
"""Maximum number of dimensions; the server's MAXDIM."""


def array_of(element: pa.DataType) -> pa.DataType:
    """Return the Arrow type of a column of arrays."""
    return pa.struct([("elements", pa.list_(element)), ("shape", pa.string())])


def parse_arrays(
    values: pa.Array, kind: pa.DataType, parse: Callable[[pa.Array, pa.DataType], pa.Array]
) -> pa.Array:
    """Parse arrays in the server's text form; `parse` parses the elements."""
    cells = Cells.of(values)
    rows = len(cells)
    room, shaped = _measured(cells.data, cells.offsets, cells.present)
    text = np.empty(int(cells.offsets[-1] - cells.offsets[0]), np.uint8)
    bounds = np.empty(room + 1, np.int64)
    present = np.empty(room, np.bool_)
    lists = np.empty(rows + 1, np.int64)
    shapes = np.zeros((shaped, 2 + 2 * _DEEPEST), np.int64)
    accept(_walk(cells.data, cells.offsets, cells.present, text, bounds, present, lists, shapes))
    count = int(lists[-1])
    present = present[:count]
    bitmap = None if present.all() else pa.py_buffer(np.packbits(present, bitorder="little"))
    inner = kind.field("elements").type.value_type
    try:
        elements = parse(strings(pa.binary(), text, bounds[: count + 1], bitmap), inner)
    except Refused as refused:
        row = int(np.searchsorted(lists, refused.row, side="right")) - 1
        raise Refused(row, refused.why) from None
    listed = pa.Array.from_buffers(
        kind.field("elements").type,
        rows,
        [cells.bitmap, pa.py_buffer(lists.astype(np.int32))],
        children=[elements],
    )
    told: list[str | None] = [None] * rows
    for row, depth, *limits in shapes.tolist():
        if depth:
            told[row] = "".join(f"[{limits[2 * d]}:{limits[2 * d + 1]}]" for d in range(depth))
    shape = pa.array(told, pa.string()) if shaped else pa.nulls(rows, pa.string())
    return pa.Array.from_buffers(kind, rows, [cells.bitmap], children=[listed, shape])


def print_arrays(values: pa.Array, printed: Callable[[pa.Array], pa.Array]) -> pa.Array:
    """Print arrays in the server's text form; `printed` prints the elements."""
    present, bitmap = bits_of(values)
    listed = values.field("elements")
    lists = listed.offsets.to_numpy().astype(np.int64)
    elements = Cells.of(printed(listed.values))
    shapes, which = _shapes(values.field("shape"), present, lists)
    size = int(elements.offsets[-1] - elements.offsets[0])
    room = 2 * size + (3 + 2 * _DEEPEST) * len(elements) + 2 * len(values)
    out = np.empty(room + 44 * _DEEPEST * len(shapes), np.uint8)
    offsets = np.empty(len(values) + 1, np.int64)
    texts = elements.data, elements.offsets, elements.present
    _print(*texts, present, lists, shapes, which, out, offsets)
    return strings(pa.string(), out, offsets, bitmap)


def _shapes(
    printed: pa.Array, present: npt.NDArray[np.bool_], lists: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return dimensions and bounds of each array with a shape, and their index by row."""
    which = np.full(len(printed), -1, np.int64)
    shapes: list[list[int]] = []
    if printed.null_count < len(printed):
        for row, shape in enumerate(printed.to_pylist()):
            if shape is None or not present[row]:
                continue
            limits = [int(limit) for limit in re.findall(r"-?\d+", shape.replace(":", " "))]
            count = int(np.prod(np.diff(np.reshape(limits, (-1, 2)), axis=1) + 1))
            if count != lists[row + 1] - lists[row]:
                raise InternalError(
                    f'an array of shape "{shape}" has {lists[row + 1] - lists[row]} elements'
                )
            which[row] = len(shapes)
            shapes.append([len(limits) // 2, *limits, *[0] * (2 * _DEEPEST - len(limits))])
    return np.array(shapes, np.int64).reshape(-1, 1 + 2 * _DEEPEST), which


@compiled
def _measured(data, offsets, present):  # type: ignore[no-untyped-def]
    """Return an upper bound of the element count, and of the arrays with a shape."""
    elements, shaped = 0, 0
    for i in range(len(present)):
        if not present[i]:
            continue
        at, end = offsets[i], offsets[i + 1]
        elements += 1
        if end - at > 1 and (data[at] == 91 or data[at + 1] == 123):
            shaped += 1
        for k in range(at, end):
            if data[k] == 44:
                elements += 1
    return elements, shaped


@compiled
def _number(data, at, end):  # type: ignore[no-untyped-def]
    """Return a number and its end; the end is -1 if there is no number."""
    negative = at < end and data[at] == 45
    if negative:
        at += 1
    start, value = at, np.int64(0)
    while at < end and at < start + 11 and 48 <= data[at] <= 57:
        value = 10 * value + (np.int64(data[at]) - 48)
        at += 1
    if at == start:
        return 0, -1
    return (-value if negative else value), at


@compiled
def _bounds(data, at, end, limits):  # type: ignore[no-untyped-def]
    """Parse the bounds prefix. Return the dimension count and its end; -1 if malformed."""
    depth = 0
    while at < end and data[at] == 91:
        if depth == _DEEPEST:
            return 0, -1
        low, at = _number(data, at + 1, end)
        if at < 0 or at >= end or data[at] != 58:
            return 0, -1
        high, at = _number(data, at + 1, end)
        if at < 0 or at >= end or data[at] != 93:
            return 0, -1
        at += 1
        limits[2 * depth] = low
        limits[2 * depth + 1] = high
        depth += 1
    if at >= end or data[at] != 61:
        return 0, -1
    return depth, at + 1


@compiled
def _element(data, at, end, text, to):  # type: ignore[no-untyped-def]
    """Copy one element. Return its end (-1 if malformed), the copy's end, and null or not."""
    if data[at] == 34:
        at += 1
        while at < end and data[at] != 34:
            if data[at] == 92:
                at += 1
                if at == end:
                    return -1, to, False
            text[to] = data[at]
            to += 1
            at += 1
        return (at + 1 if at < end else -1), to, False
    start, begin = at, to
    while at < end and data[at] != 44 and data[at] != 125:
        if data[at] == 34 or data[at] == 92 or data[at] == 123:
            return -1, to, False
        text[to] = data[at]
        to += 1
        at += 1
    if at == start:
        return -1, to, False
    if (
        at - start == 4
        and data[start] == 78
        and data[start + 1] == 85
        and data[start + 2] == 76
        and data[start + 3] == 76
    ):
        return at, begin, True
    return at, to, False


@compiled
def _walk(data, offsets, present, text, bounds, filled, lists, shapes):  # type: ignore[no-untyped-def]
    limits = np.zeros(2 * _DEEPEST, np.int64)
    lengths = np.zeros(_DEEPEST + 1, np.int64)
    counts = np.zeros(_DEEPEST + 1, np.int64)
    to, element, shaped = 0, 0, 0
    bounds[0] = 0
    for i in range(len(present)):
        lists[i] = element
        if not present[i]:
            continue
        at, end = offsets[i], offsets[i + 1]
        if end - at < 2:
            return i, _MALFORMED
        if end - at == 2 and data[at] == 123 and data[at + 1] == 125:
            continue
        told = 0
        if data[at] == 91:
            told, at = _bounds(data, at, end, limits)
            if at < 0:
                return i, _MALFORMED
        lengths[:] = -1
        depth, leaves, between = 0, 0, False
        while at < end:
            if not between and data[at] == 123:
                depth += 1
                if depth > _DEEPEST or (leaves and depth > leaves):
                    return i, _MALFORMED
                counts[depth] = 0
                at += 1
            elif not between:
                if depth == 0 or (leaves and depth != leaves):
                    return i, _MALFORMED
                leaves = depth
                at, to, null = _element(data, at, end, text, to)
                if at < 0:
                    return i, _MALFORMED
                filled[element] = not null
                element += 1
                bounds[element] = to
                counts[depth] += 1
                between = True
            elif data[at] == 44:
                at += 1
                between = False
            elif data[at] == 125:
                if lengths[depth] < 0:
                    lengths[depth] = counts[depth]
                elif lengths[depth] != counts[depth]:
                    return i, _MALFORMED
                depth -= 1
                at += 1
                if depth == 0:
                    break
                counts[depth] += 1
            else:
                return i, _MALFORMED
        if at != end or depth != 0 or not between:
            return i, _MALFORMED
        if told and told != leaves:
            return i, _MALFORMED
        if told or leaves > 1:
            shapes[shaped, 0] = i
            shapes[shaped, 1] = leaves
            for d in range(leaves):
                low = limits[2 * d] if told else 1
                high = limits[2 * d + 1] if told else lengths[d + 1]
                if high - low + 1 != lengths[d + 1]:
                    return i, _MALFORMED
                shapes[shaped, 2 + 2 * d] = low
                shapes[shaped, 3 + 2 * d] = high
            shaped += 1
    lists[len(present)] = element
    return READ


@compiled
def _put_number(out, to, number):  # type: ignore[no-untyped-def]
    if number < 0:
        out[to] = 45
        to += 1
        number = -number
    width = 1
    while number >= 10**width:
        width += 1
    for k in range(width - 1, -1, -1):
        out[to + k] = 48 + number % 10
        number //= 10
    return to + width


@compiled
def _put_element(data, at, end, out, to):  # type: ignore[no-untyped-def]
    quoted = at == end or (
        end - at == 4
        and (data[at] | 32) == 110
        and (data[at + 1] | 32) == 117
        and (data[at + 2] | 32) == 108
        and (data[at + 3] | 32) == 108
    )
    for k in range(at, end):
        c = data[k]
        if c == 34 or c == 92 or c == 123 or c == 125 or c == 44 or c == 32 or 9 <= c <= 13:
            quoted = True
            break
    if quoted:
        out[to] = 34
        to += 1
    for k in range(at, end):
        if data[k] == 34 or data[k] == 92:
            out[to] = 92
            to += 1
        out[to] = data[k]
        to += 1
    if quoted:
        out[to] = 34
        to += 1
    return to


@compiled
def _print(data, offsets, filled, present, lists, shapes, which, out, bounds):  # type: ignore[no-untyped-def]
    spans = np.zeros(_DEEPEST, np.int64)
    to = 0
    for i in range(len(present)):
        bounds[i] = to
        if not present[i]:
            continue
        first, count = lists[i], lists[i + 1] - lists[i]
        depth = 1
        spans[0] = count
        if which[i] >= 0:
            shape = shapes[which[i]]
            depth = shape[0]
            plain = True
            span = 1
            for d in range(depth - 1, -1, -1):
                span *= shape[2 + 2 * d] - shape[1 + 2 * d] + 1
                spans[d] = span
                plain = plain and shape[1 + 2 * d] == 1
            if not plain:
                for d in range(depth):
                    out[to] = 91
                    to = _put_number(out, to + 1, shape[1 + 2 * d])
                    out[to] = 58
                    to = _put_number(out, to + 1, shape[2 + 2 * d])
                    out[to] = 93
                    to += 1
                out[to] = 61
                to += 1
        if count == 0:
            out[to] = 123
            out[to + 1] = 125
            to += 2
            continue
        for k in range(count):
            if k:
                out[to] = 44
                to += 1
            for d in range(depth):
                if k % spans[d] == 0:
                    out[to] = 123
                    to += 1
            at = first + k
            if filled[at]:
                to = _put_element(data, offsets[at], offsets[at + 1], out, to)
            else:
                for each in (78, 85, 76, 76):
                    out[to] = each
                    to += 1
            for d in range(depth):
                if (k + 1) % spans[d] == 0:
                    out[to] = 125
                    to += 1
    bounds[len(present)] = to
