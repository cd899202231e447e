"""Encoded values as a topic contains them."""

import pickle
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from penstock.sources.formats import Decoded, Format


def values(*records: bytes | None) -> pa.ChunkedArray:
    return pa.chunked_array([pa.array(records, pa.binary())])


def decoded(a_format: Format, *records: bytes | None) -> Decoded:
    """Decode the records and check the invariants of every format."""
    given = values(*records)
    decoded_rows = a_format.decode(given)
    decoded_rows.rows.validate(full=True)
    assert decoded_rows.rows.num_rows == len(records)
    assert decoded_rows.rows.schema == a_format.schema
    rows = [bad.row for bad in decoded_rows.bad]
    assert rows == sorted(set(rows))
    nothing = [row for row, record in enumerate(records) if record is None]
    for row in (*rows, *nothing):
        assert set(decoded_rows.rows.slice(row, 1).to_pylist()[0].values()) == {None}
    assert not set(nothing) & set(rows)
    assert all(0 < len(bad.reason) < 300 and bad.reason.isprintable() for bad in decoded_rows.bad)
    elsewhere = pickle.loads(pickle.dumps(a_format))
    assert elsewhere == a_format
    assert elsewhere.schema == a_format.schema
    same(elsewhere.decode(in_chunks(given)), decoded_rows)
    return decoded_rows


def in_chunks(given: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the same values in chunks, some with an offset into their buffer."""
    whole = given.combine_chunks()
    cut = len(whole) // 2
    return pa.chunked_array([whole.slice(0, cut), whole.slice(0, 0), whole.slice(cut)], pa.binary())


def same(one: Decoded, other: Decoded) -> None:
    assert one.bad == other.bad
    # Compare bytes: comparison by value treats NaN as unequal to itself and -0.0 as equal to 0.0.
    assert written(one.rows) == written(other.rows)


def written(rows: pa.Table) -> bytes:
    out = pa.BufferOutputStream()
    rows = rows.combine_chunks()
    # take() drops the bytes under nulls and before offsets.
    rows = rows.take(pa.array(range(rows.num_rows), pa.int64())).combine_chunks()
    with pa.ipc.new_stream(out, rows.schema) as stream:
        stream.write_table(rows)
    return out.getvalue().to_pybytes()


def reasons(decoded_rows: Decoded) -> list[str]:
    return [bad.reason for bad in decoded_rows.bad]


def column(decoded_rows: Decoded, name: str) -> Sequence[Any]:
    listed: list[Any] = decoded_rows.rows.column(name).to_pylist()
    return listed
