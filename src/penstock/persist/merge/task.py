"""Spark tasks of a merge by ranges, in Python workers. Imports no Spark.

Sample the inputs, cut each input into ranges, then merge each range (`ranges.py`).
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from penstock.data import TIME, advance, from_ipc, negate, to_ipc
from penstock.persist.batch import PartScan, together
from penstock.persist.merge.merger import distinct, summed
from penstock.persist.merge.ranges import cut, sample
from penstock.persist.scan.task import batches_of, read_parts
from penstock.persist.state import Batch, CollectionState, stored_columns_of

__all__ = ["cut_parts", "merge_range", "sample_parts"]

CHUNK_BYTES: Final = 16 << 20
"""Maximum size of the chunk of a range that Spark transports as one value."""


def sample_parts(
    url: str,
    collection: CollectionState,
    part_scans: Sequence[PartScan],
    *,
    since: int,
    rows: int,
) -> tuple[int, pa.Table]:
    """Return the number of updates in the part scans, and a sample of the range columns."""
    updates = _advanced(url, collection, part_scans, since=since)
    return updates.num_rows, sample(updates, collection.schemas[-1].key, rows)


def cut_parts(
    url: str,
    collection: CollectionState,
    part_scans: Sequence[PartScan],
    *,
    since: int,
    range_boundaries: pa.Table,
    negated: bool = False,
) -> Iterator[tuple[int, bytes]]:
    """Yield the updates of the part scans, negated if requested, as numbered range chunks."""
    updates = _advanced(url, collection, part_scans, since=since)
    if negated:
        updates = negate(updates)
    for number, rows in enumerate(cut(updates, range_boundaries, collection.schemas[-1].key)):
        for chunk in _chunks(rows):
            yield number, to_ipc(chunk)


def merge_range(
    url: str,
    collection: CollectionState,
    chunks: Iterable[bytes],
    staging: str,
    *,
    since: int,
    part_bytes: int,
) -> tuple[Batch, bool | None] | None:
    """Merge and write all chunks of one range; return None if they sum to nothing.

    The second value is a flag that the rows at `since` are distinct, or None without such
    rows.
    """
    schema = collection.schemas[-1]
    stored = stored_columns_of(schema)
    tables = [from_ipc(chunk, stored) for chunk in chunks]
    updates = summed(pa.concat_tables(tables), schema.key, since=since)
    if updates.num_rows == 0:
        return None
    rows = max(1, int(updates.num_rows * part_bytes / max(updates.nbytes, 1)))
    batches, version = batches_of(url), len(collection.schemas) - 1
    written = together(
        [
            batches.build_stored(updates.slice(start, rows), version, staging)
            for start in range(0, updates.num_rows, rows)
        ]
    )
    settled = pc.any(pc.equal(updates.column(TIME), since)).as_py()
    return written, distinct(updates, schema.key, since=since) if settled else None


def _advanced(
    url: str, collection: CollectionState, part_scans: Sequence[PartScan], *, since: int
) -> pa.Table:
    """Return the updates of the part scans in the newest schema, advanced to `since`."""
    return advance(
        pa.concat_tables(read_parts(url, collection, part_scans, collection.schemas[-1])), since
    )


def _chunks(rows: pa.Table) -> Iterator[pa.Table]:
    """Yield the rows in chunks of at most `CHUNK_BYTES`, or of one row."""
    if rows.num_rows > 1 and rows.nbytes > CHUNK_BYTES:
        half = rows.num_rows // 2
        yield from _chunks(rows.slice(0, half))
        yield from _chunks(rows.slice(half))
    elif rows.num_rows:
        yield rows
