"""Idempotent apply: a transaction is staged in Store, and applied once it is committed.

    FOLDER/NAME/staged/00000000-ffffffff.18.3f9c2a10.jsonl   the documents of a transaction
    FOLDER/NAME/table.jsonl                                  the table: see `table.py`

The recovery log is authoritative. start_commit returns connector state that numbers the
transaction and names its files; once the log has committed that, they are as good as
applied, and whoever comes to Acknowledge next does it. Documents come **exactly once**:

    a transaction is applied  ⇔  its number ≤ the last one of its range in the table

so to apply it again, after a crash or by a stream that was taken over, is to do nothing.
That goes for delta updates, too, which are appended.
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
    """A table, and what it keeps."""

    delta_updates: bool = Setting(
        default=False, description="keep every document, instead of the last by key"
    )


class StagedFiles(FilesConnector[StagedResource]):
    """Keeps a table in a file, which it replaces once for each transaction."""

    name = "staged-files"
    documentation_url = documentation_url("reference/connectors.md#staged-files")
    resource = StagedResource

    def delta_updates(self, resource: StagedResource) -> bool:
        """As the user likes."""
        return resource.delta_updates

    def make(self, folder: Path) -> None:
        """Create an empty table, and the folder of transactions that are not applied yet."""
        (folder / "staged").mkdir(exist_ok=True)
        Table(folder).create()

    def open(self, request: OpenRequest[FilesEndpoint, StagedResource]) -> "StagedTransactor":
        """The writer of a range of keys; who else writes them is the recovery log's to say."""
        return StagedTransactor(request, [Table(each) for each in self.folders(request)])


class StagedTransactor(Transactor):
    """One stream's transactions. There is no checkpoint: the recovery log has it."""

    accepts_empty = True

    def __init__(
        self, request: OpenRequest[FilesEndpoint, StagedResource], tables: list[Table]
    ) -> None:
        self._root, self._tables = request.endpoint.folder, tables
        self._range = str(request.key_range)
        self._committed = request.state
        """By range, the last transaction that is committed; applied, or not yet."""

        # Once they are applied, those whose keys we have taken over are of no use.
        ours, state = request.key_range, request.state
        self._past = {key: None for key in state if range_of(key).overlaps(ours)}
        numbers = [each["transaction"] for each in state.values()]
        numbers += [each for table in tables for each in table.applied().values()]
        self._number = max(numbers, default=0)
        self._own = secrets.token_hex(4)  # A stream that was taken over may use the same number.
        self._staging: dict[Path, BinaryIO] = {}
        self._gave_up = request.cancelled
        self._clean({name for each in state.values() for name in each["staged"]})

    def _clean(self, named: set[str]) -> None:
        """Remove what was staged for our range and never committed."""
        for table in self._tables:
            for each in table.folder.glob(f"staged/{self._range}.*"):
                if str(each.relative_to(self._root)) not in named:
                    each.unlink(missing_ok=True)

    def acknowledge(self) -> None:
        """Apply what is committed, by this stream or by those before it."""
        for key_range, each in self._committed.items():
            for staged in map(self._root.joinpath, each["staged"]):
                table = Table(staged.parent.parent)
                table.apply(staged, key_range, each["transaction"], self._gave_up)
        self._committed = {}

    def load(self, keys: Iterator[Keys]) -> Iterator[LoadedDocuments]:
        """Look up `keys` in tables that are read once for all of them."""
        tables: dict[int, dict[str, bytes]] = {}
        for batch in keys:
            at = batch.binding.index
            if at not in tables:
                tables[at] = self._tables[at].by_key()
            found = [tables[at].get(key.hex()) for key in batch.packed.to_pylist()]
            yield LoadedDocuments(batch.binding, pa.array(found, pa.binary()).drop_null())

    def store(self, documents: Iterator[Documents]) -> None:
        """Write a file for each table."""
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
        """Name what was staged; what was named before is applied."""
        for path, file in self._staging.items():
            file.flush()
            os.fsync(file.fileno())
            file.close()
            sync(path.parent)
        # A list, for a patch replaces it; an object would be merged with that of before.
        names = [str(path.relative_to(self._root)) for path in self._staging]
        self._staging = {}
        self._committed = {self._range: {"transaction": self._number, "staged": names}}
        patch = {**self._past, **self._committed}
        return StateUpdate(json.dumps(patch).encode(), patch=True)

    def cancel(self) -> None:
        """Wait for no lock any more."""
        self._gave_up.set()

    def close(self) -> None:
        """Forget what is staged and was not named."""
        for path, file in self._staging.items():
            file.close()
            path.unlink(missing_ok=True)


def connector() -> StagedFiles:
    """One that can be served."""
    return StagedFiles()
