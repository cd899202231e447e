"""Push-only: every document is a line at the end of a file, and is never asked for.

    FOLDER/NAME/pushed.jsonl    {"binding", "key", "deleted", "document"}

It stands for a webhook, a queue or a topic. Documents are pushed in Store, before
anybody knows whether the transaction commits, so each comes **at least once**: what
broke off is pushed again. Nothing tells the second time from the first, and nothing
keeps a stream that was taken over from pushing once more. Who reads the file must be
able to bear both; if documents are reduced by `sum`, that reader counts twice.

What start_commit has answered for survives a crash.
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
    """Appends every document to a file."""

    name = "push-files"
    documentation_url = documentation_url("reference/connectors.md#push-files")
    resource = FilesResource
    accepts_empty = False  # What was pushed is with whoever reads it.

    def delta_updates(self, resource: FilesResource) -> bool:
        """Always: what was pushed cannot be looked up, nor replaced."""
        return True

    def open(self, request: OpenRequest[FilesEndpoint, FilesResource]) -> "PushTransactor":
        """A writer that appends."""
        return PushTransactor(self.folders(request))


class PushTransactor(Transactor):
    """One stream's pushes. There is no load, and no checkpoint: the recovery log has it."""

    def __init__(self, folders: list[Path]) -> None:
        self._folders = folders
        self._pushed: set[Path] = set()
        """What this transaction has written to, and is not synced."""

        self._gave_up = threading.Event()

    def store(self, documents: Iterator[Documents]) -> None:
        """Push each batch as it comes."""
        for batch in documents:
            folder = self._folders[batch.binding.index]
            keys = batch.keys().rows()
            lines = [
                line_of({"binding": str(batch.binding), "key": key, "deleted": deleted}, document)
                for key, (_, deleted, document) in zip(keys, rows_of(batch), strict=True)
            ]
            with locked(folder, self._gave_up):
                _append(folder / "pushed.jsonl", b"".join(lines))
            self._pushed.add(folder)

    def start_commit(self, checkpoint: bytes) -> StateUpdate | None:
        """Nothing is to be remembered but that all of it is there."""
        for folder in self._pushed:
            with (folder / "pushed.jsonl").open("rb") as file:
                os.fsync(file.fileno())
            sync(folder)
        self._pushed.clear()
        return None

    def cancel(self) -> None:
        """Wait for no lock any more."""
        self._gave_up.set()


def _append(path: Path, lines: bytes) -> None:
    """Add whole lines, after the last that is whole."""
    with path.open("a+b") as file:
        end = file.seek(0, os.SEEK_END)
        if end and os.pread(file.fileno(), 1, end - 1) != b"\n":
            # Whoever wrote this was killed meanwhile, and will push it again.
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
        file.write(lines)


def connector() -> PushFiles:
    """One that can be served."""
    return PushFiles()
