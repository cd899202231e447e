"""The few things we ask of a disk, one system call each.

`FileBlob` decides in which order they happen, and that order is what survives
a power cut; so a double that records it (`penstock.testing.stores`) can stand
in here and the very same code runs over it. Every method raises `OSError` as
the system does, and nothing here catches, retries or decides.

Folders are held open and named by a number, for speed and because a name may
come to mean another folder while the number does not.
"""

import fcntl
import os
import re
import stat
from dataclasses import dataclass
from typing import Final, Protocol

from penstock.errors import UsageError

__all__ = ["OS_DISK", "Disk", "Found", "OsDisk", "lake_umask"]


@dataclass(frozen=True, slots=True)
class Found:
    """One name in a folder."""

    name: str
    folder: bool


class Disk(Protocol):
    """What `FileBlob` does to a disk. Paths are absolute; handles are closed by their owner."""

    def make_folder(self, path: str) -> bool:
        """Make one folder below an existing one; False if it is there already."""
        ...

    def open_folder(self, path: str) -> int:
        """A handle on a folder."""
        ...

    def same_device(self, path: str, other: str) -> bool:
        """Whether both lie on one file system."""
        ...

    def write_new(self, folder: int, name: str, data: bytes) -> int:
        """Make a file that was not there, write all of `data`, and return a handle on it."""
        ...

    def open_file(self, path: str) -> int:
        """A handle on a file, for syncing what someone else wrote; needs only to read it."""
        ...

    def sync_file(self, file: int) -> None:
        """Make what was written to `file` survive a power cut."""
        ...

    def link(self, source: int, name: str, target: int, as_name: str) -> None:
        """Give a file a second name in the folder `target`, if that name is free."""
        ...

    def replace(self, source: int, name: str, target: int, as_name: str) -> None:
        """Move a file over whatever bears the name in the folder `target`."""
        ...

    def sync_folder(self, folder: int) -> None:
        """Make the names in `folder` survive a power cut."""
        ...

    def unlink(self, folder: int, name: str) -> None:
        """Take a name away from a folder that is held open."""
        ...

    def remove(self, path: str) -> None:
        """Take a name away, wherever its path leads now."""
        ...

    def close(self, handle: int) -> None:
        """Give a handle back."""
        ...

    def read(self, path: str, start: int = 0) -> bytes:
        """A file, from `start` on."""
        ...

    def names(self, path: str) -> list[Found]:
        """What is in a folder, in no order."""
        ...

    def size_and_ctime_ms(self, path: str) -> tuple[int, int]:
        """How large a file is, and when it came to stand there, in milliseconds.

        Not when it was written: a writer may pause between writing and linking.
        """
        ...


class OsDisk:
    """The real one."""

    def make_folder(self, path: str) -> bool:
        """See `Disk`."""
        try:
            os.mkdir(path, 0o777 & ~lake_umask())  # noqa: PTH102 - a plain path is what the seam speaks.
        except FileExistsError:
            return False
        return True

    def open_folder(self, path: str) -> int:
        """See `Disk`."""
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def same_device(self, path: str, other: str) -> bool:
        """See `Disk`."""
        return os.stat(path).st_dev == os.stat(other).st_dev  # noqa: PTH116

    def write_new(self, folder: int, name: str, data: bytes) -> int:
        """See `Disk`."""
        file = os.open(name, _NEW, 0o666 & ~lake_umask(), dir_fd=folder)
        try:
            written = os.write(file, data)
            while written < len(data):  # The system writes at most 2 GiB at a time.
                written += os.write(file, memoryview(data)[written:])
        except BaseException:
            os.close(file)
            raise
        return file

    def open_file(self, path: str) -> int:
        """See `Disk`."""
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def sync_file(self, file: int) -> None:
        """See `Disk`."""
        _sync(file)

    def link(self, source: int, name: str, target: int, as_name: str) -> None:
        """See `Disk`."""
        os.link(name, as_name, src_dir_fd=source, dst_dir_fd=target)

    def replace(self, source: int, name: str, target: int, as_name: str) -> None:
        """See `Disk`."""
        os.replace(name, as_name, src_dir_fd=source, dst_dir_fd=target)

    def sync_folder(self, folder: int) -> None:
        """See `Disk`."""
        _sync(folder)

    def unlink(self, folder: int, name: str) -> None:
        """See `Disk`."""
        os.unlink(name, dir_fd=folder)

    def remove(self, path: str) -> None:
        """See `Disk`."""
        os.unlink(path)  # noqa: PTH108

    def close(self, handle: int) -> None:
        """See `Disk`."""
        os.close(handle)

    def read(self, path: str, start: int = 0) -> bytes:
        """See `Disk`."""
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - half the time of Path.
            if start:
                file.seek(start)
            return file.readall()

    def names(self, path: str) -> list[Found]:
        """See `Disk`."""
        with os.scandir(path) as entries:
            return [Found(entry.name, entry.is_dir()) for entry in entries]

    def size_and_ctime_ms(self, path: str) -> tuple[int, int]:
        """See `Disk`."""
        status = os.stat(path)  # noqa: PTH116
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(path)
        return status.st_size, status.st_ctime_ns // 1_000_000


_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC

UMASK: Final = "PENSTOCK_UMASK"
"""Variable with the permissions that others do not get, in octal."""

OWNER_ONLY: Final = 0o077


def lake_umask() -> int:
    """Return the permission bits that files and folders of a lake are created without.

    Raises:
        UsageError: the variable holds no such bits.
    """
    text = os.environ.get(UMASK)
    if not text:
        return OWNER_ONLY
    if re.fullmatch("0*[0-7]{1,3}", text) is None or int(text, 8) & 0o700:
        raise UsageError(
            f'variable {UMASK} is "{text}"',
            hint=f"Give octal permission bits that only group and others lose: {UMASK}=027",
        )
    return int(text, 8)


def _sync(handle: int) -> None:
    # On macOS fsync stops at the drive's cache, and this goes through it.
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is None:
        os.fsync(handle)
    else:
        fcntl.fcntl(handle, full)


OS_DISK: Final = OsDisk()
