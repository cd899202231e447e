"""Files that are there whole or not at all, and what is written in them.

A document is kept byte for byte as it came, because to read and write it again
could change its numbers.
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
    """Let `path` hold `data`, and be whole at every moment; `sync` its folder to keep the name."""
    new = path.with_name(f".{path.name}.new")
    with new.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def sync(folder: Path) -> None:
    """Let the names in `folder` survive a crash."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def locked(folder: Path, gave_up: threading.Event) -> Iterator[None]:
    """Be alone in `folder`, among all processes of this machine that ask.

    A process that ends lets go of the lock, however it ends. One that is suspended
    does not, so nobody waits for ever.
    """
    with (folder / "lock").open("a") as file:
        busy_s = answer_timeout_s()
        for _ in range(math.ceil(busy_s / PAUSE_S)):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                pass
            if gave_up.wait(PAUSE_S):
                raise TransientError(f'waiting for the lock of "{folder}" was broken off')
        else:
            raise TransientError(
                f'the lock of "{folder}" was held by another process for {busy_s:g} s',
                hint=f'Find it with: fuser -v "{folder / "lock"}"',
            )
        yield


def rows_of(batch: Documents) -> Iterator[tuple[bytes, bool, bytes]]:
    """The packed key of each document, whether it is to be removed, and the document."""
    deletes = [False] * len(batch) if batch.deletes is None else batch.deletes.to_pylist()
    return zip(batch.packed_keys.to_pylist(), deletes, batch.docs_json.to_pylist(), strict=True)


def range_of(text: str) -> KeyRange:
    """What a range of keys was, before it was written down."""
    begin, end = text.split("-")
    return KeyRange(int(begin, 16), int(end, 16))


def line_of(about: Mapping[str, Any], document: bytes) -> bytes:
    """A line of JSON: `about`, and the document as it is."""
    head = json.dumps(about, ensure_ascii=False, separators=(",", ":")).encode()
    # Line ends within JSON stand between its tokens, where a space does as well.
    return head[:-1] + _DOCUMENT + (document.replace(b"\n", b" ") or b"null") + b"}\n"


def parts_of(line: bytes) -> tuple[dict[str, Any], bytes]:
    """What `line_of` was given."""
    # SUBTLE: the first is ours, as quotes within a string of `about` have a backslash.
    head, _, document = line.rstrip(b"\n").partition(_DOCUMENT)
    return json.loads(head + b"}"), document[:-1]


def lines_of(path: Path) -> list[bytes]:
    """The lines of a file; none, if it is not there."""
    try:
        # Not `splitlines`, which takes a carriage return for the end of a line.
        with path.open("rb") as file:
            return list(file)
    except FileNotFoundError:
        return []
