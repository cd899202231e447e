"""JSON, walked by compiled code: where in each document the values of columns are.

The walk checks the whole document, what belongs to no column included, and
decides nothing: a document that it does not understand, or whose keys are
written with escapes, is left to `found_plainly`, which reads with Python's own
parser and can say what is wrong. Whatever the walk accepts, that one finds the
same cells in.

Of a key that comes twice the last counts, as with nearly all readers of JSON.
Text must have an encoding in UTF-8, so half a surrogate pair is refused
wherever it stands, and so is what nests deeper than `DEEPEST`.
"""

import json
import re
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from penstock.data.jit import compiled
from penstock.sources.kafka.formats.cells import (
    ARRAY,
    ESCAPED,
    FALSE,
    INTEGER,
    NOTHING,
    NUMBER,
    OBJECT,
    STRING,
    TRUE,
    Cells,
    Records,
    Unfit,
)

__all__ = ["DEEPEST", "Found", "find", "found_plainly", "not_utf8"]

DEEPEST: Final = 200
"""How many arrays and objects may stand in one another."""

Found = list[tuple[int, int, int]]
"""Kind, start and end of each column's value."""

_REFUSED: Final = -1
_WALKED: Final = 0
_LEFT: Final = 1


def find(
    values: pa.Array, names: Sequence[str] | None, *, by_walk: bool = True
) -> tuple[Cells, dict[int, str]]:
    """The cells of the columns `names`, and of each record that has none the reason.

    Without names there is one column, the document. Tests compare both ways by `by_walk`.
    """
    records = Records.of(values)
    cells = Cells.empty(records, 1 if names is None else len(names))
    bad = not_utf8(values)
    status = np.where(records.present, np.uint8(_WALKED), np.uint8(_LEFT))
    status[list(bad)] = _LEFT
    if by_walk and names is None:
        _walk_whole(records.data, records.offsets, status,
                    cells.kinds, cells.starts, cells.ends)  # fmt: skip
    elif by_walk and names is not None:
        encoded = [name.encode() for name in names]
        bounds = np.cumsum([0, *map(len, encoded)])
        _walk(records.data, records.offsets, status,
              np.frombuffer(b"".join(encoded), np.uint8), bounds,
              cells.kinds, cells.starts, cells.ends)  # fmt: skip
    else:
        status[:] = _LEFT
    for row in np.flatnonzero(status & records.present).tolist():
        if row in bad:
            continue
        try:
            found = found_plainly(records[row], names)
        except Unfit as unfit:
            bad[row] = str(unfit)
            continue
        at = int(records.offsets[row])
        cells.put(row, [(kind, at + start, at + end) for kind, start, end in found])
    return cells, bad


def not_utf8(values: pa.Array) -> dict[int, str]:
    """The rows whose bytes are no text, each with where it ends to be."""
    try:
        values.cast(pa.string())
    except pa.ArrowInvalid:
        pass
    else:
        return {}
    bad = {}
    for row, value in enumerate(values.to_pylist()):
        try:
            _ = value is None or value.decode()
        except UnicodeDecodeError as error:
            bad[row] = f"it is not UTF-8, from byte {error.start} on"
    return bad


def found_plainly(document: bytes, names: Sequence[str] | None) -> Found:
    """The cells of one document, which is UTF-8.

    Raises:
        Unfit: it is no such document.
    """
    # One character for each byte, so that places in one are places in the other.
    text = document.decode("latin-1")
    if text.startswith("\xef\xbb\xbf"):
        raise Unfit("it begins with a byte order mark, which JSON does not have")
    if not text.strip(_BLANKS):
        raise Unfit("it is empty")
    start = _past_blanks(text, 0)
    try:
        value, end = _DECODER.raw_decode(text, start)
        if (rest := _past_blanks(text, end)) != len(text):
            raise Unfit(f"something follows the JSON document, at byte {rest}")
    except json.JSONDecodeError as error:
        raise Unfit(f"it is not JSON: {error.msg[:1].lower()}{error.msg[1:]}, at byte {error.pos}")\
            from None  # fmt: skip
    except RecursionError:
        raise _too_deep() from None
    if _deeper(value):
        raise _too_deep()
    if any(half[1] for half in _SURROGATES.finditer(text)):
        raise Unfit("it is not JSON: text holds half of a surrogate pair")
    if names is None:
        return [(_kind(text, start, end), start, end)]
    if text[start] != "{":
        raise Unfit(f"it is {_WHAT[_kind(text, start, end)]}, and not an object with columns")
    members = _members(text, start)
    return [members.get(name, (NOTHING, 0, 0)) for name in names]


def _members(text: str, start: int) -> dict[str, tuple[int, int, int]]:
    """Where the values of an object are; that it is one was checked."""
    found = {}
    at = _past_blanks(text, start + 1)
    while text[at] != "}":
        _, end = _DECODER.raw_decode(text, at)
        name = json.loads(text[at:end].encode("latin-1"))
        at = _past_blanks(text, _past_blanks(text, end) + 1)
        _, end = _DECODER.raw_decode(text, at)
        kind = _kind(text, at, end)
        found[name] = (kind, at, end) if kind != NOTHING else (NOTHING, 0, 0)
        at = _past_blanks(text, end)
        if text[at] == ",":
            at = _past_blanks(text, at + 1)
    return found


def _kind(text: str, start: int, end: int) -> int:
    match text[start]:
        case "{":
            return OBJECT
        case "[":
            return ARRAY
        case '"':
            return ESCAPED if "\\" in text[start:end] else STRING
        case "t":
            return TRUE
        case "f":
            return FALSE
        case "n":
            return NOTHING
        case _:
            return NUMBER if any(c in ".eE" for c in text[start:end]) else INTEGER


def _past_blanks(text: str, at: int) -> int:
    while at < len(text) and text[at] in _BLANKS:
        at += 1
    return at


def _deeper(value: Any) -> bool:
    """Whether it nests too deep."""
    level = [value]
    for _ in range(DEEPEST + 1):
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
        ] + [0 for each in level if isinstance(each, dict | list)]
        if not level:
            return False
    return True


def _too_deep() -> Unfit:
    return Unfit(f"it has more than {DEEPEST} arrays and objects in one another")


def _not_json(constant: str) -> Any:
    raise json.JSONDecodeError(f"{constant} is no number", "", 0)


_BLANKS: Final = " \t\n\r"
_DECODER: Final = json.JSONDecoder(
    # What numbers mean is not asked here, and a number of JSON may have any length.
    parse_int=lambda _: 0,
    parse_float=lambda _: 0,
    parse_constant=_not_json,
)
_SURROGATES: Final = re.compile(
    r"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|(\\u[dD][89a-fA-F]..)|\\.", re.DOTALL
)
"""Escapes, one after the other; those in the group have no other half."""

_WHAT: Final = {
    ARRAY: "an array",
    STRING: "text",
    ESCAPED: "text",
    TRUE: "true",
    FALSE: "false",
    NOTHING: "null",
    NUMBER: "a number",
    INTEGER: "a number",
}


_STOPS: Final = np.array([c < 32 or c in b'"\\' for c in range(256)])
"""Where text is more than a letter: quotes, backslashes, and what may not be there."""


@compiled
def _blanks(data, at, end):  # type: ignore[no-untyped-def]
    """Where something stands, from `at` on."""
    while at < end and (data[at] == 32 or data[at] == 10 or data[at] == 13 or data[at] == 9):
        at += 1
    return at


@compiled
def _hex(data, at, end):  # type: ignore[no-untyped-def]
    """The number of four hexadecimal digits, or -1."""
    if end - at < 4:
        return -1
    number = np.int64(0)
    for i in range(at, at + 4):
        c = np.int64(data[i])
        if 48 <= c <= 57:
            digit = c - 48
        elif 97 <= c <= 102:
            digit = c - 87
        elif 65 <= c <= 70:
            digit = c - 55
        else:
            return -1
        number = 16 * number + digit
    return number


@compiled
def _string(data, at, end):  # type: ignore[no-untyped-def]
    """Where the text that begins with the quote at `at` ends, and whether it has escapes."""
    escaped = False
    at += 1
    while True:
        while at < end and not _STOPS[data[at]]:
            at += 1
        if at >= end:
            return _REFUSED, False
        c = data[at]
        if c == 34:
            return at + 1, escaped
        if c < 32:
            return _REFUSED, False
        escaped = True
        if at + 1 >= end:
            return _REFUSED, False
        c = data[at + 1]
        if c == 117:
            unit = _hex(data, at + 2, end)
            if unit < 0 or 0xDC00 <= unit < 0xE000:
                return _REFUSED, False
            at += 6
            if 0xD800 <= unit < 0xDC00:
                if end - at < 6 or data[at] != 92 or data[at + 1] != 117:
                    return _REFUSED, False
                unit = _hex(data, at + 2, end)
                if unit < 0xDC00 or unit >= 0xE000:
                    return _REFUSED, False
                at += 6
        elif (
            c == 34 or c == 92 or c == 47 or c == 98 or c == 102 or c == 110 or c == 114 or c == 116
        ):
            at += 2
        else:
            return _REFUSED, False


@compiled
def _number(data, at, end):  # type: ignore[no-untyped-def]
    """Where the number at `at` ends, and its kind."""
    if at < end and data[at] == 45:
        at += 1
    if at >= end or data[at] < 48 or data[at] > 57:
        return _REFUSED, NUMBER
    if data[at] == 48:
        at += 1
    else:
        while at < end and 48 <= data[at] <= 57:
            at += 1
    kind = INTEGER
    if at < end and data[at] == 46:
        kind = NUMBER
        at += 1
        if at >= end or data[at] < 48 or data[at] > 57:
            return _REFUSED, NUMBER
        while at < end and 48 <= data[at] <= 57:
            at += 1
    if at < end and (data[at] == 101 or data[at] == 69):
        kind = NUMBER
        at += 1
        if at < end and (data[at] == 43 or data[at] == 45):
            at += 1
        if at >= end or data[at] < 48 or data[at] > 57:
            return _REFUSED, NUMBER
        while at < end and 48 <= data[at] <= 57:
            at += 1
    return at, kind


@compiled
def _word(data, at, end, b, c, d, e):  # type: ignore[no-untyped-def]
    """Where the word at `at` ends, whose letters after the first are given; `e` may be 0."""
    length = 5 if e else 4
    if end - at < length or data[at + 1] != b or data[at + 2] != c or data[at + 3] != d:
        return _REFUSED
    if e and data[at + 4] != e:
        return _REFUSED
    return at + length


@compiled
def _past_key(data, at, end):  # type: ignore[no-untyped-def]
    """Where the value begins whose key begins at `at`."""
    if at >= end or data[at] != 34:
        return _REFUSED
    at, _ = _string(data, at, end)
    if at < 0:
        return _REFUSED
    at = _blanks(data, at, end)
    if at >= end or data[at] != 58:
        return _REFUSED
    return _blanks(data, at + 1, end)


@compiled
def _value(data, at, end, objects, depth):  # type: ignore[no-untyped-def]
    """Where the value at `at` ends, and its kind; `depth` containers are around it.

    `objects` has room for what it nests: which containers are objects.
    """
    outermost = NOTHING
    around = depth
    while True:
        if at >= end:
            return _REFUSED, NOTHING
        c = data[at]
        if c == 34:
            at, escaped = _string(data, at, end)
            kind = ESCAPED if escaped else STRING
        elif c == 123 or c == 91:
            kind = OBJECT if c == 123 else ARRAY
            if depth == around:
                outermost = kind
            depth += 1
            if depth > DEEPEST:
                return _REFUSED, NOTHING
            objects[depth] = c == 123
            at = _blanks(data, at + 1, end)
            if at < end and data[at] == c + 2:
                at += 1
                depth -= 1
            elif c == 123:
                at = _past_key(data, at, end)
                if at < 0:
                    return _REFUSED, NOTHING
                continue
            else:
                continue
        elif c == 116:
            kind = TRUE
            at = _word(data, at, end, 114, 117, 101, 0)
        elif c == 102:
            kind = FALSE
            at = _word(data, at, end, 97, 108, 115, 101)
        elif c == 110:
            kind = NOTHING
            at = _word(data, at, end, 117, 108, 108, 0)
        else:
            at, kind = _number(data, at, end)
        if at < 0:
            return _REFUSED, NOTHING
        if depth == around:
            return at, kind
        while depth > around:
            at = _blanks(data, at, end)
            if at >= end:
                return _REFUSED, NOTHING
            c = data[at]
            if c == 44:
                at = _blanks(data, at + 1, end)
                if objects[depth]:
                    at = _past_key(data, at, end)
                    if at < 0:
                        return _REFUSED, NOTHING
                break
            if c != (125 if objects[depth] else 93):
                return _REFUSED, NOTHING
            at += 1
            depth -= 1
        if depth == around:
            return at, outermost


@compiled
def _walk_whole(data, offsets, status, kinds, starts, ends):  # type: ignore[no-untyped-def]
    objects = np.zeros(DEEPEST + 1, np.bool_)
    for row in range(len(status)):
        if status[row] != _WALKED:
            continue
        end = offsets[row + 1]
        start = _blanks(data, offsets[row], end)
        at, kind = _value(data, start, end, objects, 0)
        if at < 0 or _blanks(data, at, end) != end:
            status[row] = _LEFT
            continue
        kinds[0, row] = kind
        starts[0, row] = start
        ends[0, row] = at


@compiled
def _named(data, start, end, names, bounds, guess):  # type: ignore[no-untyped-def]
    """Which name stands there, or -1; `guess` is tried first."""
    count = len(bounds) - 1
    length = end - start
    for i in range(count):
        name = guess + i
        if name >= count:
            name -= count
        at = bounds[name]
        if bounds[name + 1] - at != length:
            continue
        same = True
        for k in range(length):
            if data[start + k] != names[at + k]:
                same = False
                break
        if same:
            return name
    return -1


@compiled
def _walk(data, offsets, status, names, bounds, kinds, starts, ends):  # type: ignore[no-untyped-def]
    objects = np.zeros(DEEPEST + 1, np.bool_)
    count = len(bounds) - 1
    for row in range(len(status)):
        if status[row] != _WALKED:
            continue
        end = offsets[row + 1]
        at = _blanks(data, offsets[row], end)
        if at >= end or data[at] != 123:
            status[row] = _LEFT
            continue
        at = _blanks(data, at + 1, end)
        done = at < end and data[at] == 125
        guess = 0
        while not done:
            if at >= end or data[at] != 34:
                break
            key = at + 1
            at, escaped = _string(data, at, end)
            if at < 0 or escaped:
                break
            name = _named(data, key, at - 1, names, bounds, guess)
            at = _blanks(data, at, end)
            if at >= end or data[at] != 58:
                break
            start = _blanks(data, at + 1, end)
            at, kind = _value(data, start, end, objects, 1)
            if at < 0:
                break
            if name >= 0:
                kinds[name, row] = kind
                starts[name, row] = start if kind != NOTHING else 0
                ends[name, row] = at if kind != NOTHING else 0
                guess = name + 1 if name + 1 < count else 0
            at = _blanks(data, at, end)
            if at >= end:
                break
            if data[at] == 125:
                done = True
            elif data[at] == 44:
                at = _blanks(data, at + 1, end)
            else:
                break
        if not done or _blanks(data, at + 1, end) != end:
            status[row] = _LEFT
