"""One Spark task of a scan: rows in, objects under the tick's staging id out.

This code runs in a Python worker and does not import Spark. A failed or duplicate attempt
leaves files that no entry links.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
from msgspec import msgpack

from penstock.data import DIFF
from penstock.errors import PenstockError
from penstock.persist.append.task import Share, all_of, is_reported
from penstock.persist.scan.task import stored_rows_of
from penstock.persist.state import Batch, CollectionState
from penstock.sources.context import Scan

__all__ = ["Cut", "ScanTask", "Scanned"]


Cut: TypeAlias = pa.Table | PenstockError
"""Prepared rows, or the error in their place."""


@dataclass(frozen=True, slots=True)
class Scanned:
    """Result of a task: batches by output and a report for the source, or an error."""

    batches: Mapping[str, bytes] = field(default_factory=dict)
    report: Any = None
    error: PenstockError | None = None

    def batch(self, output: str) -> Batch | None:
        """Return the batch of an output, or None."""
        encoded = self.batches.get(output)
        return None if encoded is None else msgpack.decode(encoded, type=Batch)


@dataclass(frozen=True, slots=True)
class ScanTask:
    """Input of every task of a scan."""

    scan: Scan
    shares: Mapping[str, Share]
    known: Mapping[str, CollectionState]
    """State of each output's collection before the tick."""

    def run(self, rows: Iterable[pa.RecordBatch]) -> Scanned:
        """Prepare and finish rows in one task."""
        remaining = iter(rows)
        scanned = self.finish(self.scan.prepare(remaining))
        if scanned.error is not None:
            # SUBTLE: an error in `prepare` ends its generator, so `finish` cannot read on.
            for _ in remaining:
                pass
        return scanned

    def cut(self, rows: Iterable[pa.RecordBatch], count: int) -> Iterator[tuple[int, Cut]]:
        """Yield prepared rows with the number of the task that finishes them.

        If preparing fails with an error of the data, the last item is that error.
        """
        remaining = iter(rows)
        try:
            yield from self._cut(remaining, count)
        except PenstockError as error:
            if not is_reported(error):
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
        """Write the result of prepared rows.

        An error that every attempt would meet is returned. Others are raised, so Spark retries.
        """
        remaining = iter(rows)
        out = _ScanOutput(self.shares, self.known)
        try:
            report = self.scan.finish(_tables(remaining), out)
            batches = out.written()
        except PenstockError as error:
            if not is_reported(error):
                raise
            for _ in remaining:  # Spark ends a worker that leaves input unread.
                pass
            return Scanned(error=error)
        return Scanned(batches, report)


def _tables(rows: Iterable[Cut]) -> Iterator[pa.Table]:
    for part in rows:
        if isinstance(part, PenstockError):
            raise part
        yield part


class _ScanOutput:
    """Buffers rows and writes them as parts."""

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
        merged = {output: all_of(batches) for output, batches in self._batches.items()}
        return {
            output: msgpack.encode(batch) for output, batch in merged.items() if batch is not None
        }

    def _write(self, output: str) -> None:
        tables = self._loose.pop(output, [])
        self._sizes[output] = 0
        batches = (batch for table in tables for batch in table.to_batches())
        self._batches.setdefault(output, []).append(self._shares[output].stage(batches))
