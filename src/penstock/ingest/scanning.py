"""A range that Spark reads, in a task: rows in, objects under the tick's staging id out.

It runs in a Python worker and knows nothing of Spark. As in every write by tasks, an
attempt that fails or is overtaken leaves files that nobody links.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
from msgspec import msgpack

from penstock.data import DIFF
from penstock.errors import PenstockError
from penstock.persist.append.task import Share, all_of, is_told
from penstock.persist.scan.task import stored_rows_of
from penstock.persist.state import Batch, CollectionState
from penstock.sources.source import Scan

__all__ = ["Cut", "ScanTask", "Scanned"]


Cut: TypeAlias = pa.Table | PenstockError
"""Prepared rows, or why there are none."""


@dataclass(frozen=True, slots=True)
class Scanned:
    """What a task has to tell: what it wrote by output, and what the source is told; or why not."""

    batches: Mapping[str, bytes] = field(default_factory=dict)
    told: Any = None
    error: PenstockError | None = None

    def batch(self, output: str) -> Batch | None:
        """What it wrote for an output."""
        found = self.batches.get(output)
        return None if found is None else msgpack.decode(found, type=Batch)


@dataclass(frozen=True, slots=True)
class ScanTask:
    """What every task of a scan is told."""

    scan: Scan
    shares: Mapping[str, Share]
    known: Mapping[str, CollectionState]
    """By output, the collection as it was before the tick."""

    def run(self, rows: Iterable[pa.RecordBatch]) -> Scanned:
        """Prepare and finish rows in one go."""
        remaining = iter(rows)
        scanned = self.finish(self.scan.prepare(remaining))
        if scanned.error is not None:
            # SUBTLE: an error in `prepare` ends its generator, so `finish` cannot read on.
            for _ in remaining:
                pass
        return scanned

    def cut(self, rows: Iterable[pa.RecordBatch], count: int) -> Iterator[tuple[int, Cut]]:
        """Prepared rows, by the place where they are finished; at the end perhaps, why not all."""
        remaining = iter(rows)
        try:
            yield from self._cut(remaining, count)
        except PenstockError as error:
            if not is_told(error):
                raise
            for _ in remaining:
                pass
            yield 0, error

    def _cut(self, rows: Iterable[pa.RecordBatch], count: int) -> Iterator[tuple[int, pa.Table]]:
        for table in self.scan.prepare(rows):
            places = self.scan.places(table, count)
            order = pc.sort_indices(places)
            ordered, places = table.take(order), places.take(order)
            counted = pc.value_counts(places)
            start = 0
            for place, length in zip(
                counted.field("values").to_pylist(),
                counted.field("counts").to_pylist(),
                strict=True,
            ):
                yield place, ordered.slice(start, length)
                start += length

    def finish(self, rows: Iterable[Cut]) -> Scanned:
        """Put what the rows come to, or say why not.

        What would be the same at every attempt is told; the rest is raised, for Spark to try
        it again elsewhere.
        """
        remaining = iter(rows)
        out = _Out(self.shares, self.known)
        try:
            told = self.scan.finish(_tables(remaining), out)
            batches = out.written()
        except PenstockError as error:
            if not is_told(error):
                raise
            for _ in remaining:  # Spark loses a worker that leaves some of the rows it sent.
                pass
            return Scanned(error=error)
        return Scanned(batches, told)


def _tables(rows: Iterable[Cut]) -> Iterator[pa.Table]:
    for each in rows:
        if isinstance(each, PenstockError):
            raise each
        yield each


class _Out:
    """Gathers rows, and writes them in parts."""

    def __init__(self, shares: Mapping[str, Share], known: Mapping[str, CollectionState]) -> None:
        self._shares = shares
        self._known = known
        self._loose: dict[str, list[pa.Table]] = {}
        self._sizes: dict[str, int] = {}
        self._batches: dict[str, list[Batch | None]] = {}

    def put(self, output: str, rows: pa.Table) -> None:
        if not rows.num_rows:
            return
        self._loose.setdefault(output, []).append(rows)
        size = self._sizes.get(output, 0) + rows.nbytes
        self._sizes[output] = size
        if size >= self._shares[output].part_bytes:
            self._write(output)

    def stored(self, output: str, keys: pa.Table) -> pa.Table:
        share = self._shares[output]
        return stored_rows_of(share.url, self._known[output], keys).drop_columns([DIFF])

    def written(self) -> dict[str, bytes]:
        for output in [*self._loose]:
            self._write(output)
        found = {output: all_of(batches) for output, batches in self._batches.items()}
        return {
            output: msgpack.encode(batch) for output, batch in found.items() if batch is not None
        }

    def _write(self, output: str) -> None:
        tables = self._loose.pop(output, [])
        self._sizes[output] = 0
        batches = (batch for table in tables for batch in table.to_batches())
        self._batches.setdefault(output, []).append(self._shares[output].stage(batches))
