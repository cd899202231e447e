"""Transaction metadata of Debezium: BEGIN and END records.

A record becomes

    status     BEGIN or END
    id         id as received; `ids.py` extracts the transaction
    counts     for an END, the number of events by data collection, as JSON

and a null value becomes nulls.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

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


class _Counted(msgspec.Struct):
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
        wrapped = pc.and_(pc.is_null(rows.column("status")), pc.is_valid(payload))
        if pc.any(wrapped).as_py():
            inner = pc.if_else(wrapped, payload, pa.scalar(None, pa.string())).cast(pa.binary())
            again = _JSON.decode(pa.chunked_array([inner.combine_chunks()]))
            pairs = ((rows.column(name), again.rows.column(name)) for name in _NAMES)
            rows = pa.table([pc.coalesce(*pair) for pair in pairs], names=list(_NAMES))
            decoded = Decoded(rows, (*decoded.bad, *again.bad))
        lists = ((None if said is None else said.encode()) for said in _told(rows))
        return _markers(values, rows, lists, decoded.bad)


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
        there = set(decoded.rows.column_names)
        nulls = pa.nulls(decoded.rows.num_rows, pa.string())
        rows = pa.table(
            [decoded.rows.column(name) if name in there else nulls for name in _NAMES],
            names=list(_NAMES),
        )
        lists = (None if said is None else msgspec.json.encode(said) for said in _told(rows))
        return _markers(values, rows, lists, decoded.bad)


def _told(rows: pa.Table) -> list[Any]:
    found: list[Any] = rows.column("data_collections").to_pylist()
    return found


def _markers(
    values: pa.ChunkedArray, rows: pa.Table, lists: Iterable[bytes | None], known: Iterable[Bad]
) -> Decoded:
    bad = {each.row: each.reason for each in known}
    counts: list[str | None] = []
    statuses, ids = (rows.column(name).to_pylist() for name in ("status", "id"))
    there = pc.is_valid(values).to_pylist()
    for row, (status, name, told) in enumerate(zip(statuses, ids, lists, strict=True)):
        counts.append(None)
        if not there[row] or row in bad:
            continue
        if status not in ("BEGIN", "END") or name is None:
            bad[row] = "it does not say which transaction began or ended"
        elif status == "END":
            try:
                found = msgspec.json.decode(told or b"[]", type=list[_Counted] | None) or []
            except msgspec.DecodeError:
                bad[row] = "it does not say how many events its transaction has"
            else:
                counted = {each.data_collection: each.event_count for each in found}
                counts[-1] = msgspec.json.encode(counted).decode()
    texts = [pa.array(each, pa.string()) for each in (statuses, ids, counts)]
    return Decoded(blanked(texts, _SCHEMA, bad), tuple(Bad(row, bad[row]) for row in sorted(bad)))
