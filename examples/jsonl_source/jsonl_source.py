"""Source of a folder of JSON-lines files.

Files only grow: a program appends lines to them, or adds files. Each line becomes one row of the
collection `SOURCE`, exactly once, with the name of its file and the offset of its first byte. A
line that cannot be decoded becomes a row of `SOURCE_errors`.

    sources:
      events:
        jsonl:
          folder: /var/log/events
          columns: {id: bigint, name: text}
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, field_validator

from penstock.clock import Clock
from penstock.data.remap_form import make_form
from penstock.errors import DefiniteError, TransientError, UsageError
from penstock.progress import Frontier
from penstock.sources.context import SnapshotLoader, StateStore, TickTransaction
from penstock.sources.formats import JsonFormat
from penstock.sources.registry import SourceKind
from penstock.sources.source import CollectionOutline, Probe

PLACE = pa.schema([("file", pa.string()), ("offset", pa.int64())])
"""Columns that identify a line: file name, and offset of the first byte."""

ERRORS = pa.schema([*PLACE, ("reason", pa.string()), ("line", pa.binary())])
BLOCK_BYTES = 8 << 20
"""Size of the lines that are decoded at once."""


class JsonlConfig(BaseModel):
    """A folder of JSON-lines files."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    folder: Path
    """Folder of the files *.jsonl."""

    columns: dict[str, str]
    """Type name of each member that becomes a column."""

    @field_validator("columns")
    @classmethod
    def _check_columns(cls, columns: dict[str, str]) -> dict[str, str]:
        try:
            JsonFormat.of(columns)
        except UsageError as error:
            raise ValueError(f"{error}; {error.hint}") from None
        return columns


class JsonlSource:
    """Source of one folder. A partition is a file, its position the end of the lines read."""

    kind = "jsonl"

    def __init__(self, name: str, config: JsonlConfig, clock: Clock) -> None:
        self._name = name
        self._errors = f"{name}_errors"
        self._folder = config.folder
        self._format = JsonFormat.of(config.columns)
        self._clock = clock
        self._bound: Frontier[str] | None = None
        self._end: Frontier[str] = Frontier()
        self._bad = 0

    def open(self, state: StateStore, loader: SnapshotLoader, bound: Frontier[str] | None) -> None:
        """Create the collections, unless they exist, and resume from `bound`."""
        self._bound = bound
        loader.create(self._name, self._schema, PLACE.names)
        loader.create(self._errors, ERRORS, PLACE.names)

    def probe(self) -> Probe:
        """Return the end of the last complete line of each file."""
        bound = self._bound or Frontier()
        try:
            ends = {
                path.name: end_of_lines(path, bound[path.name])
                for path in sorted(self._folder.glob("*.jsonl"))
            }
            if not self._folder.is_dir():
                raise FileNotFoundError(self._folder)
        except OSError as error:
            raise TransientError(
                f'could not read folder "{self._folder}" of source "{self._name}"',
                detail=f"{error}.",
            ) from error
        self._end = Frontier(ends)
        return Probe(self._end, self._clock.now_ms())

    def read_into(self, tick: TickTransaction, up_to: Frontier[str]) -> Frontier[str]:
        """Read the lines between `bound` and `up_to`."""
        bound = self._bound or Frontier()
        if self._bound is None:
            tick.begin(self._name)
            tick.begin(self._errors)
        for file, end in up_to.items():
            for offset, block in read_blocks(self._folder / file, bound[file], end):
                self._put(tick, file, offset, block)
        return bound | up_to

    def _put(self, tick: TickTransaction, file: str, offset: int, block: bytes) -> None:
        """Decode complete lines, which start at `offset`, and add them to the tick."""
        lines = block.split(b"\n")[:-1]
        offsets = [offset]
        for line in lines[:-1]:
            offsets.append(offsets[-1] + len(line) + 1)
        places = [pa.array([file] * len(lines)), pa.array(offsets, pa.int64())]
        decoded = self._format.decode(pa.chunked_array([pa.array(lines, pa.binary())]))
        bad_rows = {bad.row: bad.reason for bad in decoded.bad}
        good = [row for row in range(len(lines)) if row not in bad_rows]
        rows = pa.table([*places, *decoded.rows.columns], schema=self._schema)
        tick.change(self._name, deletes=self._schema.empty_table(), inserts=rows.take(good))
        errors = [
            {"file": file, "offset": offsets[row], "reason": reason, "line": lines[row]}
            for row, reason in bad_rows.items()
        ]
        tick.change(
            self._errors,
            deletes=ERRORS.empty_table(),
            inserts=pa.Table.from_pylist(errors, schema=ERRORS),
        )
        self._bad += len(errors)

    def collections(self) -> Sequence[str]:
        """Return the collections that every tick advances."""
        return [self._name, self._errors]

    def committed(self, frontier: Frontier[str] | None) -> None:
        """Continue after the tick. Nothing is confirmed upstream: files remain."""
        self._bound = frontier

    def status(self) -> Mapping[str, Any]:
        """Return the status for `penstock status`."""
        bound = self._bound or Frontier()
        lag = sum(end - bound[file] for file, end in self._end.items())
        return {
            "kind": self.kind,
            "server": str(self._folder),
            "phase": "copying" if self._bound is None else "following",
            "lag_bytes": lag,
            "bad_records": self._bad,
            "tables": [],
        }

    def close(self) -> None:
        """Do nothing: every read opens and closes its file."""

    def check(self, *, started: bool) -> Sequence[CollectionOutline]:
        """Check that the folder exists, and return the collections to create. Optional."""
        if not self._folder.is_dir():
            raise DefiniteError(
                f'folder "{self._folder}" of source "{self._name}" does not exist',
                hint="Create the folder, or correct it in the pipeline file.",
            )
        key = (*PLACE.names,)
        if started:
            return []
        return [
            CollectionOutline(self._name, self._schema, key),
            CollectionOutline(self._errors, ERRORS, key),
        ]

    @property
    def _schema(self) -> pa.Schema:
        return pa.schema([*PLACE, *self._format.schema])


def end_of_lines(path: Path, start: int) -> int:
    """Return the end of the last complete line, at or after `start`.

    Raises:
        DefiniteError: the file is shorter than `start`.
    """
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        if end < start:
            raise DefiniteError(
                f'file "{path}" became shorter',
                detail=f"It was read up to byte {start}, and has {end} bytes.",
                hint="Files of this source may only grow. Drop the source and start it again.",
            )
        while end > start:
            first = max(start, end - BLOCK_BYTES)
            file.seek(first)
            newline = file.read(end - first).rfind(b"\n")
            if newline >= 0:
                return first + newline + 1
            end = first
    return start


def read_blocks(path: Path, start: int, end: int) -> Iterator[tuple[int, bytes]]:
    """Yield the complete lines of a range in blocks, each with its offset."""
    if start == end:
        return
    with path.open("rb") as file:
        file.seek(start)
        partial = b""
        while start + len(partial) < end:
            block = partial + file.read(min(BLOCK_BYTES, end - start - len(partial)))
            complete = block.rfind(b"\n") + 1
            if len(block) == len(partial):
                raise TransientError(f'file "{path}" became shorter during the read')
            if complete:
                yield start, block[:complete]
            start, partial = start + complete, block[complete:]


def _collections(name: str, config: JsonlConfig) -> Sequence[str]:
    return [name, f"{name}_errors"]


KIND = SourceKind(
    name="jsonl",
    summary="A folder of JSON-lines files.",
    section=JsonlConfig,
    build=lambda name, config, location, clock: JsonlSource(name, config, clock),
    remap_forms={
        "jsonl": make_form(
            "jsonl",
            [("file", pa.string())],
            [("file", pa.string()), ("byte_offset", pa.int64())],
            # A file that is deleted keeps its position.
            partitions_end=True,
        )
    },
    describe=lambda section: str(section["folder"]),
    collections=_collections,
    extra_collections=lambda name, config: [f"{name}_errors"],
    append_only=_collections,
)
"""Value of the entry point."""
