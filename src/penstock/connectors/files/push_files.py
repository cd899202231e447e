"""Push-only store: every document is appended to a file and never loaded.

    FOLDER/NAME/pushed.jsonl    {"binding", "key", "deleted", "document"}

The connector is an example of a webhook, a queue or a topic. Documents are pushed during Store,
before the transaction commits, so delivery is **at least once**: a transaction that failed is
pushed again. Nothing marks the duplicates, and a stream that was taken over may still push. Readers
of the file must tolerate both. With `sum`, a reader counts duplicates twice.

Documents are durable when start_commit returns.
"""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

from penstock import documentation_url
from penstock.connectors.files.atomic_files import line_of, locked, rows_of, sync
from penstock.connectors.files.folder import FilesConnector, FilesEndpoint, FilesResource
from penstock.sdk import Documents, OpenRequest, StateUpdate, Transactor

__all__ = ["PushFiles", "connector"]


class PushFiles(FilesConnector[FilesResource]):
    """Connector that appends every document to a file."""

    name = "push-files"
    documentation_url = documentation_url("reference/connectors.md#push-files")
    resource = FilesResource
    accepts_empty = False  # Pushed documents cannot be recalled.

    def delta_updates(self, resource: FilesResource) -> bool:
        """Return True: pushed documents can be neither loaded nor replaced."""
        return True

    def open(self, request: OpenRequest[FilesEndpoint, FilesResource]) -> "PushTransactor":
        """Return a writer that appends."""
        return PushTransactor(self.folders(request))


class PushTransactor(Transactor):
    """Writer of one stream, without load. The recovery log has the checkpoint."""

    def __init__(self, folders: list[Path]) -> None:
        self._folders = folders
        self._pushed: set[Path] = set()
        """Folders with lines of this transaction that are not synced."""

        self._cancelled = threading.Event()

    def store(self, documents: Iterator[Documents]) -> None:
        """Push each batch when it arrives."""
        for batch in documents:
            folder = self._folders[batch.binding.index]
            keys = batch.keys().rows()
            lines = [
                line_of({"binding": str(batch.binding), "key": key, "deleted": deleted}, document)
                for key, (_, deleted, document) in zip(keys, rows_of(batch), strict=True)
            ]
            with locked(folder, self._cancelled):
                _append(folder / "pushed.jsonl", b"".join(lines))
            self._pushed.add(folder)

    def start_commit(self, checkpoint: bytes) -> StateUpdate | None:
        """Make all pushed documents durable."""
        for folder in self._pushed:
            with (folder / "pushed.jsonl").open("rb") as file:
                os.fsync(file.fileno())
            sync(folder)
        self._pushed.clear()
        return None

    def cancel(self) -> None:
        """Stop waiting for locks."""
        self._cancelled.set()


def _append(path: Path, lines: bytes) -> None:
    """Append complete lines, and remove an incomplete last line first."""
    with path.open("a+b") as file:
        end = file.seek(0, os.SEEK_END)
        if end and os.pread(file.fileno(), 1, end - 1) != b"\n":
            # Its writer was killed, and will push the document again.
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
        file.write(lines)


def connector() -> PushFiles:
    """Return the connector."""
    return PushFiles()
