"""Identity of an operating-system process, and whether the process still runs.

A process number alone identifies nothing: numbers are reused, and each PID
namespace has its own. A number counts only within one boot and one namespace,
and together with the start time of the process.

    same boot and namespace    decided by the start time of the process
    same machine, other boot   dead: the machine was restarted since
    anything else              undecided; nothing is assumed of another host
"""

import hashlib
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

__all__ = [
    "ProcessIdentity",
    "boot_id",
    "has_ended",
    "identify",
    "is_alive",
    "is_dead",
    "start_ticks",
]

_INIT_PID_NAMESPACE: Final = "pid:[4026531836]"
"""PROC_PID_INIT_INO of Linux: the namespace that a machine boots with."""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process of a machine. Another process of that machine can recognize it."""

    pid: int
    start: int
    """Clock ticks from boot to the start of the process."""

    boot: str
    """Boot and PID namespace, hashed; empty if it was not recorded."""

    machine: str
    """Machine, hashed; empty in a container, and where the system does not provide it."""


def identify(pid: int | None = None) -> ProcessIdentity:
    """Return the identity of a process of this machine, by default of this one."""
    pid = os.getpid() if pid is None else pid
    return ProcessIdentity(pid, start_ticks(pid) or 0, boot_id(), _machine_id())


def is_alive(process: ProcessIdentity) -> bool:
    """Return whether the process certainly runs, on this machine."""
    return process.boot == boot_id() and start_ticks(process.pid) == process.start


def is_dead(process: ProcessIdentity) -> bool:
    """Return whether the process certainly does not run any more."""
    if not process.boot:
        return False
    if process.boot == boot_id():
        return has_ended(process.pid, process.start)
    return bool(process.machine) and process.machine == _machine_id()


def has_ended(pid: int, start: int) -> bool:
    """Return whether the process `pid` of this boot that started at `start` has ended."""
    ticks = start_ticks(pid)
    return ticks is None or ticks not in (0, start)


@cache
def boot_id() -> str:
    """Return a hash of this boot and PID namespace."""
    # Containers that share a folder each have a process 1, hence the namespace.
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text() + _pid_namespace()
    except OSError:
        text = os.uname().nodename
    return _hash(text)


def start_ticks(pid: int) -> int | None:
    """Return when process `pid` started, in clock ticks since boot.

    None if it does not run; 0 if it runs and the system does not show when it started.
    """
    try:
        status = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        # With hidepid, processes of other users are not listed.
        return 0 if _accepts_signals(pid) else None
    # The second field is the program's name, which may hold spaces and brackets.
    state, *numbers = status.rpartition(b")")[2].split()
    # A dead process keeps its number until its parent collects its exit status.
    return None if state in (b"Z", b"X") else int(numbers[18])


@cache
def _machine_id() -> str:
    # SUBTLE: containers of one image may share a machine id, and a namespace's number
    # recurs on other hosts. So a machine is recognized only outside of containers.
    try:
        text = Path("/etc/machine-id").read_text().strip()
        return _hash(text + os.uname().nodename) if text and _outside_containers() else ""
    except OSError:
        return ""


def _outside_containers() -> bool:
    return _pid_namespace() == _INIT_PID_NAMESPACE


def _pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - the target is no path


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _accepts_signals(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
