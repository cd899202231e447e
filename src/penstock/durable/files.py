"""`Blob` in a folder of the local disk.

An object is a file. The file is written completely under a temporary name in `tmp/` and synced.
Only then does it receive the name of its key, so no reader ever sees a partial object:

    write tmp/…  →  sync file  →  link (create) or rename (put)  →  sync folder  →  return

`link` fails if the name exists, so at most one of several `create` calls for a key succeeds.
Between the link and the sync of the folder, an object is visible but not yet durable. A reader
calls `settle` before it acts on the object (hazard A5).

A failed sync is final. The kernel reports the failure once, may drop the dirty pages, and reports
success for the next sync without them (see "fsyncgate", Postgres 2018). After a failed sync, this
store rejects every write and every sync with `DurabilityLost`.
"""

import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.durable.blob import Listed
from penstock.durable.disk import OS_DISK, Disk
from penstock.durable.keys import UNFINISHED, checked_key, checked_prefix, word_of_a_key
from penstock.durable.temp_names import is_abandoned, new_name
from penstock.errors import (
    DeterminateError,
    DurabilityLost,
    IndeterminateError,
    StoreError,
    StoreRefused,
    UsageError,
)

__all__ = ["FileBlob"]


class FileBlob:
    """A `Blob` below the folder `root`. The first write creates the folder.

    The folder is created at most once. If it existed and has disappeared, writes are rejected: a
    new folder in its place would contain only the latest objects. `stands` is true if the folder
    is known to exist.
    """

    def __init__(
        self,
        root: str,
        *,
        stands: bool = False,
        disk: Disk = OS_DISK,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._root = os.path.abspath(root)  # noqa: PTH100 - symbolic links stay as the user has them.
        self._disk = disk
        self._clock = clock
        self._folders = _Folders(disk, self._root, self._sync, stands=stands)
        self._lost = ""
        self._closed = False
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """`file:` and the absolute path."""
        return f"file:{self._root}"

    def get(self, key: str, *, start: int = 0) -> bytes | None:
        """See `Blob`."""
        self._open()
        try:
            data = self._disk.read(self._path(checked_key(key)), start)
        except _NOTHING_THERE:
            return None
        except OSError as error:
            raise self._undone("read", key, error) from error
        self._folders.root_stands = True
        return data

    def put(self, key: str, data: bytes) -> None:
        """See `Blob`."""
        self._write(key, data, self._disk.replace)

    def create(self, key: str, data: bytes) -> bool:
        """See `Blob`."""
        return self._write(key, data, self._disk.link)

    def settle(self, keys: list[str]) -> None:
        """Sync each file and its folder. Read permission is sufficient.

        Deleted files need no sync, because no reader relies on them.
        """
        self._trusted()
        folders: dict[str, str] = {}
        for key in keys:
            path = self._path(checked_key(key))
            folders.setdefault(path.rpartition("/")[0], key)
            with self._reaching("settle", key), suppress(*_NOTHING_THERE):
                self._settle(key, path)
        for folder, key in folders.items():
            with (
                self._reaching("settle", key),
                suppress(*_NOTHING_THERE),
                self._folders.held(folder, make=False) as held,
            ):
                self._sync_folder(key, held)

    def delete(self, key: str) -> None:
        """See `Blob`. After a power cut, a recently deleted object may exist again."""
        self._trusted()
        with self._reaching("delete", key), suppress(*_NOTHING_THERE):
            self._disk.remove(self._path(checked_key(key)))

    def children(self) -> list[str]:
        """Return the names of the direct subfolders, sorted."""
        self._open()
        try:
            found = self._disk.names(self._root)
        except _NOTHING_THERE:
            return []
        except OSError as error:
            raise self._undone("list", "", error) from error
        return sorted(
            each.name
            for each in found
            if each.folder and each.name != UNFINISHED and word_of_a_key(each.name)
        )

    def list(self, prefix: str, *, after: str = "") -> list[Listed]:
        """See `Blob`. Only folders that can contain `prefix` are read."""
        self._open()
        folder = checked_prefix(prefix).rpartition("/")[0]
        try:
            return sorted(self._walk(f"{folder}/" if folder else "", prefix, after))
        except OSError as error:
            raise self._undone("list", prefix, error) from error

    def sweep(self) -> int:
        """Remove the temporary files of dead writers, and return the number of removed files.

        Files of live writers are not removed. If one is removed by mistake, the link of its
        writer fails and nothing is published.
        """
        self._trusted()
        folder = f"{self._root}/{UNFINISHED}"
        swept = 0
        try:
            for found in self._disk.names(folder):
                with suppress(*_NOTHING_THERE):
                    _, modified_ms = self._disk.size_and_ctime_ms(f"{folder}/{found.name}")
                    if is_abandoned(found.name, age_ms=self._clock.now_ms() - modified_ms):
                        self._disk.remove(f"{folder}/{found.name}")
                        swept += 1
        except _NOTHING_THERE:
            return 0
        except OSError as error:
            raise self._undone("sweep", "", error) from error
        return swept

    def close(self) -> bool:
        """See `Blob`. A write in progress in another thread completes."""
        with self._lock:
            closing, self._closed = not self._closed, True
        self._folders.close()
        return closing

    def _write(self, key: str, data: bytes, publish: Callable[[int, str, int, str], None]) -> bool:
        self._trusted()
        folder, _, name = self._path(checked_key(key)).rpartition("/")
        unfinished = f"{self._root}/{UNFINISHED}"
        temp = new_name()
        with (
            self._reaching("write", key),
            self._folders.held(unfinished, make=True) as source,
            self._folders.held(folder, make=True) as target,
        ):
            try:
                self._write_temp(key, data, source.handle, temp)
                try:
                    publish(source.handle, temp, target.handle, name)
                except FileExistsError:
                    return False
                except FileNotFoundError:
                    # The temporary file was swept, or a folder was removed.
                    self._folders.forget(folder)
                    self._folders.forget(unfinished)
                    raise
                except OSError as error:
                    if error.errno in _REFUSALS:
                        raise
                    raise self._in_doubt(key) from error
                self._sync_folder(key, target)
            finally:
                with suppress(OSError):  # `put` has moved it, or the next sweep removes it.
                    self._disk.unlink(source.handle, temp)
        return True

    def _write_temp(self, key: str, data: bytes, folder: int, temp: str) -> None:
        try:
            file = self._disk.write_new(folder, temp, data)
        except FileNotFoundError:
            self._folders.forget(f"{self._root}/{UNFINISHED}")
            raise
        try:
            self._sync(key, self._disk.sync_file, file)
        finally:
            self._disk.close(file)

    def _settle(self, key: str, path: str) -> None:
        file = self._disk.open_file(path)
        try:
            self._sync(key, self._disk.sync_file, file)
        finally:
            self._disk.close(file)

    def _sync_folder(self, key: str, folder: "_Folder") -> None:
        # SUBTLE: one sync at a time for each handle. If two syncs share a handle, the kernel
        # reports a failure only to the first, and the second would succeed.
        with folder.syncing:
            self._sync(key, self._disk.sync_folder, folder.handle)

    def _sync(self, what: str, sync: Callable[[int], None], handle: int) -> None:
        if self._lost:  # Another thread may have failed since the check in `_trusted`.
            raise self._distrust()
        try:
            sync(handle)
        except OSError as error:
            self._lost = what
            raise self._distrust() from error

    @contextmanager
    def _reaching(self, verb: str, key: str) -> Iterator[None]:
        """Translate an `OSError` into a store error that states that nothing was published."""
        try:
            yield
        except OSError as error:
            raise self._undone(verb, key, error) from error

    def _walk(self, folder: str, prefix: str, after: str) -> Iterator[Listed]:
        path = f"{self._root}/{folder}".rstrip("/")
        try:
            found = self._disk.names(path)
        except _NOTHING_THERE:
            return
        for each in found:
            key = folder + each.name
            if not word_of_a_key(each.name) or key == UNFINISHED:
                continue
            if each.folder:
                inside = f"{key}/"
                if key < after and not after.startswith(inside):
                    continue  # All its keys sort before `after`.
                if inside.startswith(prefix) or prefix.startswith(inside):
                    yield from self._walk(inside, prefix, after)
            elif key.startswith(prefix) and key > after:
                try:
                    yield Listed(key, *self._disk.size_and_ctime_ms(f"{self._root}/{key}"))
                except _NOTHING_THERE:
                    # Deleted after its name was read, perhaps in favor of a newer object.
                    # The caller must see that the key existed.
                    yield Listed(key, 0, 0)

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _open(self) -> None:
        if self._closed:
            raise UsageError(f'location "{self.name}" is closed', hint="Open it again.")

    def _trusted(self) -> None:
        self._open()
        if self._lost:
            raise self._distrust()

    def _distrust(self) -> DurabilityLost:
        return DurabilityLost(
            f'location "{self.name}" rejects writes after a failed sync',
            detail=f'The sync of "{self._lost}" failed. The system may have dropped '
            "written data, and a second sync would not report the loss.",
            hint="Check the disk and the kernel's log (dmesg), then start the process again.",
        )

    def _in_doubt(self, key: str) -> IndeterminateError:
        return IndeterminateError(
            f'write of object "{key}" of location "{self.name}" is in doubt',
            hint="Check the disk and the kernel's log (dmesg).",
        )

    def _undone(self, verb: str, key: str, error: OSError) -> StoreError:
        subject = f'object "{key}" of location' if key else "location"
        message = f'could not {verb} {subject} "{self.name}"'
        detail = f"The system says: {os.strerror(error.errno or 0)}."
        if error.errno in _PASSING:
            return DeterminateError(message, detail=detail)
        hint = _REFUSALS.get(error.errno or 0, "Check the disk and the kernel's log (dmesg).")
        return StoreRefused(message, detail=detail, hint=hint)


class _Folders:
    """Open folders that are known to survive a power cut.

    A folder is a name in its parent. Another process may just have created it without a sync of
    the parent. On first use, every missing folder on the path is therefore created, and every
    parent is synced, also if another process created the folder.
    """

    def __init__(
        self,
        disk: Disk,
        root: str,
        sync: Callable[[str, Callable[[int], None], int], None],
        *,
        stands: bool,
    ) -> None:
        self.root_stands = stands
        self._disk = disk
        self._root = root
        self._sync = sync
        self._lock = threading.Lock()
        self._held: OrderedDict[str, _Folder] = OrderedDict()
        self._known: set[str] = set()
        self._closed = False

    @contextmanager
    def held(self, path: str, *, make: bool) -> Iterator["_Folder"]:
        """Yield the folder `path`, open until the block ends. With `make`, create it durably."""
        with self._lock:
            if make and path not in self._known:
                self._make_known(path)
            folder = self._held.get(path)
            if folder is None:
                folder = self._held[path] = _Folder(self._opened(path))
            else:
                self._held.move_to_end(path)
            folder.users += 1
        try:
            yield folder
        finally:
            with self._lock:
                folder.users -= 1
                if folder.users == 0 and self._held.get(path) is not folder:
                    self._disk.close(folder.handle)  # `forget` has removed it.
                self._shrink(0 if self._closed else _MOST_HELD)

    def forget(self, path: str) -> None:
        """Discard the knowledge about existing folders and the handle of `path`.

        The folder may have been removed, so the next use checks it again.
        """
        with self._lock:
            self._known.clear()
            folder = self._held.pop(path, None)
            if folder is not None and folder.users == 0:
                self._disk.close(folder.handle)

    def close(self) -> None:
        """Close every handle; a handle in use is closed at the end of its use."""
        with self._lock:
            self._closed = True
            self._shrink(0)

    def _opened(self, path: str) -> int:
        try:
            return self._disk.open_folder(path)
        except FileNotFoundError:
            self._known.clear()  # Removed while it was not open: the next write creates it.
            raise

    def _make_known(self, path: str) -> None:
        missing = self._missing(path)
        if self.root_stands and self._root in missing:
            raise StoreRefused(
                f'folder "{self._root}" of location "file:{self._root}" has disappeared',
                detail="It was there when the location was opened. Nothing was written.",
                hint="Put it back, or mount its file system again, and start the process again.",
            )
        for folder in missing:
            self._disk.make_folder(folder)
        for folder in _upwards(path):
            if folder in self._known:
                break
            parent = os.path.dirname(folder)  # noqa: PTH120
            inside = folder != self._root and folder.startswith(self._root)
            if not inside and not self._disk.same_device(folder, parent):
                break
            try:
                handle = self._disk.open_folder(parent)
            except PermissionError:
                if inside:
                    raise
                break  # Without permission, this process has created nothing there.
            try:
                self._sync(folder, self._disk.sync_folder, handle)
            finally:
                self._disk.close(handle)
        self._known.update(_upwards(path))
        self.root_stands = True

    def _missing(self, path: str) -> list[str]:
        missing: list[str] = []
        for folder in _upwards(path):
            try:
                self._disk.close(self._disk.open_folder(folder))
            except FileNotFoundError:
                missing.append(folder)
            except PermissionError:
                break
            else:
                break
        return missing[::-1]

    def _shrink(self, most: int) -> None:
        if len(self._held) <= most:
            return
        idle = [path for path, folder in self._held.items() if folder.users == 0]
        for path in idle[: len(self._held) - most]:
            self._disk.close(self._held.pop(path).handle)


@dataclass(slots=True)
class _Folder:
    handle: int
    users: int = 0
    syncing: threading.Lock = field(default_factory=threading.Lock)


_MOST_HELD: Final = 64

_NOTHING_THERE: Final = (FileNotFoundError, NotADirectoryError, IsADirectoryError)

_REFUSALS: Final = {
    errno.ENOSPC: "Make room on the disk.",
    errno.EDQUOT: "Make room within the quota of this user.",
    errno.EACCES: "Give this user permission to read and write the folder.",
    errno.EPERM: "Give this user permission to read and write the folder.",
    errno.EROFS: "Mount the file system for writing, or choose another location.",
    errno.EISDIR: "Remove the folder that has the name of this object.",
    errno.ENOTDIR: "Remove the file that stands where a folder must be.",
    errno.ENAMETOOLONG: "Choose a location with a shorter path.",
    errno.EMLINK: "Choose a file system that has hard links.",
    errno.EOPNOTSUPP: "Choose a file system that has hard links.",
    errno.ENOSYS: "Choose a file system that has hard links.",
    errno.EXDEV: "Keep all folders of the location on one file system.",
    errno.ELOOP: "Remove the symbolic link that leads back to itself.",
    errno.EINVAL: "Choose a file system that takes names and files as Linux does.",
    errno.EFBIG: "Raise the limit on the size of files (ulimit -f), or choose another file system.",
}
"""Hints by error number, for errors of a call that had no effect."""

_PASSING: Final = frozenset(
    {
        errno.ENOENT,  # The temporary file was swept, or a folder was removed.
        *(errno.EINTR, errno.EAGAIN, errno.EBUSY, errno.EDEADLK, errno.ENOLCK),
        *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS),
        *(errno.EIO, errno.ESTALE, errno.ETIMEDOUT),
        *(errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH),
        *(errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.ENOTCONN),
    }
)
"""Transient error numbers. Other errors are not retried."""


def _upwards(path: str) -> Iterator[str]:
    while path != "/":
        yield path
        path = os.path.dirname(path)  # noqa: PTH120
