"""The disk operations of `FileBlob`, one system call each.

`FileBlob` decides their order, which determines the contents after a power cut. Tests replace
`OsDisk` by a disk that records the order (`penstock.testing.stores`), under the same code. Every
method raises `OSError` as the system does. No method retries.

Folders are held open and identified by a file descriptor: this is faster, and a path may later
denote another folder while a descriptor does not.
"""

import fcntl
import os
import re
import stat
from dataclasses import dataclass
from typing import Final, Protocol

from penstock.errors import UsageError

__all__ = ["OS_DISK", "Disk", "FolderEntry", "OsDisk", "lake_umask"]


@dataclass(frozen=True, slots=True)
class FolderEntry:
    """One name in a folder."""

    name: str
    folder: bool


class Disk(Protocol):
    """Disk operations. Paths are absolute; the caller closes handles."""

    def make_folder(self, path: str) -> bool:
        """Create a folder in an existing one, and return False if it exists."""
        ...

    def open_folder(self, path: str) -> int:
        """Return a handle of a folder."""
        ...

    def same_device(self, path: str, other: str) -> bool:
        """Return whether both paths are on one file system."""
        ...

    def write_new(self, folder: int, name: str, data: bytes) -> int:
        """Create a file, write all of `data`, and return a handle of the file."""
        ...

    def open_file(self, path: str) -> int:
        """Return a handle for an fsync of a file of another writer; needs read permission only."""
        ...

    def sync_file(self, file: int) -> None:
        """Make the contents of `file` durable."""
        ...

    def link(self, source: int, name: str, target: int, as_name: str) -> None:
        """Link a file into the folder `target`; fail if the name exists there."""
        ...

    def replace(self, source: int, name: str, target: int, as_name: str) -> None:
        """Move a file into the folder `target`, and replace an existing file."""
        ...

    def sync_folder(self, folder: int) -> None:
        """Make the names in `folder` durable."""
        ...

    def unlink(self, folder: int, name: str) -> None:
        """Remove a name from an open folder."""
        ...

    def remove(self, path: str) -> None:
        """Remove the file at `path`."""
        ...

    def close(self, handle: int) -> None:
        """Close a handle."""
        ...

    def read(self, path: str, start: int = 0) -> bytes:
        """Return the contents of a file from `start` on."""
        ...

    def names(self, path: str) -> list[FolderEntry]:
        """Return the names in a folder, in no order."""
        ...

    def size_and_ctime_ms(self, path: str) -> tuple[int, int]:
        """Return the size of a file and the time of its link, in milliseconds.

        The file may have been written earlier: a writer may pause between write and link.
        """
        ...


class OsDisk:
    """Disk operations of the operating system."""

    def make_folder(self, path: str) -> bool:
        try:
            os.mkdir(path, 0o777 & ~lake_umask())  # noqa: PTH102 - a plain path is what the seam speaks.
        except FileExistsError:
            return False
        return True

    def open_folder(self, path: str) -> int:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def same_device(self, path: str, other: str) -> bool:
        return os.stat(path).st_dev == os.stat(other).st_dev  # noqa: PTH116

    def write_new(self, folder: int, name: str, data: bytes) -> int:
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
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def sync_file(self, file: int) -> None:
        _sync(file)

    def link(self, source: int, name: str, target: int, as_name: str) -> None:
        os.link(name, as_name, src_dir_fd=source, dst_dir_fd=target)

    def replace(self, source: int, name: str, target: int, as_name: str) -> None:
        os.replace(name, as_name, src_dir_fd=source, dst_dir_fd=target)

    def sync_folder(self, folder: int) -> None:
        _sync(folder)

    def unlink(self, folder: int, name: str) -> None:
        os.unlink(name, dir_fd=folder)

    def remove(self, path: str) -> None:
        os.unlink(path)  # noqa: PTH108

    def close(self, handle: int) -> None:
        os.close(handle)

    def read(self, path: str, start: int = 0) -> bytes:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - half the time of Path.
            if start:
                file.seek(start)
            return file.readall()

    def names(self, path: str) -> list[FolderEntry]:
        with os.scandir(path) as entries:
            return [FolderEntry(entry.name, entry.is_dir()) for entry in entries]

    def size_and_ctime_ms(self, path: str) -> tuple[int, int]:
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
    # On macOS, fsync does not flush the cache of the drive; F_FULLFSYNC does.
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is None:
        os.fsync(handle)
    else:
        fcntl.fcntl(handle, full)


OS_DISK: Final = OsDisk()
