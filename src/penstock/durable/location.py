"""A URL, and the store it opens.

    memory:               a fresh store of one's own
    memory:NAME           one store for the whole process
    file:./data  file:/abs/data
    s3://bucket/prefix    with the usual AWS_… environment variables

Folders of a location are locations too: `join` names one, `children` lists
them.
"""

import os
import threading
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Final, assert_never

from penstock.durable.blob import Blob
from penstock.durable.files import FileBlob
from penstock.durable.keys import UNFINISHED, word_of_a_key
from penstock.durable.memory import MemoryBlob, Shelf
from penstock.durable.objects import ObjectBlob
from penstock.errors import StoreRefused, UsageError

__all__ = ["children", "disk_error", "join", "normal", "open_blob"]

LEAST_FREE_BYTES: Final = 64 << 10
"""A disk with less is full: a commit of a few rows needs about so much."""


@dataclass(frozen=True, slots=True)
class _Memory:
    shelf: str
    prefix: str


@dataclass(frozen=True, slots=True)
class _Files:
    path: str


@dataclass(frozen=True, slots=True)
class _Objects:
    bucket: str
    prefix: str


def open_blob(url: str, *, writing: bool = False) -> Blob:
    """The store at `url`.

    For `writing`, a folder need not exist yet, and what dead writers left half
    written in it is swept. Without it nothing is made or touched by opening,
    and a folder that does not exist is refused; a reader may still write, as
    it does to place a hold.
    """
    match _parsed(url):
        case _Memory(shelf, prefix):
            name = f"memory:{shelf}/{prefix}".rstrip("/")
            return MemoryBlob(_shelf(shelf), name=name, prefix=prefix)
        case _Files(path):
            if not writing and not Path(path).is_dir():
                raise UsageError(
                    f'folder "{path}" of location "{url}" does not exist',
                    hint="Check the path; a writer makes the folder when it first writes there.",
                )
            blob = FileBlob(path, stands=not writing)
            if writing:
                blob.sweep()
            return blob
        case _Objects(bucket, prefix):
            return ObjectBlob(bucket, prefix)
        case unhandled:
            assert_never(unhandled)


def children(url: str) -> list[str]:
    """The names of the folders directly below `url`, in order; none if there is nothing."""
    match _parsed(url):
        case _Memory(shelf, prefix):
            listed = MemoryBlob(_shelf(shelf), prefix=prefix).list("")
            return sorted({each.key.partition("/")[0] for each in listed if "/" in each.key})
        case _Files(path):
            return FileBlob(path).children()
        case _Objects(bucket, prefix):
            return ObjectBlob(bucket, prefix).children()
        case unhandled:
            assert_never(unhandled)


def join(url: str, name: str) -> str:
    """The URL of the folder `name` of `url`."""
    if name == UNFINISHED or not word_of_a_key(name):
        raise UsageError(
            f'folder name "{name}" cannot be joined to location "{url}"',
            hint='Use letters, digits, dot, underscore, equals sign and hyphen; not "tmp".',
        )
    if _parsed(url) == _Memory("", ""):
        raise UsageError(
            f'location "{url}" has no folders, since each opening makes a new one',
            hint="Give it a name, for example memory:lake.",
        )
    return f"{url.rstrip('/')}/{name}"


def normal(url: str) -> str:
    """The one way to write `url`: paths absolute, no slash at the end."""
    match _parsed(url):
        case _Memory(shelf, prefix):
            return f"memory:{shelf}/{prefix}".rstrip("/")
        case _Files(path):
            return f"file:{path}"
        case _Objects(bucket, prefix):
            return f"s3://{bucket}/{prefix}".rstrip("/")
        case unhandled:
            assert_never(unhandled)


def disk_error(url: str) -> StoreRefused | None:
    """Return an error if the disk of a location is full, else None.

    A writer that finds the disk full cannot store that it did, so readers look for themselves.
    A quota of the writer's user is not visible to them.
    """
    where = _parsed(url)
    if not isinstance(where, _Files):
        return None
    try:
        disk = os.statvfs(where.path)
    except OSError:
        return None  # Reading the location reports it.
    free_blocks = disk.f_bfree if os.geteuid() == 0 else disk.f_bavail
    free_bytes = free_blocks * disk.f_frsize
    # Some file systems have no fixed number of blocks or files, and report 0 of them.
    if disk.f_blocks and free_bytes < LEAST_FREE_BYTES:
        detail = f"{free_bytes} bytes are free."
    elif disk.f_files and not disk.f_ffree:
        detail = "The file system can hold no more files."
    else:
        return None
    return StoreRefused(
        f'disk of location "{url}" is full', detail=detail, hint="Make room on the disk."
    )


def _parsed(url: str) -> _Memory | _Files | _Objects:
    scheme, colon, rest = url.partition(":")
    match scheme if colon else "":
        case "memory":
            shelf, _, prefix = rest.strip("/").partition("/")
            if all(word_of_a_key(word) for word in rest.strip("/").split("/")) or not rest:
                return _Memory(shelf, f"{prefix}/" if prefix else "")
        case "file":
            path = rest.removeprefix("//") if rest.startswith("///") else rest
            if path.startswith("~"):
                raise UsageError(
                    f'location "{url}" begins with a tilde, which only a shell understands',
                    hint="Write the path out, for example file:/home/ann/data; a folder that is "
                    "really called so is file:./~.",
                )
            if path and not path.startswith("//") and "\0" not in path:
                return _Files(os.path.abspath(path))  # noqa: PTH100 - leaves symbolic links alone.
        case "s3":
            bucket, _, prefix = rest.removeprefix("//").rstrip("/").partition("/")
            words = [bucket, *(prefix.split("/") if prefix else [])]
            if rest.startswith("//") and all(map(word_of_a_key, words)):
                return _Objects(bucket, f"{prefix}/" if prefix else "")
        case _:
            pass
    raise UsageError(f'location "{_without_secrets(url)}" is malformed', hint=_VALID)


_VALID: Final = "Write file:./data, file:/abs/data, s3://bucket/prefix, memory: or memory:NAME."


def _without_secrets(url: str) -> str:
    before, at, after = url.rpartition("@")
    return f"{before.partition('://')[0]}://…@{after}" if at else url


_shelves_lock: Final = threading.Lock()
_shelves: Final[defaultdict[str, Shelf]] = defaultdict(Shelf)


def _shelf(name: str) -> Shelf:
    if not name:
        return Shelf()
    with _shelves_lock:
        return _shelves[name]
