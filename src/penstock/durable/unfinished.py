"""Names of files being written, and whether their writer still lives.

A file is written under a name such as `3f9a0c41~812~55120~17`: the boot it
was made in, the process, when that process began, and a counter. After a
crash the name says who left it behind. The tilde cannot stand in a key, so
such a file is never taken for an object wherever it lies.
"""

import itertools
import os
import re
from functools import cache
from typing import Final

from penstock.durable.process import boot_id, has_ended, start_ticks

__all__ = ["abandoned", "new_name"]

_NAME: Final = re.compile(r"([0-9a-f]{8})~([0-9]+)~([0-9]+)~([0-9]+)")
_counter: Final = itertools.count()


def new_name() -> str:
    """A name that no other file of this process, or of any other, has."""
    pid = os.getpid()
    return f"{boot_id()}~{pid}~{_own_start(pid)}~{next(_counter)}"


def abandoned(name: str, *, age_ms: int) -> bool:
    """Whether the writer of `name` is gone. Of a writer we cannot see, only age tells."""
    parsed = _NAME.fullmatch(name)
    if parsed is None or parsed[1] != boot_id():
        return age_ms > _OLD_MS
    # The number of a dead process may have gone to a new one, born later.
    return has_ended(int(parsed[2]), int(parsed[3]))


_OLD_MS: Final = 60 * 60 * 1_000


@cache
def _own_start(pid: int) -> int:
    return start_ticks(pid) or 0
