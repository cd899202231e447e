"""JSON scanner: compiled code that locates the values of columns in each document.

The scan validates the complete document, including members without a column. It skips a document
that it does not accept, or whose keys contain escapes. `locate_in_python` reads these with
Python's own parser and returns the reason for an invalid one. For every document that the scan
accepts, `locate_in_python` finds the same values.

If a key occurs twice, the last value counts, as in most JSON readers. Text must be encodable in
UTF-8, so half of a surrogate pair is rejected everywhere. A document that nests deeper than
`MAX_NESTING` is rejected too.
"""

import json
import re
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from penstock.data.jit import compiled
from penstock.data.text_kernels.byte_column import ByteColumn
from penstock.data.text_kernels.located_values import (
    ARRAY,
    ESCAPED,
    FALSE,
    INTEGER,
    NOTHING,
    NUMBER,
    OBJECT,
    STRING,
    TRUE,
    InvalidValue,
    LocatedValues,
)

__all__ = ["MAX_NESTING", "invalid_utf8", "locate_in_python", "locate_values"]

MAX_NESTING: Final = 200
"""Maximum nesting of arrays and objects."""

Locations = list[tuple[int, int, int]]
"""Kind, start and end of the value of each column."""

_INVALID: Final = -1
_SCANNED: Final = 0
_SKIPPED: Final = 1


def locate_values(
    documents: pa.Array, names: Sequence[str] | None, *, use_scan: bool = True
) -> tuple[LocatedValues, dict[int, str]]:
    """Return the values of the columns `names`, and the reason for each invalid record.

    Without names there is one column, the document. Tests unset `use_scan` to compare both ways.
    """
    records = ByteColumn.of(documents)
    values = LocatedValues.missing(records, 1 if names is None else len(names))
    bad = invalid_utf8(documents)
    status = np.where(records.present, np.uint8(_SCANNED), np.uint8(_SKIPPED))
    status[list(bad)] = _SKIPPED
    if use_scan and names is None:
        _scan_documents(records.data, records.offsets, status,
                    values.kinds, values.starts, values.ends)  # fmt: skip
    elif use_scan and names is not None:
        encoded = [name.encode() for name in names]
        bounds = np.cumsum([0, *map(len, encoded)])
        _scan_members(records.data, records.offsets, status,
              np.frombuffer(b"".join(encoded), np.uint8), bounds,
              values.kinds, values.starts, values.ends)  # fmt: skip
    else:
        status[:] = _SKIPPED
    for row in np.flatnonzero(status & records.present).tolist():
        if row in bad:
            continue
        try:
            locations = locate_in_python(records[row], names)
        except InvalidValue as invalid:
            bad[row] = str(invalid)
            continue
        offset = int(records.offsets[row])
        values.put(row, [(kind, offset + start, offset + end) for kind, start, end in locations])
    return values, bad


def invalid_utf8(values: pa.Array) -> dict[int, str]:
    """Return the rows that are not UTF-8, each with a reason and the first invalid byte."""
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


def locate_in_python(document: bytes, names: Sequence[str] | None) -> Locations:
    """Return the values of one UTF-8 document, with Python's own parser.

    Raises:
        InvalidValue: the document is invalid.
    """
    # One character for each byte: indexes into the text are indexes into the bytes.
    text = document.decode("latin-1")
    if text.startswith("\xef\xbb\xbf"):
        raise InvalidValue("it begins with a byte order mark, which JSON does not have")
    if not text.strip(_BLANKS):
        raise InvalidValue("it is empty")
    start = _past_blanks(text, 0)
    try:
        value, end = _DECODER.raw_decode(text, start)
        if (tail := _past_blanks(text, end)) != len(text):
            raise InvalidValue(f"the JSON document is followed by other text, at byte {tail}")
    except json.JSONDecodeError as error:
        message = f"{error.msg[:1].lower()}{error.msg[1:]}"
        raise InvalidValue(f"it is not JSON: {message}, at byte {error.pos}") from None
    except RecursionError:
        raise _too_deep() from None
    if _is_too_deep(value):
        raise _too_deep()
    if any(half[1] for half in _SURROGATES.finditer(text)):
        raise InvalidValue("it is not JSON: text contains half of a surrogate pair")
    if names is None:
        return [(_kind(text, start, end), start, end)]
    if text[start] != "{":
        raise InvalidValue(f"it is {_KIND_NAMES[_kind(text, start, end)]}, and not an object")
    members = _members(text, start)
    return [members.get(name, (NOTHING, 0, 0)) for name in names]


def _members(text: str, start: int) -> dict[str, tuple[int, int, int]]:
    """Return the location of each value of a valid object, by key."""
    members = {}
    at = _past_blanks(text, start + 1)
    while text[at] != "}":
        _, end = _DECODER.raw_decode(text, at)
        name = json.loads(text[at:end].encode("latin-1"))
        at = _past_blanks(text, _past_blanks(text, end) + 1)
        _, end = _DECODER.raw_decode(text, at)
        kind = _kind(text, at, end)
        members[name] = (kind, at, end) if kind != NOTHING else (NOTHING, 0, 0)
        at = _past_blanks(text, end)
        if text[at] == ",":
            at = _past_blanks(text, at + 1)
    return members


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


def _is_too_deep(value: Any) -> bool:
    """Return whether the value exceeds the maximum nesting."""
    level = [value]
    for _ in range(MAX_NESTING + 1):
        containers = [item for item in level if isinstance(item, dict | list)]
        if not containers:
            return False
        level = [
            inner
            for container in containers
            for inner in (container.values() if isinstance(container, dict) else container)
        ]
    return True


def _too_deep() -> InvalidValue:
    return InvalidValue(f"it nests arrays and objects more than {MAX_NESTING} levels deep")


def _not_json(constant: str) -> Any:
    raise json.JSONDecodeError(f"{constant} is not a number", "", 0)


_BLANKS: Final = " \t\n\r"
_DECODER: Final = json.JSONDecoder(
    # The value of a number is not needed, and a JSON number may have any length.
    parse_int=lambda _: 0,
    parse_float=lambda _: 0,
    parse_constant=_not_json,
)
_SURROGATES: Final = re.compile(
    r"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|(\\u[dD][89a-fA-F]..)|\\.", re.DOTALL
)
"""Escapes in sequence; the group matches half of a surrogate pair."""

_KIND_NAMES: Final = {
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
"""Bytes that end a run of plain characters: quotes, backslashes and control characters."""


@compiled
def _blanks(data, at, end):  # type: ignore[no-untyped-def]
    """Return the index of the first byte at or after `at` that is not a blank."""
    while at < end and (data[at] == 32 or data[at] == 10 or data[at] == 13 or data[at] == 9):
        at += 1
    return at


@compiled
def _hex(data, at, end):  # type: ignore[no-untyped-def]
    """Return the number of four hexadecimal digits, or -1."""
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
    """Return the end of the string whose opening quote is at `at`, and whether it has escapes."""
    escaped = False
    at += 1
    while True:
        while at < end and not _STOPS[data[at]]:
            at += 1
        if at >= end:
            return _INVALID, False
        c = data[at]
        if c == 34:
            return at + 1, escaped
        if c < 32:
            return _INVALID, False
        escaped = True
        if at + 1 >= end:
            return _INVALID, False
        c = data[at + 1]
        if c == 117:
            unit = _hex(data, at + 2, end)
            if unit < 0 or 0xDC00 <= unit < 0xE000:
                return _INVALID, False
            at += 6
            if 0xD800 <= unit < 0xDC00:
                if end - at < 6 or data[at] != 92 or data[at + 1] != 117:
                    return _INVALID, False
                unit = _hex(data, at + 2, end)
                if unit < 0xDC00 or unit >= 0xE000:
                    return _INVALID, False
                at += 6
        elif (
            c == 34 or c == 92 or c == 47 or c == 98 or c == 102 or c == 110 or c == 114 or c == 116
        ):
            at += 2
        else:
            return _INVALID, False


@compiled
def _number(data, at, end):  # type: ignore[no-untyped-def]
    """Return the end of the number at `at`, and its kind."""
    if at < end and data[at] == 45:
        at += 1
    if at >= end or data[at] < 48 or data[at] > 57:
        return _INVALID, NUMBER
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
            return _INVALID, NUMBER
        while at < end and 48 <= data[at] <= 57:
            at += 1
    if at < end and (data[at] == 101 or data[at] == 69):
        kind = NUMBER
        at += 1
        if at < end and (data[at] == 43 or data[at] == 45):
            at += 1
        if at >= end or data[at] < 48 or data[at] > 57:
            return _INVALID, NUMBER
        while at < end and 48 <= data[at] <= 57:
            at += 1
    return at, kind


@compiled
def _word(data, at, end, b, c, d, e):  # type: ignore[no-untyped-def]
    """Return the end of the literal at `at`, given its letters after the first; `e` may be 0."""
    length = 5 if e else 4
    if end - at < length or data[at + 1] != b or data[at + 2] != c or data[at + 3] != d:
        return _INVALID
    if e and data[at + 4] != e:
        return _INVALID
    return at + length


@compiled
def _past_key(data, at, end):  # type: ignore[no-untyped-def]
    """Return the start of the value whose key starts at `at`."""
    if at >= end or data[at] != 34:
        return _INVALID
    at, _ = _string(data, at, end)
    if at < 0:
        return _INVALID
    at = _blanks(data, at, end)
    if at >= end or data[at] != 58:
        return _INVALID
    return _blanks(data, at + 1, end)


@compiled
def _value(data, at, end, objects, depth):  # type: ignore[no-untyped-def]
    """Return the end of the value at `at`, and its kind; `depth` containers enclose it.

    `objects` is a work array of size `MAX_NESTING + 1`, true for each level that is an object.
    """
    outermost = NOTHING
    around = depth
    while True:
        if at >= end:
            return _INVALID, NOTHING
        c = data[at]
        if c == 34:
            at, escaped = _string(data, at, end)
            kind = ESCAPED if escaped else STRING
        elif c == 123 or c == 91:
            kind = OBJECT if c == 123 else ARRAY
            if depth == around:
                outermost = kind
            depth += 1
            if depth > MAX_NESTING:
                return _INVALID, NOTHING
            objects[depth] = c == 123
            at = _blanks(data, at + 1, end)
            if at < end and data[at] == c + 2:
                at += 1
                depth -= 1
            elif c == 123:
                at = _past_key(data, at, end)
                if at < 0:
                    return _INVALID, NOTHING
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
            return _INVALID, NOTHING
        if depth == around:
            return at, kind
        while depth > around:
            at = _blanks(data, at, end)
            if at >= end:
                return _INVALID, NOTHING
            c = data[at]
            if c == 44:
                at = _blanks(data, at + 1, end)
                if objects[depth]:
                    at = _past_key(data, at, end)
                    if at < 0:
                        return _INVALID, NOTHING
                break
            if c != (125 if objects[depth] else 93):
                return _INVALID, NOTHING
            at += 1
            depth -= 1
        if depth == around:
            return at, outermost


@compiled
def _scan_documents(data, offsets, status, kinds, starts, ends):  # type: ignore[no-untyped-def]
    objects = np.zeros(MAX_NESTING + 1, np.bool_)
    for row in range(len(status)):
        if status[row] != _SCANNED:
            continue
        end = offsets[row + 1]
        start = _blanks(data, offsets[row], end)
        at, kind = _value(data, start, end, objects, 0)
        if at < 0 or _blanks(data, at, end) != end:
            status[row] = _SKIPPED
            continue
        kinds[0, row] = kind
        starts[0, row] = start
        ends[0, row] = at


@compiled
def _named(data, start, end, names, bounds, guess):  # type: ignore[no-untyped-def]
    """Return the index of the name at these bounds, or -1; `guess` is compared first."""
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
def _scan_members(data, offsets, status, names, bounds, kinds, starts, ends):  # type: ignore[no-untyped-def]
    objects = np.zeros(MAX_NESTING + 1, np.bool_)
    count = len(bounds) - 1
    for row in range(len(status)):
        if status[row] != _SCANNED:
            continue
        end = offsets[row + 1]
        at = _blanks(data, offsets[row], end)
        if at >= end or data[at] != 123:
            status[row] = _SKIPPED
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
            status[row] = _SKIPPED
