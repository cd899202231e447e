"""A store without transactions: one file for each key, written through in Store.

    FOLDER/NAME/keys/0215….json     the document, in a file named for its key
    FOLDER/NAME/writers.json        {"00000000-ffffffff": "3f9c2a10"}: whose the keys are

It stands for a key-value store. Each document is replaced whole, but a transaction
is not: when it breaks off, some of it is there, Loads see it, and the runtime stores
all of it again. Documents therefore come **at least once**. The end is the same where
the last write wins; where documents are reduced by `sum`, it may be counted twice.

What it does promise is that no value goes back in time. Each Open takes its range of
keys, and whoever had any of them has them no more; a write is made only by who has its
keys. Both are under one lock, held for as long as the files of one batch take. So a
stream that was taken over is told `Fenced`, in whichever process it is, and even if it
was suspended for a day. That holds as far as the lock does: in a file system of this
machine, not in one that many share and that knows no `flock`.
"""

import hashlib
import json
import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Final

import pyarrow as pa

from penstock import documentation_url
from penstock.connectors.files.atomic_files import locked, range_of, replace, rows_of, sync
from penstock.connectors.files.folder import FilesConnector, FilesEndpoint, FilesResource
from penstock.sdk import (
    Documents,
    Fenced,
    KeyRange,
    Keys,
    LoadedDocuments,
    OpenRequest,
    StateUpdate,
    Transactor,
)

__all__ = ["PlainFiles", "connector"]

LONGEST: Final = 100
"""Longer keys are named by their hash: a file name has 255 bytes at most."""

WRITERS: Final = 16
"""To sync a file is to wait, so that many are written at once."""


class PlainFiles(FilesConnector[FilesResource]):
    """Keeps each document in a file of its own."""

    name = "plain-files"
    documentation_url = documentation_url("reference/connectors.md#plain-files")
    resource = FilesResource

    def delta_updates(self, resource: FilesResource) -> bool:
        """Never: a file has one document, the last."""
        return False

    def make(self, folder: Path) -> None:
        """Where the documents go."""
        (folder / "keys").mkdir(exist_ok=True)

    def open(self, request: OpenRequest[FilesEndpoint, FilesResource]) -> "PlainTransactor":
        """The writer of a range of keys, from now on the only one."""
        return PlainTransactor(self.folders(request), request.key_range, request.cancelled)


class PlainTransactor(Transactor):
    """One stream's writer. There is no checkpoint: the recovery log has it."""

    accepts_empty = True

    def __init__(self, folders: list[Path], key_range: KeyRange, gave_up: threading.Event) -> None:
        self._folders = folders
        self._key_range = key_range
        self._own = secrets.token_hex(4)
        self._gave_up = gave_up
        self._pool = ThreadPoolExecutor(WRITERS, thread_name_prefix="plain-files")
        for folder in folders:
            self._take_over(folder)

    def _take_over(self, folder: Path) -> None:
        with locked(folder, self._gave_up):
            last = _writers(folder).items()
            kept = {key: own for key, own in last if not range_of(key).overlaps(self._key_range)}
            writers = {**kept, str(self._key_range): self._own}
            replace(folder / "writers.json", json.dumps(writers).encode())
            sync(folder)

    def load(self, keys: Iterator[Keys]) -> Iterator[LoadedDocuments]:
        """Read the files of `keys` that are there."""
        for batch in keys:
            folder = self._folders[batch.binding.index]
            found = [_read(_path(folder, key)) for key in batch.packed.to_pylist()]
            yield LoadedDocuments(batch.binding, pa.array(found, pa.binary()).drop_null())

    def store(self, documents: Iterator[Documents]) -> None:
        """Write each batch through, unless somebody else has taken over."""
        for batch in documents:
            folder = self._folders[batch.binding.index]
            with locked(folder, self._gave_up):
                if _writers(folder).get(str(self._key_range)) != self._own:
                    raise Fenced(
                        f'a newer stream has taken over {self._key_range} of "{folder}"',
                        hint="Stop; the other one goes on.",
                    )
                if batch.empties:
                    for path in (folder / "keys").iterdir():
                        path.unlink()
                written = [
                    self._pool.submit(_write, _path(folder, key), None if deleted else document)
                    for key, deleted, document in rows_of(batch)
                ]
                # SUBTLE: all of them, whatever becomes of one; none may outlast the lock.
                wait(written)
            for each in written:
                each.result()

    def start_commit(self, checkpoint: bytes) -> StateUpdate | None:
        """The documents are there already; let their names survive a crash, too."""
        for folder in self._folders:
            sync(folder / "keys")
        return None

    def cancel(self) -> None:
        """Wait for no lock any more."""
        self._gave_up.set()

    def close(self) -> None:
        """End the threads; there is nothing that could be rolled back."""
        self._pool.shutdown()


def _writers(folder: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads(_read(folder / "writers.json") or b"{}")
    return found


def _path(folder: Path, key: bytes) -> Path:
    name = key.hex() if len(key) <= LONGEST else f"sha256-{hashlib.sha256(key).hexdigest()}"
    return folder / "keys" / f"{name}.json"


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _write(path: Path, document: bytes | None) -> None:
    if document is None:
        path.unlink(missing_ok=True)
    else:
        replace(path, document)


def connector() -> PlainFiles:
    """One that can be served."""
    return PlainFiles()
