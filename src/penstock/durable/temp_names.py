"""Names of temporary files, which identify their writer.

A file is written under a name such as `3f9a0c41~812~55120~17`: boot, process number, start time of
the process, and a counter. After a crash the name identifies the writer. A key cannot contain a
tilde, so a temporary file is never read as an object.
"""

import itertools
import os
import re
from functools import cache
from typing import Final

from penstock.durable.process import boot_id, has_ended, start_ticks

__all__ = ["is_abandoned", "new_name"]

_NAME: Final = re.compile(r"([0-9a-f]{8})~([0-9]+)~([0-9]+)~([0-9]+)")
_counter: Final = itertools.count()


def new_name() -> str:
    """Return a name that is unique among all processes."""
    pid = os.getpid()
    return f"{boot_id()}~{pid}~{_own_start(pid)}~{next(_counter)}"


def is_abandoned(name: str, *, age_ms: int) -> bool:
    """Return whether the writer of `name` has ended; by age, if it is on another machine."""
    parsed = _NAME.fullmatch(name)
    if parsed is None or parsed[1] != boot_id():
        return age_ms > _OLD_MS
    # A later process may reuse the number, with another start time.
    return has_ended(int(parsed[2]), int(parsed[3]))


_OLD_MS: Final = 60 * 60 * 1_000


@cache
def _own_start(pid: int) -> int:
    return start_ticks(pid) or 0
