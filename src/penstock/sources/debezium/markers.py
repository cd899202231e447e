"""Transaction metadata of Debezium: BEGIN and END records.

A record becomes

    status     BEGIN or END
    id         id as received; `transaction_ids.py` extracts the transaction
    counts     for an END, the number of events by data collection, as JSON

and a null value becomes nulls.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from penstock.sources.formats.avro_format import AvroFormat
from penstock.sources.formats.format import Bad, Decoded, blanked
from penstock.sources.formats.json_format import JsonFormat

__all__ = ["MarkersAvro", "MarkersJson"]

_SCHEMA: Final = pa.schema([("status", pa.string()), ("id", pa.string()), ("counts", pa.string())])
_JSON: Final = JsonFormat.of(
    {"status": "text", "id": "text", "data_collections": "json", "payload": "json"}
)
_NAMES: Final = ("status", "id", "data_collections")


class _CollectionCount(msgspec.Struct):
    data_collection: str
    event_count: int


@dataclass(frozen=True, slots=True)
class MarkersJson:
    """Transaction metadata in JSON, with or without an embedded schema."""

    schema: pa.Schema = field(default=_SCHEMA, init=False)

    def decode(self, values: pa.ChunkedArray) -> Decoded:
        """Decode values into rows of `schema`."""
        decoded = _JSON.decode(values)
        rows = decoded.rows
        payload = rows.column("payload")
        is_wrapped = pc.and_(pc.is_null(rows.column("status")), pc.is_valid(payload))
        if pc.any(is_wrapped).as_py():
            inner = pc.if_else(is_wrapped, payload, pa.scalar(None, pa.string())).cast(pa.binary())
            unwrapped = _JSON.decode(pa.chunked_array([inner.combine_chunks()]))
            pairs = ((rows.column(name), unwrapped.rows.column(name)) for name in _NAMES)
            rows = pa.table([pc.coalesce(*pair) for pair in pairs], names=list(_NAMES))
            decoded = Decoded(rows, (*decoded.bad, *unwrapped.bad))
        counts = rows.column("data_collections").to_pylist()
        counts_json = (None if text is None else text.encode() for text in counts)
        return _markers(values, rows, counts_json, decoded.bad)


@dataclass(frozen=True, slots=True)
class MarkersAvro:
    """Transaction metadata in Avro."""

    marker: AvroFormat
    schema: pa.Schema = field(default=_SCHEMA, init=False)

    def decode(self, values: pa.ChunkedArray) -> Decoded:
        """Decode values into rows of `schema`.

        Raises:
            TransientError: the registry could not return a schema.
            DefiniteError: the registry rejects the request.
        """
        decoded = self.marker.decode(values)
        names = set(decoded.rows.column_names)
        nulls = pa.nulls(decoded.rows.num_rows, pa.string())
        rows = pa.table(
            [decoded.rows.column(name) if name in names else nulls for name in _NAMES],
            names=list(_NAMES),
        )
        counts = rows.column("data_collections").to_pylist()
        counts_json = (None if items is None else msgspec.json.encode(items) for items in counts)
        return _markers(values, rows, counts_json, decoded.bad)


def _markers(
    values: pa.ChunkedArray,
    rows: pa.Table,
    counts_json: Iterable[bytes | None],
    known_bad: Iterable[Bad],
) -> Decoded:
    bad = {record.row: record.reason for record in known_bad}
    counts: list[str | None] = []
    statuses, ids = (rows.column(name).to_pylist() for name in ("status", "id"))
    is_present = pc.is_valid(values).to_pylist()
    for row, (status, id, items) in enumerate(zip(statuses, ids, counts_json, strict=True)):
        counts.append(None)
        if not is_present[row] or row in bad:
            continue
        if status not in ("BEGIN", "END") or id is None:
            bad[row] = "it does not name the transaction that began or ended"
        elif status == "END":
            try:
                decoded = msgspec.json.decode(items or b"[]", type=list[_CollectionCount] | None)
            except msgspec.DecodeError:
                bad[row] = "it does not have the number of events of its transaction"
            else:
                by_name = {count.data_collection: count.event_count for count in decoded or []}
                counts[-1] = msgspec.json.encode(by_name).decode()
    texts = [pa.array(column, pa.string()) for column in (statuses, ids, counts)]
    return Decoded(blanked(texts, _SCHEMA, bad), tuple(Bad(row, bad[row]) for row in sorted(bad)))
