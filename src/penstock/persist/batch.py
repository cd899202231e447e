"""Batches: build their parts, and read them back.

A small batch is stored as bytes inside the log entry that links it. A large batch is stored
as Parquet objects, which are written under a staging id before that entry.

In both forms, a part holds the user's columns, `mz_timestamp` and `mz_diff`. A read
verifies every byte: inline parts with their entry, objects against the size and checksum
that the entry recorded.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.data import TIME, Codec, conform, from_ipc, to_ipc
from penstock.durable import Blob, CachedBlob
from penstock.errors import Corruption, UsageError
from penstock.failpoints import Failpoint, hit
from penstock.persist.encoding import checksum
from penstock.persist.paths import batch_key
from penstock.persist.settings import Settings
from penstock.persist.state import (
    END,
    Batch,
    CollectionState,
    Inline,
    Part,
    SchemaVersion,
    Stored,
    columns_of,
    stored_columns_of,
)

__all__ = ["Batches", "PartScan", "part_scans_of", "together"]

ROW_GROUP_ROWS: Final = 1 << 18

FOOTERS_KEPT: Final = 512

DICTIONARY_BYTES: Final = 1 << 16
"""Upper bound of a dictionary, in bytes.

A larger dictionary saves little space, and reads of it miss the processor's cache.
"""


@dataclass(frozen=True, slots=True)
class PartScan:
    """Updates of one part with times in `[lower, upper)`."""

    part: Part
    written: SchemaVersion
    """Schema version of the stored part."""

    lower: int = 0
    upper: int = END
    """Exclusive upper bound of times; `lower` 0 and `upper` END select the complete part."""

    @property
    def whole(self) -> bool:
        """Return whether the scan covers every update of the part."""
        return self.lower == 0 and self.upper == END


def part_scans_of(
    collection: CollectionState, batch: Batch, *, lower: int = 0, upper: int = END
) -> Iterator[PartScan]:
    """Yield a scan of each part of `batch`, restricted to `[lower, upper)`.

    A bound that excludes no update of the batch is replaced by 0 or END: such a scan need
    not inspect times.
    """
    upper = min(upper, batch.until)
    lower = lower if batch.lower < lower else 0
    upper = upper if batch.upper > upper or batch.until < END else END
    for part in batch.parts:
        yield PartScan(part, collection.schemas[batch.schema], lower, upper)


class Batches:
    """Builder and reader of the batches of one storage location."""

    def __init__(self, blob: Blob, cache: CachedBlob, settings: Settings) -> None:
        self._blob = blob
        self._cache = cache
        self._settings = settings
        self._lock = threading.Lock()
        self._footers: OrderedDict[str, pq.FileMetaData] = OrderedDict()
        self.codecs: dict[int, tuple[Codec, Codec]] = {}
        """Key and value codecs of the collections that this process opened, by collection id."""

    def inline(self, updates: pa.Table) -> bool:
        """Return whether the updates are small enough to be stored inside a log entry."""
        return bool(updates.nbytes <= self._settings.inline_bytes)

    def build_inline(self, updates: pa.Table, schema: int) -> Batch:
        """Build a batch that is stored inside its log entry."""
        rows = to_ipc(updates)
        return _batch(updates, schema, (Inline(rows),), len(rows))

    def build_few(self, rows: pa.RecordBatch, schema: int, *, lower: int, upper: int) -> Batch:
        """Build an inline batch from rows whose time bounds the caller knows.

        This is the fast path of every small write.
        """
        data: bytes = rows.serialize().to_pybytes()
        return Batch(
            schema=schema,
            lower=lower,
            upper=upper,
            rows=rows.num_rows,
            size=len(data),
            parts=(Inline(data),),
            memory=len(data),
        )

    def build_stored(self, updates: pa.Table, schema: int, staging: str) -> Batch:
        """Write updates as durable objects under a staging id, and return their unlinked batch."""
        parts: list[Part] = []
        rows = max(1, int(updates.num_rows * self._settings.part_bytes / max(updates.nbytes, 1)))
        ordered = [path for path, kind in _leaves(updates.schema) if _ordered_alike(kind)]
        for start in range(0, updates.num_rows, rows):
            sink = pa.BufferOutputStream()
            pq.write_table(
                updates.slice(start, rows),
                sink,
                write_page_checksum=True,
                row_group_size=ROW_GROUP_ROWS,
                dictionary_pagesize_limit=DICTIONARY_BYTES,
                write_statistics=ordered,
                use_dictionary=ordered,
            )
            data = sink.getvalue().to_pybytes()
            key = batch_key(staging, f"{self._settings.chance.getrandbits(64):016x}")
            hit(Failpoint.BLOB_PUT_BEGIN)
            self._blob.create(key, data)
            hit(Failpoint.BLOB_PUT_DONE)
            parts.append(_stored(key, data))
        size = sum(part.size for part in parts if isinstance(part, Stored))
        return _batch(updates, schema, tuple(parts), size)

    def build_streamed(
        self, updates: Iterable[pa.Table], schema: int, staging: str, *, part_bytes: int
    ) -> Batch | None:
        """Write tables as they arrive, and return their unlinked batch, or None without any row.

        About `part_bytes` of rows are in memory at a time.
        """
        written: list[Batch] = []
        pending: list[pa.Table] = []
        size = 0
        for table in updates:
            if table.num_rows:
                pending.append(table)
                size += table.nbytes
            if size >= part_bytes:
                written.append(self.build_stored(pa.concat_tables(pending), schema, staging))
                pending, size = [], 0
        if pending:
            written.append(self.build_stored(pa.concat_tables(pending), schema, staging))
        return together(written) if written else None

    def rows(
        self,
        collection: CollectionState,
        batch: Batch,
        schema: SchemaVersion,
        *,
        lower: int = 0,
        upper: int = END,
    ) -> pa.Table:
        """Return the updates of `batch` with times in `[lower, upper)`, as rows of `schema`."""
        tables = [
            self.part_rows(collection, each, schema)
            for each in part_scans_of(collection, batch, lower=lower, upper=upper)
        ]
        return pa.concat_tables(tables) if len(tables) != 1 else tables[0]

    def part_rows(
        self, collection: CollectionState, part_scan: PartScan, schema: SchemaVersion
    ) -> pa.Table:
        """Return the updates of one part scan, as rows of `schema`."""
        rows = self._part(part_scan.part, stored_columns_of(part_scan.written))
        if not part_scan.whole:
            times = rows.column(TIME)
            within = pc.and_(
                pc.greater_equal(times, part_scan.lower), pc.less(times, part_scan.upper)
            )
            rows = rows.filter(within)
        return self._read_through(collection, rows, part_scan.written, schema)

    def footer(self, part: Stored) -> pq.FileMetaData:
        """Return the verified Parquet footer of an object, from a cache of recently used footers.

        Raises:
            Corruption: the object is missing, or its footer has changed.
        """
        with self._lock:
            if part.key in self._footers:
                self._footers.move_to_end(part.key)
                return self._footers[part.key]
        data = self._blob.get(part.key, start=part.size - part.footer)
        if data is None or len(data) != part.footer or checksum(data) != part.footer_checksum:
            raise Corruption(
                part.key,
                where=self._blob.name,
                detail="The object is missing."
                if data is None
                else "Its footer differs from the written one.",
            )
        told = pq.read_metadata(pa.BufferReader(data))
        with self._lock:
            self._footers[part.key] = told
            if len(self._footers) > FOOTERS_KEPT:
                self._footers.popitem(last=False)
        return told

    def opened(self, part: Stored) -> pq.ParquetFile:
        """Return a verified object as a Parquet file, to read by column."""
        data = self._cache.read(part.key, part.size, part.checksum)
        return pq.ParquetFile(pa.BufferReader(data), metadata=self.footer(part))

    def _part(self, part: Part, schema: pa.Schema) -> pa.Table:
        match part:
            case Inline(rows=rows):
                return from_ipc(rows, schema)
            case Stored(key=key, size=size, checksum=told):
                data = self._cache.read(key, size, told)
                table = pq.read_table(pa.BufferReader(data), use_threads=False)
                if table.schema.equals(schema):
                    return pa.Table.from_arrays(table.columns, schema=schema)
                return table.cast(schema)

    def _read_through(
        self,
        collection: CollectionState,
        rows: pa.Table,
        written: SchemaVersion,
        schema: SchemaVersion,
    ) -> pa.Table:
        if written.version == schema.version:
            return rows
        if written.codecs != schema.codecs:
            if collection.id not in self.codecs:
                raise UsageError(
                    f'collection "{collection.name}" was written with several versions of a codec',
                    detail="Only the codec can convert values between its versions.",
                    hint="Open it with create_or_load and the codecs of its keys and values.",
                )
            rows = _recoded(rows, written, self.codecs[collection.id])
        return conform(rows, stored_columns_of(schema), defaults_of(collection.schemas))


@lru_cache(maxsize=1024)
def defaults_of(schemas: tuple[SchemaVersion, ...]) -> Mapping[str, pa.Scalar]:
    """Return the values that older rows hold in columns added after they were written."""
    defaults: dict[str, pa.Scalar] = {}
    for version in schemas:
        if version.defaults:
            row = pa.ipc.open_stream(pa.py_buffer(version.defaults)).read_all()
            columns = columns_of(schemas[-1])
            for name in row.schema.names:
                defaults[name] = row.column(name).cast(columns.field(name).type)[0]
    return defaults


def _recoded(rows: pa.Table, written: SchemaVersion, codecs: tuple[Codec, Codec]) -> pa.Table:
    """Re-encode keys and values that an older version of a codec wrote."""
    for (name, codec), (_, version) in zip(
        (("key", codecs[0]), ("value", codecs[1])), written.codecs, strict=True
    ):
        if version != codec.version:
            at = rows.schema.get_field_index(name)
            values = [
                codec.encode(codec.decode(old, version)) for old in rows.column(at).to_pylist()
            ]
            rows = rows.set_column(at, rows.schema.field(at), pa.array(values, codec.stored_as))
    return rows


def together(batches: Sequence[Batch]) -> Batch:
    """Combine the parts of batches of one schema version into one batch."""
    return Batch(
        schema=batches[0].schema,
        lower=min(batch.lower for batch in batches),
        upper=max(batch.upper for batch in batches),
        rows=sum(batch.rows for batch in batches),
        size=sum(batch.size for batch in batches),
        parts=tuple(part for batch in batches for part in batch.parts),
        memory=sum(batch.memory for batch in batches),
    )


def _leaves(schema: pa.Schema) -> Iterator[tuple[str, pa.DataType]]:
    """Yield the path and type of each Parquet leaf column."""
    pending = [(field.name, field.type) for field in schema]
    while pending:
        path, kind = pending.pop(0)
        if pa.types.is_struct(kind):
            pending += [(f"{path}.{inner.name}", inner.type) for inner in kind]
        elif pa.types.is_map(kind):
            pending.append((f"{path}.key_value.key", kind.key_type))
            pending.append((f"{path}.key_value.value", kind.item_type))
        elif pa.types.is_nested(kind):
            pending.append((f"{path}.list.element", kind.value_type))
        else:
            yield path, kind


def _ordered_alike(kind: pa.DataType) -> bool:
    """Return whether all readers order values of this type as Arrow does.

    SUBTLE: only such columns get statistics and dictionaries. Spark considers NaN the
    largest number, whereas Arrow leaves NaN out of the bounds. Spark also treats 0.0 and
    -0.0 as equal, and rounds bounds of milliseconds. With statistics, Spark would skip row
    groups that hold matching rows.
    """
    return not (pa.types.is_floating(kind) or (pa.types.is_timestamp(kind) and kind.unit == "ms"))


def _stored(key: str, data: bytes) -> Stored:
    """Return the record of a Parquet object, which ends in its footer length and a magic number."""
    footer = int.from_bytes(data[-8:-4], "little") + 8
    return Stored(
        key=key,
        size=len(data),
        checksum=checksum(data),
        footer=footer,
        footer_checksum=checksum(data[-footer:]),
    )


def _batch(updates: pa.Table, schema: int, parts: tuple[Part, ...], size: int) -> Batch:
    bounds = pc.min_max(updates.column(TIME))
    return Batch(
        schema=schema,
        lower=bounds["min"].as_py(),
        upper=bounds["max"].as_py() + 1,
        rows=updates.num_rows,
        size=size,
        parts=parts,
        memory=updates.nbytes,
    )
