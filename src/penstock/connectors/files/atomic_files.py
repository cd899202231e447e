"""Atomic and durable writes, and the lines of the files.

Documents are stored byte for byte, because parsing and encoding could change their numbers.
"""

import fcntl
import json
import math
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from penstock.deadlines import answer_timeout_s
from penstock.errors import TransientError
from penstock.sdk import Documents, KeyRange

__all__ = ["line_of", "lines_of", "locked", "parts_of", "range_of", "replace", "rows_of", "sync"]

PAUSE_S: Final = 0.01

_DOCUMENT: Final = b',"document":'


def replace(path: Path, data: bytes) -> None:
    """Replace a file atomically. Call `sync` on its folder to make the name durable."""
    new = path.with_name(f".{path.name}.new")
    with new.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def sync(folder: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def locked(folder: Path, cancelled: threading.Event) -> Iterator[None]:
    """Hold the exclusive lock of a folder among the processes of this host.

    The lock ends with its process. A suspended process keeps it, so waiting has a time limit.
    """
    with (folder / "lock").open("a") as file:
        busy_s = answer_timeout_s()
        for _ in range(math.ceil(busy_s / PAUSE_S)):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                pass
            if cancelled.wait(PAUSE_S):
                raise TransientError(f'waiting for the lock of folder "{folder}" was cancelled')
        else:
            raise TransientError(
                f'could not lock folder "{folder}"',
                detail=f"Another process held the lock for {busy_s:g} s.",
                hint=f'Find the process: fuser -v "{folder / "lock"}"',
            )
        yield


def rows_of(batch: Documents) -> Iterator[tuple[bytes, bool, bytes]]:
    """Return packed key, delete flag and document of each row."""
    deletes = [False] * len(batch) if batch.deletes is None else batch.deletes.to_pylist()
    return zip(batch.packed_keys.to_pylist(), deletes, batch.docs_json.to_pylist(), strict=True)


def range_of(text: str) -> KeyRange:
    """Parse a key range."""
    begin, end = text.split("-")
    return KeyRange(int(begin, 16), int(end, 16))


def line_of(about: Mapping[str, Any], document: bytes) -> bytes:
    """Return a line of JSON with `about` and the unchanged document."""
    head = json.dumps(about, ensure_ascii=False, separators=(",", ":")).encode()
    # Line ends in JSON are between tokens, where a space is equivalent.
    return head[:-1] + _DOCUMENT + (document.replace(b"\n", b" ") or b"null") + b"}\n"


def parts_of(line: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the arguments of `line_of`."""
    # SUBTLE: the first match is the separator, because quotes in strings of `about` are escaped.
    head, _, document = line.rstrip(b"\n").partition(_DOCUMENT)
    return json.loads(head + b"}"), document[:-1]


def lines_of(path: Path) -> list[bytes]:
    """Return the lines of a file; empty if it does not exist."""
    try:
        # Not `splitlines`, which also splits at a carriage return.
        with path.open("rb") as file:
            return list(file)
    except FileNotFoundError:
        return []
