"""Store without transactions: one file for each key, written during Store.

    FOLDER/NAME/keys/0215….json     the document, in a file named after its key
    FOLDER/NAME/writers.json        {"00000000-ffffffff": "3f9c2a10"}: writers of key ranges

The connector is an example of a key-value store. Each document is replaced atomically, but a
transaction is not atomic: a failed transaction leaves some of its documents, Loads return them, and
the runtime stores all documents again. Delivery is **at least once**. With last-write-wins, the
result is the same. With `sum`, a value may be counted twice.

No value is replaced by an older one. Each Open takes over its key range from all previous writers,
and a stream writes only while it owns its keys. Both hold one lock, during one batch of files. A
stream that was taken over raises `Fenced`, in any process and after any suspension. The guarantee
needs `flock`: it holds in a local file system, not in a shared one without locks.
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
"""Longer keys are named by their hash, because file names are limited to 255 bytes."""

WRITERS: Final = 16
"""Number of files written concurrently, because each waits for fsync."""


class PlainFiles(FilesConnector[FilesResource]):
    """Connector that stores each document in its own file."""

    name = "plain-files"
    documentation_url = documentation_url("reference/connectors.md#plain-files")
    resource = FilesResource

    def delta_updates(self, resource: FilesResource) -> bool:
        """Return False: a file has one document."""
        return False

    def make(self, folder: Path) -> None:
        """Create the folder of the documents."""
        (folder / "keys").mkdir(exist_ok=True)

    def open(self, request: OpenRequest[FilesEndpoint, FilesResource]) -> "PlainTransactor":
        """Return the only writer of a key range."""
        return PlainTransactor(self.folders(request), request.key_range, request.cancelled)


class PlainTransactor(Transactor):
    """Writer of one stream. The recovery log has the checkpoint."""

    accepts_empty = True

    def __init__(
        self, folders: list[Path], key_range: KeyRange, cancelled: threading.Event
    ) -> None:
        self._folders = folders
        self._key_range = key_range
        self._own = secrets.token_hex(4)
        self._cancelled = cancelled
        self._pool = ThreadPoolExecutor(WRITERS, thread_name_prefix="plain-files")
        for folder in folders:
            self._take_over(folder)

    def _take_over(self, folder: Path) -> None:
        with locked(folder, self._cancelled):
            last = _writers(folder).items()
            others = {key: own for key, own in last if not range_of(key).overlaps(self._key_range)}
            writers = {**others, str(self._key_range): self._own}
            replace(folder / "writers.json", json.dumps(writers).encode())
            sync(folder)

    def load(self, keys: Iterator[Keys]) -> Iterator[LoadedDocuments]:
        """Read the files of `keys` that exist."""
        for batch in keys:
            folder = self._folders[batch.binding.index]
            documents = [_read(_path(folder, key)) for key in batch.packed.to_pylist()]
            yield LoadedDocuments(batch.binding, pa.array(documents, pa.binary()).drop_null())

    def store(self, documents: Iterator[Documents]) -> None:
        """Write each batch, unless another stream has taken over."""
        for batch in documents:
            folder = self._folders[batch.binding.index]
            with locked(folder, self._cancelled):
                if _writers(folder).get(str(self._key_range)) != self._own:
                    raise Fenced(
                        f'newer stream has taken over key range {self._key_range} of "{folder}"',
                        hint="Stop this process. The newer stream continues.",
                    )
                if batch.empties:
                    for path in (folder / "keys").iterdir():
                        path.unlink()
                written = [
                    self._pool.submit(_write, _path(folder, key), None if deleted else document)
                    for key, deleted, document in rows_of(batch)
                ]
                # SUBTLE: wait for all, even if one fails: no write may outlast the lock.
                wait(written)
            for future in written:
                future.result()

    def start_commit(self, checkpoint: bytes) -> StateUpdate | None:
        """Make the names of the documents durable. Their contents already are."""
        for folder in self._folders:
            sync(folder / "keys")
        return None

    def cancel(self) -> None:
        """Stop waiting for locks."""
        self._cancelled.set()

    def close(self) -> None:
        """End the threads. Nothing can be rolled back."""
        self._pool.shutdown()


def _writers(folder: Path) -> dict[str, str]:
    writers: dict[str, str] = json.loads(_read(folder / "writers.json") or b"{}")
    return writers


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
    """Return the connector."""
    return PlainFiles()
