"""Batches: building their parts, and reading them back.

A small batch becomes bytes inside the log entry that links it, a large one
Parquet objects written before it under a staging id. Either way the parts hold
the user's columns, `mz_timestamp` and `mz_diff`, and reading verifies every
byte: inline ones with their entry, objects against the size and checksum that
the entry recorded.
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
from penstock.durable import Blob
from penstock.durable.cache import CachedBlob
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
"""A larger dictionary saves little and is slow to read: it falls out of the processor's cache."""


@dataclass(frozen=True, slots=True)
class PartScan:
    """The updates of one part with times in `[lower, upper)`."""

    part: Part
    written: SchemaVersion
    """The version of the schema that the part was written in."""

    lower: int = 0
    upper: int = END
    """0 and END where all of the part counts."""

    @property
    def whole(self) -> bool:
        """Whether every update of the part counts."""
        return self.lower == 0 and self.upper == END


def part_scans_of(
    collection: CollectionState, batch: Batch, *, lower: int = 0, upper: int = END
) -> Iterator[PartScan]:
    """The parts of `batch`, with no bound on time where all of it lies in `[lower, upper)`."""
    upper = min(upper, batch.until)
    lower = lower if batch.lower < lower else 0
    upper = upper if batch.upper > upper or batch.until < END else END
    for part in batch.parts:
        yield PartScan(part, collection.schemas[batch.schema], lower, upper)


class Batches:
    """Builds and reads the batches of one location."""

    def __init__(self, blob: Blob, cache: CachedBlob, settings: Settings) -> None:
        self._blob = blob
        self._cache = cache
        self._settings = settings
        self._lock = threading.Lock()
        self._footers: OrderedDict[str, pq.FileMetaData] = OrderedDict()
        self.codecs: dict[int, tuple[Codec, Codec]] = {}
        """The codecs that collections of keys and values were opened with, by collection."""

    def inline(self, updates: pa.Table) -> bool:
        """Whether these updates are few enough to travel inside an entry."""
        return bool(updates.nbytes <= self._settings.inline_bytes)

    def build_inline(self, updates: pa.Table, schema: int) -> Batch:
        """A batch that travels inside the entry."""
        rows = to_ipc(updates)
        return _batch(updates, schema, (Inline(rows),), len(rows))

    def build_few(self, rows: pa.RecordBatch, schema: int, *, lower: int, upper: int) -> Batch:
        """The same, of rows whose times the caller knows, on the way of every small write."""
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
        """A batch whose parts are durable objects under a staging id, waiting to be linked."""
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
        """The same of tables that need not fit into memory together; None if there is no row."""
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
        """The updates of `batch` with times in `[lower, upper)`, as rows of `schema`."""
        pieces = [
            self.part_rows(collection, each, schema)
            for each in part_scans_of(collection, batch, lower=lower, upper=upper)
        ]
        return pa.concat_tables(pieces) if len(pieces) != 1 else pieces[0]

    def part_rows(
        self, collection: CollectionState, piece: PartScan, schema: SchemaVersion
    ) -> pa.Table:
        """The updates of one slice, as rows of `schema`."""
        rows = self._part(piece.part, stored_columns_of(piece.written))
        if not piece.whole:
            times = rows.column(TIME)
            within = pc.and_(pc.greater_equal(times, piece.lower), pc.less(times, piece.upper))
            rows = rows.filter(within)
        return self._read_through(collection, rows, piece.written, schema)

    def footer(self, part: Stored) -> pq.FileMetaData:
        """What the footer of an object tells, verified; the latest used are remembered."""
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
                else "Its footer is not what was written.",
            )
        told = pq.read_metadata(pa.BufferReader(data))
        with self._lock:
            self._footers[part.key] = told
            if len(self._footers) > FOOTERS_KEPT:
                self._footers.popitem(last=False)
        return told

    def opened(self, part: Stored) -> pq.ParquetFile:
        """An object, verified, to be read column by column."""
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
                    detail="Only the codec can bring what they wrote together.",
                    hint="Open it with create_or_load and the codecs of its keys and values.",
                )
            rows = _recoded(rows, written, self.codecs[collection.id])
        return conform(rows, stored_columns_of(schema), defaults_of(collection.schemas))


@lru_cache(maxsize=1024)
def defaults_of(schemas: tuple[SchemaVersion, ...]) -> Mapping[str, pa.Scalar]:
    """What rows hold in the columns that were added after they were written."""
    found: dict[str, pa.Scalar] = {}
    for version in schemas:
        if version.defaults:
            row = pa.ipc.open_stream(pa.py_buffer(version.defaults)).read_all()
            columns = columns_of(schemas[-1])
            for name in row.schema.names:
                found[name] = row.column(name).cast(columns.field(name).type)[0]
    return found


def _recoded(rows: pa.Table, written: SchemaVersion, codecs: tuple[Codec, Codec]) -> pa.Table:
    """Keys and values as the codecs write them now."""
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
    """One batch of all the parts, which were written in one schema and side by side."""
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
    """The columns of Parquet that hold the values, by path."""
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
    """Whether readers that skip by statistics and dictionaries order values as we do.

    SUBTLE: Spark takes NaN for the largest number, which Arrow leaves out of bounds,
    and 0.0 for -0.0; and it rounds bounds on milliseconds. Rows would go missing.
    """
    return not (pa.types.is_floating(kind) or (pa.types.is_timestamp(kind) and kind.unit == "ms"))


def _stored(key: str, data: bytes) -> Stored:
    """What is recorded of a Parquet object; it ends in the length of its footer and a magic."""
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
