"""Stores that fail on request, and a disk that simulates power cuts.

`UnreliableBlob` gives each write one of four outcomes: it happens or not, and a response arrives or
not. `PowerCutDisk` is a disk for the real `FileBlob`. It distinguishes written data from synced
data:

    disk = PowerCutDisk()
    blob = FileBlob("/lake", disk=disk)
    …
    reopened = FileBlob("/lake", disk=disk.after_power_cut(rng))

`reopened` then has one of the possible states after a restart of the machine. `CarelessDisk` and
`lying_create` are planted bugs, which prove that a checker finds errors.
"""

import errno
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, TypeVar

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.durable import Blob, Disk, FolderEntry, Listed
from penstock.errors import DeterminateError, IndeterminateError

__all__ = [
    "CarelessDisk",
    "Fate",
    "PlantedBug",
    "PowerCut",
    "PowerCutDisk",
    "Step",
    "UnreliableBlob",
]

_Outcome = TypeVar("_Outcome")


class Fate(Enum):
    """Outcome of one write: whether it happens, and whether a response arrives."""

    ANSWERED = auto()
    """The write happens, and the response arrives."""

    ANSWER_LOST = auto()
    """The write happens, but the error leaves its outcome indeterminate."""

    REQUEST_LOST = auto()
    """The write does not happen, with the same indeterminate error."""

    FAILED = auto()
    """The write does not happen, with a determinate error."""


class UnreliableBlob:
    """`Blob` whose writes have the outcomes of `script`, and then random ones from `rng`.

    Without either, all writes succeed. With `lying_create`, a planted bug, a `create` of an
    existing key overwrites it and reports success.
    """

    def __init__(
        self,
        inner: Blob,
        *,
        script: Iterable[Fate] = (),
        rng: random.Random | None = None,
        lying_create: bool = False,
    ) -> None:
        self._inner = inner
        self._script = iter(script)
        self._rng = rng
        self._lying_create = lying_create
        self._lock = threading.Lock()
        self.fates: list[Fate] = []
        """Outcomes of all writes so far."""

    @property
    def name(self) -> str:
        """Name of the wrapped store."""
        return self._inner.name

    def get(self, key: str, *, start: int = 0) -> bytes | None:
        """Read without failures."""
        return self._inner.get(key, start=start)

    def put(self, key: str, data: bytes) -> None:
        """Write with the next outcome."""
        self._write(key, lambda: self._inner.put(key, data))

    def create(self, key: str, data: bytes) -> bool:
        """Create with the next outcome."""
        if self._lying_create and self._inner.get(key) is not None:
            self._write(key, lambda: self._inner.put(key, data))
            return True
        return self._write(key, lambda: self._inner.create(key, data))

    def settle(self, keys: list[str]) -> None:
        """Settle without failures."""
        self._inner.settle(keys)

    def delete(self, key: str) -> None:
        """Delete with the next outcome."""
        self._write(key, lambda: self._inner.delete(key))

    def list(self, prefix: str, *, after: str = "") -> list[Listed]:
        """List without failures."""
        return self._inner.list(prefix, after=after)

    def close(self) -> bool:
        """Close the wrapped store."""
        return self._inner.close()

    def _write(self, key: str, write: Callable[[], _Outcome]) -> _Outcome:
        with self._lock:
            random_fate = self._rng.choice([*Fate]) if self._rng else Fate.ANSWERED
            fate = next(self._script, random_fate)
            self.fates.append(fate)
        if fate is Fate.FAILED:
            raise DeterminateError(f'write of object "{key}" failed on request')
        if fate is Fate.REQUEST_LOST:
            raise IndeterminateError(f'write of object "{key}" was lost on request')
        outcome = write()
        if fate is Fate.ANSWER_LOST:
            raise IndeterminateError(f'response to the write of object "{key}" was lost on request')
        return outcome


class PowerCut(BaseException):
    """Power failure. Not an `Exception`: no code of ours survives it."""


@dataclass(frozen=True, slots=True)
class Step:
    """Operation on a disk."""

    operation: str
    """`make folder`, `write`, `sync file`, `link`, `replace`, `sync folder` or `unlink`."""

    name: str
    """Last component of the path."""


class PowerCutDisk:
    """In-memory `Disk` that tracks synced state.

    The power fails just before step number `cut_before`, if given: this step and all later ones
    raise `PowerCut`. The syncs with numbers in `failing_syncs` raise EIO. Their data stays unsynced
    after later syncs, as with a kernel that has dropped the pages. Steps and syncs are
    numbered from 0.
    """

    def __init__(
        self,
        *,
        cut_before: int | None = None,
        failing_syncs: Iterable[int] = (),
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._cut_before = cut_before
        self._failing_syncs = set(failing_syncs)
        self._clock = clock
        self._lock = threading.RLock()
        self._top = _FolderNode()
        self._handles: dict[int, _Node] = {}
        self._next_handle = 0
        self._syncs = 0
        self.steps: list[Step] = []
        """All operations, in order."""

    def after_power_cut(self, rng: random.Random) -> "PowerCutDisk":
        """Return a possible disk after a power cut: all synced data, random unsynced data."""
        with self._lock:
            disk = PowerCutDisk(clock=self._clock)
            disk._top = self._top.surviving(rng)
            return disk

    def restore_power(self) -> None:
        """Continue as after a process crash: all written data is visible, synced or not."""
        self._cut_before = None

    def fail_sync(self, number: int) -> None:
        """Make the sync with this number fail, counted from the first sync of the disk."""
        self._failing_syncs.add(number)

    def contents(self, root: str) -> dict[str, bytes]:
        """Return the bytes of each file below `root`, by relative path."""
        with self._lock:
            return dict(_files(self._folder(root), ""))

    def make_folder(self, path: str) -> bool:
        with self._stepping("make folder", path):
            parent, name = self._parent(path)
            if name in parent.names:
                return False
            parent.change(name, _FolderNode())
            return True

    def open_folder(self, path: str) -> int:
        with self._lock:
            return self._opened(self._folder(path))

    def same_device(self, path: str, other: str) -> bool:
        """Return True: the disk is one file system."""
        return True

    def write_new(self, folder: int, name: str, data: bytes) -> int:
        with self._stepping("write", name):
            names = self._held_folder(folder)
            if name in names.names:
                raise _os_error(errno.EEXIST)
            file = _FileNode(bytes(data), self._clock.now_ms())
            names.change(name, file)
            return self._opened(file)

    def open_file(self, path: str) -> int:
        with self._lock:
            return self._opened(self._file(path))

    def sync_file(self, file: int) -> None:
        with self._stepping("sync file", ""):
            self._sync(self._handles[file])

    def link(self, source: int, name: str, target: int, as_name: str) -> None:
        with self._stepping("link", as_name):
            node = self._held_folder(source).lookup(name)
            names = self._held_folder(target)
            if as_name in names.names:
                raise _os_error(errno.EEXIST)
            names.change(as_name, node)

    def replace(self, source: int, name: str, target: int, as_name: str) -> None:
        with self._stepping("replace", as_name):
            node = self._held_folder(source).lookup(name)
            names = self._held_folder(target)
            if isinstance(names.names.get(as_name), _FolderNode):
                raise _os_error(errno.EISDIR)
            names.change(as_name, node)
            self._held_folder(source).change(name, None)

    def sync_folder(self, folder: int) -> None:
        with self._stepping("sync folder", ""):
            self._sync(self._held_folder(folder))

    def unlink(self, folder: int, name: str) -> None:
        with self._stepping("unlink", name):
            names = self._held_folder(folder)
            if isinstance(names.lookup(name), _FolderNode):
                raise _os_error(errno.EISDIR)
            names.change(name, None)

    def remove(self, path: str) -> None:
        with self._stepping("unlink", path):
            self._file(path)
            parent, name = self._parent(path)
            parent.change(name, None)

    def close(self, handle: int) -> None:
        with self._lock:
            del self._handles[handle]

    def read(self, path: str, start: int = 0) -> bytes:
        with self._lock:
            return self._file(path).data[start:]

    def names(self, path: str) -> list[FolderEntry]:
        with self._lock:
            names = self._folder(path).names
            return [
                FolderEntry(name, isinstance(node, _FolderNode)) for name, node in names.items()
            ]

    def size_and_ctime_ms(self, path: str) -> tuple[int, int]:
        with self._lock:
            file = self._file(path)
            return len(file.data), file.modified_ms

    def _sync(self, node: "_Node") -> None:
        number, self._syncs = self._syncs, self._syncs + 1
        if number in self._failing_syncs:
            node.lose()
            raise _os_error(errno.EIO)
        node.sync()

    @contextmanager
    def _stepping(self, deed: str, path: str) -> Iterator[None]:
        with self._lock:
            if self._cut_before is not None and len(self.steps) >= self._cut_before:
                raise PowerCut
            self.steps.append(Step(deed, path.rpartition("/")[2]))
            yield

    def _opened(self, node: "_Node") -> int:
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        self._handles[handle] = node
        return handle

    def _held_folder(self, handle: int) -> "_FolderNode":
        node = self._handles[handle]
        if isinstance(node, _FileNode):
            raise _os_error(errno.ENOTDIR)
        return node

    def _parent(self, path: str) -> tuple["_FolderNode", str]:
        above, _, name = path.rpartition("/")
        return self._folder(above), name

    def _folder(self, path: str) -> "_FolderNode":
        node: _Node = self._top
        for name in filter(None, path.split("/")):
            if isinstance(node, _FileNode):
                raise _os_error(errno.ENOTDIR)
            node = node.lookup(name)
        if isinstance(node, _FileNode):
            raise _os_error(errno.ENOTDIR)
        return node

    def _file(self, path: str) -> "_FileNode":
        parent, name = self._parent(path)
        node = parent.lookup(name)
        if isinstance(node, _FolderNode):
            raise _os_error(errno.EISDIR)
        return node


class PlantedBug(Enum):
    """Mistakes that a durability checker must find (row 8 of the invariants)."""

    LINK_BEFORE_SYNC = auto()
    """Files are synced only after the next link, so a name may refer to a partial file."""

    RETRY_SYNC = auto()
    """A failed sync is retried, and its success is believed."""


class CarelessDisk:
    """`Disk` with the behaviour of `inner`, except for one planted bug."""

    def __init__(self, inner: Disk, bug: PlantedBug) -> None:
        self._inner = inner
        self._bug = bug
        self._pending_syncs: list[int] = []
        self.make_folder = inner.make_folder
        self.open_folder = inner.open_folder
        self.same_device = inner.same_device
        self.write_new = inner.write_new
        self.open_file = inner.open_file
        self.replace = inner.replace
        self.unlink = inner.unlink
        self.remove = inner.remove
        self.read = inner.read
        self.names = inner.names
        self.size_and_ctime_ms = inner.size_and_ctime_ms

    def sync_file(self, file: int) -> None:
        """Sync a file, late or with a retry."""
        if self._bug is PlantedBug.LINK_BEFORE_SYNC:
            self._pending_syncs.append(file)
        else:
            self._sync(self._inner.sync_file, file)

    def sync_folder(self, folder: int) -> None:
        """Sync a folder, possibly with a retry."""
        self._sync(self._inner.sync_folder, folder)

    def link(self, source: int, name: str, target: int, as_name: str) -> None:
        """Link, and only then do the delayed syncs."""
        self._inner.link(source, name, target, as_name)
        while self._pending_syncs:
            file = self._pending_syncs.pop(0)
            self._inner.sync_file(file)
            self._inner.close(file)

    def close(self, handle: int) -> None:
        """Close a handle, unless its sync is still pending."""
        if handle not in self._pending_syncs:
            self._inner.close(handle)

    def _sync(self, sync: Callable[[int], None], handle: int) -> None:
        try:
            sync(handle)
        except OSError:
            if self._bug is not PlantedBug.RETRY_SYNC:
                raise
            sync(handle)


@dataclass(slots=True)
class _FileNode:
    """Contents of a file, which are written once."""

    data: bytes
    modified_ms: int
    synced: bool = False
    lost: bool = False
    """Set when a sync failed; later syncs prove nothing."""

    def sync(self) -> None:
        self.synced = not self.lost

    def lose(self) -> None:
        self.lost = not self.synced

    def surviving(self, rng: random.Random) -> "_FileNode":
        data = self.data
        if not self.synced:
            # A disk may have the length without the bytes, or only a prefix.
            prefix = data[: rng.randrange(len(data) + 1)]
            data = rng.choice([data, prefix, prefix + bytes(len(data) - len(prefix)), b""])
        return _FileNode(data, self.modified_ms, synced=True)


@dataclass(slots=True)
class _FolderNode:
    """Names in a folder: current, synced, and the changes between the two."""

    names: dict[str, "_Node"] = field(default_factory=dict)
    synced: dict[str, "_Node"] = field(default_factory=dict)
    unsynced: list[tuple[str, "_Node | None"]] = field(default_factory=list)
    lost: list[tuple[str, "_Node | None"]] = field(default_factory=list)
    """Changes whose sync failed; later syncs prove nothing about them."""

    def lookup(self, name: str) -> "_Node":
        node = self.names.get(name)
        if node is None:
            raise _os_error(errno.ENOENT)
        return node

    def change(self, name: str, node: "_Node | None") -> None:
        self.unsynced.append((name, node))
        _apply(self.names, name, node)

    def sync(self) -> None:
        for name, node in self.unsynced:
            _apply(self.synced, name, node)
        self.unsynced.clear()

    def lose(self) -> None:
        self.lost += self.unsynced
        self.unsynced.clear()

    def surviving(self, rng: random.Random) -> "_FolderNode":
        names = dict(self.synced)
        for name, node in self.lost + self.unsynced:
            if rng.randrange(2):
                _apply(names, name, node)
        nodes = {name: node.surviving(rng) for name, node in sorted(names.items(), key=_by_name)}
        return _FolderNode(nodes, dict(nodes))


_Node = _FileNode | _FolderNode


def _by_name(item: tuple[str, _Node]) -> str:
    return item[0]


def _apply(names: dict[str, _Node], name: str, node: _Node | None) -> None:
    if node is None:
        names.pop(name, None)
    else:
        names[name] = node


def _files(folder: _FolderNode, path: str) -> Iterator[tuple[str, bytes]]:
    for name, node in folder.names.items():
        if isinstance(node, _FileNode):
            yield path + name, node.data
        else:
            yield from _files(node, f"{path}{name}/")


def _os_error(number: int) -> OSError:
    return OSError(number, _MESSAGES[number])


_MESSAGES: Final = {
    errno.EEXIST: "exists",
    errno.ENOENT: "does not exist",
    errno.ENOTDIR: "is not a folder",
    errno.EISDIR: "is a folder",
    errno.EIO: "failed on request",
}
