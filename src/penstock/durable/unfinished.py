"""Names of files being written, and whether their writer still lives.

A file is written under a name such as `3f9a0c41~812~55120~17`: the boot it
was made in, the process, when that process began, and a counter. After a
crash the name says who left it behind. The tilde cannot stand in a key, so
such a file is never taken for an object wherever it lies.
"""

import hashlib
import itertools
import os
import re
from functools import cache
from pathlib import Path
from typing import Final

__all__ = ["abandoned", "new_name"]

_NAME: Final = re.compile(r"([0-9a-f]{8})~([0-9]+)~([0-9]+)~([0-9]+)")
_counter: Final = itertools.count()


def new_name() -> str:
    """A name that no other file of this process, or of any other, has."""
    pid = os.getpid()
    return f"{_boot()}~{pid}~{_own_birth(pid)}~{next(_counter)}"


def abandoned(name: str, *, age_ms: int) -> bool:
    """Whether the writer of `name` is gone. Of a writer we cannot see, only age tells."""
    parsed = _NAME.fullmatch(name)
    if parsed is None or parsed[1] != _boot():
        return age_ms > _OLD_MS
    # The number of a dead process may have gone to a new one, born later.
    return _birth(int(parsed[2])) != int(parsed[3])


_OLD_MS: Final = 60 * 60 * 1_000


@cache
def _boot() -> str:
    # Process numbers mean something within one boot and one pid namespace:
    # containers that share a folder each have a process 1.
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        seen = boot + os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - not a path.
    except OSError:
        seen = os.uname().nodename
    return hashlib.sha256(seen.encode()).hexdigest()[:8]


@cache
def _own_birth(pid: int) -> int:
    return _birth(pid) or 0


def _birth(pid: int) -> int | None:
    """When process `pid` began, in clock ticks since boot, or None if there is none."""
    try:
        status = Path(f"/proc/{pid}/stat").read_bytes()
    except FileNotFoundError:
        return None if Path("/proc/self").exists() or not _signalled(pid) else 0
    # The second field is the program's name, which may hold spaces and brackets.
    state, *numbers = status.rpartition(b")")[2].split()
    # A dead process keeps its number until its parent asks after it.
    return None if state in (b"Z", b"X") else int(numbers[18])


def _signalled(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
