"""Kernels marked compiled_when_large give the same result in Python and compiled."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from penstock.data.packed import element_kernels, pack_row
from penstock.data.packed.cells import packed_cells
from penstock.protocol import arena as arena_module
from penstock.protocol.messages import Store
from penstock.protocol.wire import encode_request
from penstock.sdk import duplicate_keys

WORD = 2**64 - 1
elements = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**130), 2**130)
    | st.floats()
    | st.text()
    | st.binary()
)
rows = st.lists(st.lists(elements, min_size=1, max_size=3).map(pack_row), min_size=1, max_size=8)
broken = st.lists(st.binary(max_size=40), min_size=1, max_size=8)


def same(kernel: Any, *arguments: Any) -> Any:
    """Run a kernel both ways, compare result and arrays, and return them."""
    ours, theirs = fresh(arguments), fresh(arguments)
    with np.errstate(over="ignore"):
        answer = kernel.plain(*ours)
    assert answer == kernel.jitted(*theirs)
    assert alike(ours, theirs)
    return answer, ours


def fresh(arguments: Any) -> Any:
    """Return copies of writable arrays. Other arrays are shared."""
    if isinstance(arguments, tuple):
        return tuple(fresh(argument) for argument in arguments)
    if isinstance(arguments, np.ndarray) and arguments.flags.writeable:
        return arguments.copy()
    return arguments


def alike(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, tuple):
        return all(map(alike, ours, theirs))
    return np.array_equal(ours, theirs) if isinstance(ours, np.ndarray) else True


def scan_message(data: bytes, begin: int) -> None:
    octets = np.frombuffer(data, np.uint8)
    none, flags = np.empty(0, np.int32), np.empty(0, np.uint8)
    found = np.zeros(arena_module._WORDS, np.int64)
    fine, (_, _, _, found, *_) = same(
        arena_module._scan, octets, begin, len(data), found, False, (none,) * 6, (flags,) * 2
    )
    if not fine:
        return
    counts = found[3:].tolist()
    bounds = tuple(np.zeros(counts[each // 2], np.int32) for each in range(6))
    filled = tuple(np.zeros(counts[3 + each], np.uint8) for each in range(2))
    same(arena_module._scan, octets, begin, len(data), found, True, bounds, filled)


@given(st.binary(max_size=80))
def test_scan_of_arbitrary_bytes_is_equal(data: bytes) -> None:
    scan_message(data, 0)


@given(rows, st.data())
def test_scan_of_truncated_message_is_equal(keys: list[bytes], data: st.DataObject) -> None:
    column = pa.array(keys, pa.binary())
    flags = pa.array([bool(len(each) % 2) for each in keys])
    message = encode_request(Store(300, column, column, column, flags, flags))
    begin = next(at for at in (2, 3, 4) if message[at - 1] < 128)
    scan_message(message, begin)
    scan_message(message[: data.draw(st.integers(begin, len(message)))], begin)
    scan_message(encode_request(Store.truncate(300)), 2)


offsets = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6).map(sorted)


@given(st.tuples(offsets, offsets, offsets), st.lists(st.booleans()), st.lists(st.booleans()))
def test_encoded_slices_are_equal(columns: Any, exists: list[bool], deletes: list[bool]) -> None:
    columns = tuple(np.array(each, np.int64) for each in columns)
    flags = (np.array(exists, np.uint8), np.array(deletes, np.uint8))
    size, _ = same(arena_module._size, columns, flags)
    same(arena_module._fill, columns, flags, np.zeros(size + 2, np.uint8), 2)


@given(st.binary(max_size=40), st.data())
def test_gathered_slices_are_equal(arena: bytes, data: st.DataObject) -> None:
    bound = st.integers(0, len(arena))
    pairs = data.draw(st.lists(st.tuples(bound, bound).map(sorted), max_size=6))
    begins, ends = (np.array([pair[at] for pair in pairs], np.int32) for at in (0, 1))
    out = np.zeros(int((ends - begins).sum()), np.uint8)
    same(arena_module._gather, np.frombuffer(arena, np.uint8), begins, ends, out)


@given(rows | broken)
def test_key_hashes_are_equal(keys: list[bytes]) -> None:
    cells = packed_cells(pa.array(keys, pa.binary()))
    high, low = np.zeros(len(cells), np.uint64), np.zeros(len(cells), np.uint32)
    same(duplicate_keys._hash, cells.data, cells.offsets, high, low, *duplicate_keys._SEEDS)


@given(rows | broken, st.integers(0, 2**64 - 1), st.integers(0, 255), st.sampled_from([4, 16]))
def test_elements_are_equal(keys: list[bytes], bound: int, code: int, width: int) -> None:
    cells = packed_cells(pa.array(keys, pa.binary()))
    count, octets = len(cells), sum(map(len, keys))
    cursor, present = cells.offsets[:-1].copy(), np.zeros(count, np.bool_)
    at = (cells.data, cursor, cells.offsets[1:], present)
    halves = [np.uint64(each) for each in (bound, WORD, bound, bound)]
    for each in (code, 1, 2):
        held, bounds = np.zeros(octets, np.uint8), np.zeros(count + 1, np.int64)
        same(element_kernels.read_strings, *at, each, held, bounds)
    for each in (code, 0x20, 0x21, 0x30):
        same(element_kernels.read_fixed, *at, each, np.zeros((count, width), np.uint8))
    same(element_kernels.read_bools, *at, np.zeros(count, np.bool_))
    same(element_kernels.read_integers, *at, *halves, np.zeros((count, 2), np.uint64))


SCRIPT = """
import sys
import numpy as np
from penstock.data import jit

@jit.compiled_when_large
def total(numbers):
    found = 0
    for each in numbers:
        found += each
    return found

assert total(np.ones(jit.PLAIN_ELEMENTS, np.int64)) == jit.PLAIN_ELEMENTS
assert "numba" not in sys.modules
assert total(np.ones(1, np.int64)) == 1
assert "numba" in sys.modules
"""


def test_numba_is_not_imported_for_small_data(tmp_path: Path) -> None:
    script = tmp_path / "little.py"
    script.write_text(SCRIPT)
    subprocess.run([sys.executable, script], check=True)
