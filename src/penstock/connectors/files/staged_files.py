"""Idempotent apply: a transaction is staged in Store, and applied after its commit.

    FOLDER/NAME/staged/00000000-ffffffff.18.3f9c2a10.jsonl   the documents of a transaction
    FOLDER/NAME/table.jsonl                                  the table: see `table.py`

The recovery log is authoritative. start_commit returns connector state with the number and the
files of the transaction. After the log has committed this state, the next Acknowledge of any stream
applies the files. Delivery is **exactly once**:

    a transaction is applied  ⇔  its number ≤ the last number of its key range in the table

Applying it again, after a crash or by a stream that was taken over, has no effect. This includes
delta updates, which are appended.
"""

import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
from pydantic import Field as Setting

from penstock import documentation_url
from penstock.connectors.files.atomic_files import line_of, range_of, rows_of, sync
from penstock.connectors.files.folder import FilesConnector, FilesEndpoint, FilesResource
from penstock.connectors.files.table import EMPTIES, Table
from penstock.sdk import Documents, Keys, LoadedDocuments, OpenRequest, StateUpdate, Transactor

__all__ = ["StagedFiles", "StagedResource", "connector"]


class StagedResource(FilesResource):
    """Configuration of a table."""

    delta_updates: bool = Setting(
        default=False, description="store every document, instead of the last by key"
    )


class StagedFiles(FilesConnector[StagedResource]):
    """Connector that stores a table in a file, and replaces it in each transaction."""

    name = "staged-files"
    documentation_url = documentation_url("reference/connectors.md#staged-files")
    resource = StagedResource

    def delta_updates(self, resource: StagedResource) -> bool:
        """Return the setting of the resource."""
        return resource.delta_updates

    def make(self, folder: Path) -> None:
        """Create an empty table, and the folder of transactions that are not applied yet."""
        (folder / "staged").mkdir(exist_ok=True)
        Table(folder).create()

    def open(self, request: OpenRequest[FilesEndpoint, StagedResource]) -> "StagedTransactor":
        """Return a writer of a key range. The recovery log fences other writers."""
        return StagedTransactor(request, [Table(folder) for folder in self.folders(request)])


class StagedTransactor(Transactor):
    """Transactions of one stream. The recovery log has the checkpoint."""

    accepts_empty = True

    def __init__(
        self, request: OpenRequest[FilesEndpoint, StagedResource], tables: list[Table]
    ) -> None:
        self._root, self._tables = request.endpoint.folder, tables
        self._range = str(request.key_range)
        self._committed = request.state
        """Last committed transaction by key range, applied or not."""

        # Entries of overlapping key ranges are removed after they are applied.
        ours, state = request.key_range, request.state
        self._past = {key: None for key in state if range_of(key).overlaps(ours)}
        numbers = [entry["transaction"] for entry in state.values()]
        numbers += [number for table in tables for number in table.applied().values()]
        self._number = max(numbers, default=0)
        self._own = secrets.token_hex(4)  # A stream that was taken over may use the same number.
        self._staging: dict[Path, BinaryIO] = {}
        self._cancelled = request.cancelled
        self._clean({name for entry in state.values() for name in entry["staged"]})

    def _clean(self, named: set[str]) -> None:
        """Remove staged files of this key range that were never committed."""
        for table in self._tables:
            for path in table.folder.glob(f"staged/{self._range}.*"):
                if str(path.relative_to(self._root)) not in named:
                    path.unlink(missing_ok=True)

    def acknowledge(self) -> None:
        """Apply committed transactions of this stream and of earlier ones."""
        for key_range, entry in self._committed.items():
            for staged in map(self._root.joinpath, entry["staged"]):
                table = Table(staged.parent.parent)
                table.apply(staged, key_range, entry["transaction"], self._cancelled)
        self._committed = {}

    def load(self, keys: Iterator[Keys]) -> Iterator[LoadedDocuments]:
        """Look up `keys` in tables. Each table is read once."""
        tables: dict[int, dict[str, bytes]] = {}
        for batch in keys:
            index = batch.binding.index
            if index not in tables:
                tables[index] = self._tables[index].by_key()
            documents = [tables[index].get(key.hex()) for key in batch.packed.to_pylist()]
            yield LoadedDocuments(batch.binding, pa.array(documents, pa.binary()).drop_null())

    def store(self, documents: Iterator[Documents]) -> None:
        """Stage the documents in one file per table."""
        self._number += 1
        name = f"{self._range}.{self._number}.{self._own}.jsonl"
        for batch in documents:
            path = self._tables[batch.binding.index].folder / "staged" / name
            if path not in self._staging:
                self._staging[path] = path.open("xb")
            if batch.empties:
                self._staging[path].write(EMPTIES)
            self._staging[path].writelines(
                line_of({"key": key.hex(), "deleted": deleted}, document)
                for key, deleted, document in rows_of(batch)
            )

    def start_commit(self, checkpoint: bytes) -> StateUpdate | None:
        """Sync the staged files, and return connector state that names them."""
        for path, file in self._staging.items():
            file.flush()
            os.fsync(file.fileno())
            file.close()
            sync(path.parent)
        # A list, because a merge patch replaces lists but merges objects.
        names = [str(path.relative_to(self._root)) for path in self._staging]
        self._staging = {}
        self._committed = {self._range: {"transaction": self._number, "staged": names}}
        patch = {**self._past, **self._committed}
        return StateUpdate(json.dumps(patch).encode(), patch=True)

    def cancel(self) -> None:
        """Stop waiting for locks."""
        self._cancelled.set()

    def close(self) -> None:
        """Remove staged files that were not committed."""
        for path, file in self._staging.items():
            file.close()
            path.unlink(missing_ok=True)


def connector() -> StagedFiles:
    """Return the connector."""
    return StagedFiles()
