"""Sample of the rows of a collection of any size.

A small collection is read completely. For a large one, the first rows of its parts are candidates,
and a lookup consolidates each candidate as of the time. The sample is therefore exact, but not
complete. The latest changes are read from the newest parts backwards. At most one part is in memory
at a time.
"""

from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from penstock.catalog import rows_of
from penstock.data import DIFF, TIME, advance, consolidate
from penstock.data.schema import label_of
from penstock.errors import UsageError
from penstock.persist import Collection
from penstock.persist.batch import Batches, PartScan, part_scans_of
from penstock.persist.lookup import LookupKeys, matching_rows
from penstock.persist.readability import check_contents
from penstock.persist.scan.plan import SnapshotScan, scan_snapshot
from penstock.persist.state import (
    END,
    CollectionState,
    SchemaVersion,
    Stored,
    columns_of,
    schema_as_of,
    stored_columns_of,
)

__all__ = ["latest_changes", "sample"]

SMALL_BYTES: Final = 8 << 20
"""Maximum memory size of a collection that is read completely."""

RETAINED: Final = 100_000
"""Maximum number of retained updates that older updates may still cancel."""

CANDIDATES: Final = 4
"""Candidates per requested row, because some candidates may be deleted rows."""

TEXT_LIMIT: Final = 2_000


def sample(collection: Collection, as_of: int, limit: int) -> dict[str, Any]:
    """Return at most `limit` rows as of a time.

    Raises:
        SinceError, NotYetComplete, CollectionErrored: as for any read of the collection.
        UsageError: the collection is large and has no key columns for a lookup.
    """
    state = collection.state
    check_contents(state, as_of)
    needed = [batch for batch in state.batches if batch.lower <= as_of]
    if sum(batch.memory for batch in needed) <= SMALL_BYTES:
        rows = collection.snapshot(as_of).arrow()
        complete = rows.num_rows <= limit
    else:
        rows, complete = _some_rows(collection, state, as_of, limit), False
    schema = schema_as_of(state, as_of)
    return {
        "collection": collection.name,
        "as_of": as_of,
        "complete": complete,
        **_to_json(rows.slice(0, limit), state, schema),
    }


def latest_changes(collection: Collection, limit: int) -> dict[str, Any]:
    """Return at most `limit` updates, newest first, back to the first exact time."""
    state = collection.state
    lower, upper = _known_interval(state)
    schema = schema_as_of(state, max(upper - 1, 0))
    batches = collection.client.reader.batches
    rows = stored_columns_of(schema).empty_table()
    for batch in sorted(state.batches, key=lambda batch: batch.upper, reverse=True):
        # The remaining batches are below this time, and cannot cancel updates at later times.
        complete = pc.sum(pc.greater_equal(rows.column(TIME), batch.upper)).as_py() or 0
        if complete >= limit:
            break
        for part_scan in part_scans_of(state, batch, lower=lower, upper=upper):
            if batch.upper <= lower or batch.lower >= upper or _older(batches, part_scan, lower):
                continue
            more = batches.part_rows(state, part_scan, schema)
            within = pc.and_(
                pc.greater_equal(more.column(TIME), lower), pc.less(more.column(TIME), upper)
            )
            rows = consolidate(pa.concat_tables([rows, more.filter(within)]))
            rows = rows.sort_by([(TIME, "descending"), (DIFF, "ascending")]).slice(0, RETAINED)
    rows = rows.slice(0, limit)
    return {"collection": collection.name, "upper": upper, **_to_json(rows, state, schema)}


def _some_rows(collection: Collection, state: CollectionState, as_of: int, limit: int) -> pa.Table:
    scan = scan_snapshot(state, as_of)
    columns = columns_of(scan.schema)
    nested = [name for name in scan.key if pa.types.is_nested(columns.field(name).type)]
    if scan.schema.codecs or nested:
        raise UsageError(
            f'collection "{collection.name}" is too large to sample',
            detail="It has no key columns for a lookup of single rows.",
            hint=f"Read it: penstock read LOCATION {collection.name} | head",
        )
    batches = collection.client.reader.batches
    keys = _candidates(batches, scan, limit * CANDIDATES)
    lookup_keys = LookupKeys(keys, scan.schema, collection=collection.name, by=scan.key)
    matches = [stored_columns_of(scan.schema).empty_table()]
    for part_scan in (*scan.base, *scan.deltas):
        matches += matching_rows(batches, state, part_scan, scan.schema, lookup_keys)
    rows = consolidate(advance(pa.concat_tables(matches), as_of))
    return rows.sort_by([(name, "ascending") for name in scan.key])


def _candidates(batches: Batches, scan: SnapshotScan, limit: int) -> pa.Table:
    """Return the keys of the first rows of the parts."""
    names = list(scan.key)
    keys = columns_of(scan.schema).empty_table().select(names)
    for part_scan in (*scan.base, *scan.deltas):
        rows = batches.part_rows(scan.collection, part_scan, scan.schema)
        keys = pa.concat_tables([keys, rows.select(names).slice(0, limit)])
        keys = keys.group_by(names, use_threads=False).aggregate([]).slice(0, limit)
        if keys.num_rows == limit:
            break
    return keys.select(names)


def _known_interval(state: CollectionState) -> tuple[int, int]:
    """Return the interval of known changes: after since, and outside of errors."""
    lower, upper = state.first_exact_time, state.upper
    for span in state.errors:
        if span.upper == END:
            upper = min(upper, span.lower)
        else:
            lower = max(lower, span.upper + 1)
    return lower, upper


def _older(batches: Batches, part_scan: PartScan, lower: int) -> bool:
    """Return whether the footer of a part excludes updates at or after `lower`."""
    if not isinstance(part_scan.part, Stored):
        return False
    footer = batches.footer(part_scan.part)
    leaf = footer.schema.names.index(TIME)
    groups = [footer.row_group(number).column(leaf) for number in range(footer.num_row_groups)]
    return all(
        group.statistics is not None
        and group.statistics.has_min_max
        and group.statistics.max < lower
        for group in groups
    )


def _to_json(rows: pa.Table, state: CollectionState, schema: SchemaVersion) -> dict[str, Any]:
    """Return columns and rows, with each value as text: numbers of a browser are not exact."""
    columns = columns_of(schema)
    rendered = [
        (time, diff, [_text(value) for value in row.values()])
        for time, diff, row in rows_of(rows, state)
    ]
    return {
        "columns": [
            {
                "name": field.name,
                "type": label_of(field) or str(field.type),
                "key": field.name in schema.key,
            }
            for field in columns
        ],
        "rows": [row for _, _, row in rendered],
        "times": [str(time) for time, _, _ in rendered],
        "diffs": [str(diff) for _, diff, _ in rendered],
    }


def _text(value: Any) -> str | None:
    if value is None:
        return None
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return text if len(text) <= TEXT_LIMIT else text[:TEXT_LIMIT] + "…"
