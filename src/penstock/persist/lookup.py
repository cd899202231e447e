"""Lookup of rows by key, without a scan of the complete collection.

Each part is read in three steps. The footer gives the row groups whose statistics admit a
key in the first key column. Then the key columns of those row groups are read. The other
columns are read only for row groups with a matching key. Memory is bounded by one row group
and the matching rows. Footers are cached, because lookups usually repeat.

Keys are compared bit by bit, as rows are: null equals null, and -0.0 differs from 0.0.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.data import TIME, advance, conform, consolidate, from_ipc
from penstock.errors import UsageError
from penstock.persist.batch import Batches, PartScan, defaults_of, part_scans_of
from penstock.persist.state import (
    END,
    Batch,
    CollectionState,
    Inline,
    SchemaVersion,
    Stored,
    columns_of,
    stored_columns_of,
)

__all__ = ["LookupKeys", "matching_rows", "written_rows"]

Positions = npt.NDArray[np.int64]

_NUMBERED: Final = (
    pa.types.is_signed_integer,
    pa.types.is_date32,
    pa.types.is_timestamp,
    pa.types.is_time,
    pa.types.is_duration,
)
"""Types that Arrow and Parquet store as the same signed integers, in the same order."""


class LookupKeys:
    """Set of keys to look up."""

    def __init__(
        self,
        keys: pa.Table,
        schema: SchemaVersion,
        *,
        collection: str,
        by: Sequence[str] | None = None,
    ) -> None:
        """Prepare keys of the key columns or, with `by`, of the named columns.

        Raises:
            UsageError: `keys` does not have exactly these columns and types.
        """
        columns = columns_of(schema)
        self.key = schema.key if by is None else tuple(by)
        key_schema = pa.schema([columns.field(name) for name in self.key])
        if schema.codecs or not self.key:
            raise UsageError(
                f'collection "{collection}" has no key columns',
                hint="Only rows with a key can be looked up.",
            )
        if set(keys.column_names) != set(self.key) or len(keys.column_names) != len(self.key):
            raise UsageError(
                f'keys do not have the key columns of collection "{collection}"',
                detail=f"They have {', '.join(keys.column_names)}; "
                f"its key is {', '.join(self.key)}.",
                hint="Give exactly these columns.",
            )
        for field in key_schema:
            if keys.column(field.name).type != field.type:
                raise UsageError(
                    f'key column "{field.name}" for collection "{collection}" is '
                    f"{keys.column(field.name).type}, not {field.type}",
                    hint="Cast it first.",
                )
        given = [_matchable(keys.column(name)) for name in self.key]
        self._numbers: Positions | None = None
        self._has_null = bool(given and given[0].null_count)
        if _numbered(given[0].type):
            self._numbers = np.unique(_integers(given[0].drop_null()))
        self._values = [pc.unique(column) for column in given]
        self._combined: list[Positions] = []
        """Sorted combinations of columns 0 and 1, then of those with column 2, and so on."""

        codes = self._codes(given, 0)
        for at in range(1, len(given)):
            codes = codes * len(self._values[at]) + self._codes(given, at)
            self._combined.append(np.unique(codes))
            codes = np.searchsorted(self._combined[-1], codes)
        self._rows = keys.num_rows

    def may_be_in(self, metadata: pq.FileMetaData, group: int, leaf: int) -> bool:
        """Return whether the statistics of a row group admit one of the keys."""
        if self._rows == 0:
            return False
        told = metadata.row_group(group).column(leaf).statistics
        if self._numbers is None or self._has_null or told is None or not told.has_min_max:
            return True
        begin = np.searchsorted(self._numbers, told.min_raw, "left")
        end = np.searchsorted(self._numbers, told.max_raw, "right")
        return bool(begin < end)

    def matches(self, columns: Sequence[pa.ChunkedArray]) -> Positions:
        """Return the positions of the rows that have one of the keys, in ascending order."""
        given = [_matchable(column) for column in columns]
        if len(given) == 1 and self._numbers is not None and not self._has_null:
            return _positions_of(self._numbers, given[0])
        codes = self._codes(given, 0)
        rows = np.flatnonzero(codes >= 0)
        codes = codes[rows]
        for at in range(1, len(given)):
            more = self._codes([column.take(pa.array(rows)) for column in given], at)
            present = more >= 0
            rows, codes, more = rows[present], codes[present], more[present]
            combined = self._combined[at - 1]
            codes = codes * len(self._values[at]) + more
            places = np.minimum(np.searchsorted(combined, codes), len(combined) - 1)
            is_match = combined[places] == codes
            rows, codes = rows[is_match], places[is_match]
        return rows

    def _codes(self, columns: Sequence[pa.ChunkedArray], at: int) -> Positions:
        """Return the index of each value among the values of the keys, or -1."""
        codes = pc.index_in(columns[at], value_set=self._values[at], skip_nulls=False)
        filled = pc.fill_null(codes, -1)
        positions: Positions = filled.to_numpy().astype(np.int64)
        return positions


def written_rows(
    batches: Batches, collection: CollectionState, keys: pa.Table, staged: Sequence[Batch] = ()
) -> pa.Table:
    """Return the rows with `keys` among all written updates, sealed or not, and `staged`.

    The result is consolidated and has `mz_diff`. `keys` has any columns of the collection.
    """
    schema = collection.schemas[-1]
    lookup_keys = LookupKeys(keys, schema, collection=collection.name, by=keys.column_names)
    tables = [stored_columns_of(schema).empty_table()]
    for batch in (*collection.batches, *staged):
        for part_scan in part_scans_of(collection, batch):
            tables += matching_rows(batches, collection, part_scan, schema, lookup_keys)
    return consolidate(advance(pa.concat_tables(tables), END - 1)).drop_columns([TIME])


def matching_rows(
    batches: Batches,
    collection: CollectionState,
    part_scan: PartScan,
    schema: SchemaVersion,
    lookup_keys: LookupKeys,
) -> Iterator[pa.Table]:
    """Yield the updates of one part scan that have one of the keys, as rows of `schema`."""
    written = stored_columns_of(part_scan.written)
    match part_scan.part:
        case Inline(rows=rows):
            table = from_ipc(rows, written)
            positions = _matches(table, collection, part_scan, schema, lookup_keys)
            if len(positions):
                yield _conformed(table.take(pa.array(positions)), collection, schema)
        case Stored() as part:
            leaves = _leaves(written)
            first = leaves[lookup_keys.key[0]][0]
            footer = batches.footer(part)
            groups = [
                group
                for group in range(footer.num_row_groups)
                if lookup_keys.may_be_in(footer, group, first)
            ]
            if not groups:
                return
            file = batches.opened(part)
            key_columns = [
                name for name in written.names if name in lookup_keys.key or name == TIME
            ]
            others = [name for name in written.names if name not in key_columns]
            for group in groups:
                keys = _read(file, group, key_columns, leaves)
                positions = _matches(keys, collection, part_scan, schema, lookup_keys)
                if not len(positions):
                    continue
                taken = pa.array(positions)
                keys, rest = keys.take(taken), _read(file, group, others, leaves).take(taken)
                columns = [
                    (keys if name in key_columns else rest).column(name) for name in written.names
                ]
                rows = pa.table(columns, names=written.names).cast(written)
                yield _conformed(rows, collection, schema)


def _matches(
    keys: pa.Table,
    collection: CollectionState,
    part_scan: PartScan,
    schema: SchemaVersion,
    lookup_keys: LookupKeys,
) -> Positions:
    """Return the positions of rows in the time range that have one of the keys."""
    within: Positions | None = None
    if not part_scan.whole:
        times = keys.column(TIME).to_numpy()
        within = np.flatnonzero((times >= part_scan.lower) & (times < part_scan.upper))
        if len(within) < keys.num_rows:
            keys = keys.take(pa.array(within))
        else:
            within = None
    columns = columns_of(schema)
    of_key = pa.schema([columns.field(name) for name in lookup_keys.key])
    keys = conform(keys, of_key, defaults_of(collection.schemas))
    positions = lookup_keys.matches(keys.columns)
    return positions if within is None else within[positions]


def _conformed(rows: pa.Table, collection: CollectionState, schema: SchemaVersion) -> pa.Table:
    return conform(rows, stored_columns_of(schema), defaults_of(collection.schemas))


def _positions_of(numbers: Positions, column: pa.ChunkedArray) -> Positions:
    """Return the positions of rows with one of the numbers, which are sorted and distinct."""
    values = _integers(column)
    if len(values) == 0 or len(numbers) == 0:
        return np.empty(0, np.int64)
    if len(numbers) < len(values) and bool(np.all(values[:-1] <= values[1:])):
        # Merges leave values sorted, so a binary search per number is cheaper.
        begins = np.searchsorted(values, numbers, "left")
        ends = np.searchsorted(values, numbers, "right")
        begins, ends = begins[begins < ends], ends[begins < ends]
        lengths = ends - begins
        before = np.cumsum(lengths) - lengths
        rows = np.repeat(begins - before, lengths) + np.arange(int(lengths.sum()))
    else:
        places = np.minimum(np.searchsorted(numbers, values), len(numbers) - 1)
        rows = np.flatnonzero(numbers[places] == values)
    if column.null_count:
        valid = column.is_valid().to_numpy()
        rows = rows[valid[rows]]
    return rows


def _numbered(kind: pa.DataType) -> bool:
    return any(is_kind(kind) for is_kind in _NUMBERED)


def _integers(column: pa.ChunkedArray) -> Positions:
    """Return the values as stored integers, with 0 in place of null."""
    if not pa.types.is_integer(column.type):
        column = column.cast(pa.int32() if column.type.bit_width == 32 else pa.int64())
    positions: Positions = pc.fill_null(column, 0).to_numpy().astype(np.int64, copy=False)
    return positions


def _matchable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the column with floats as integers, so equal values have equal bits."""
    if not pa.types.is_floating(column.type):
        return column
    bits = {16: pa.int16(), 32: pa.int32(), 64: pa.int64()}[column.type.bit_width]
    return pa.chunked_array([chunk.view(bits) for chunk in column.chunks], bits)


def _read(
    file: pq.ParquetFile, group: int, names: Sequence[str], leaves: dict[str, range]
) -> pa.Table:
    # SUBTLE: columns are selected by number, because Arrow may interpret a name as a path.
    numbers = [leaf for name in names for leaf in leaves[name]]
    return file.reader.read_row_group(group, column_indices=numbers, use_threads=True)


def _leaves(schema: pa.Schema) -> dict[str, range]:
    """Return the range of Parquet leaf columns of each column."""
    column_ranges: dict[str, range] = {}
    begin = 0
    for field in schema:
        column_ranges[field.name] = range(begin, begin + _width(field.type))
        begin = column_ranges[field.name].stop
    return column_ranges


def _width(kind: pa.DataType) -> int:
    if pa.types.is_struct(kind):
        return sum(_width(inner.type) for inner in kind)
    if pa.types.is_map(kind):
        return _width(kind.key_type) + _width(kind.item_type)
    return _width(kind.value_type) if pa.types.is_nested(kind) else 1
