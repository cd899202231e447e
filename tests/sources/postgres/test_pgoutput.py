import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.errors import InternalError, TransientError
from penstock.sources.postgres.pgoutput import (
    Chunk,
    Decoder,
    LogicalMessage,
    Relation,
    RelationColumn,
    Truncate,
    TypeName,
    gather,
)
from tests.sources.postgres import pgoutput_bytes as wire
from tests.sources.postgres.pgoutput_bytes import Value

RECORDED = sorted((Path(__file__).parents[2] / "vectors" / "pgoutput").glob("*.bin"))

Row = tuple[str, int, int, str, list[Value] | None, list[Value] | None]
"""Kind, commit position, relation, kind of the old tuple, old tuple, new tuple."""


def decoded(data_parts: list[bytes], capacity: int, *, fill: int = 0) -> list[Chunk]:
    """Return the chunks that are taken when the decoder is full, and after the last byte."""
    decoder = Decoder(capacity)
    decoder._buffer[:] = fill
    chunks: list[Chunk] = []

    def take() -> None:
        if (chunk := decoder.take()) is not None:
            chunks.append(chunk)

    for data_part in data_parts:
        rest = data_part
        while rest:
            space = decoder.space()
            count = min(len(space), len(rest))
            space[:count] = rest[:count]
            decoder.filled(count)
            rest = rest[count:]
            assert decoder.scan() is None
            while decoder.full:
                take()
                assert decoder.scan() is None
    take()
    assert decoder.unscanned == 0
    return chunks


def tuples(chunk: Chunk, at: np.ndarray) -> list[list[Value] | None]:
    """Return the values that gather reads at each position."""
    found: list[list[Value] | None] = [None] * len(at)
    wide = chunk.buffer.astype(np.int64)
    counts = np.array([wide[p] * 256 + wide[p + 1] if p >= 0 else -1 for p in at])
    for count in np.unique(counts[at >= 0]):
        rows = np.flatnonzero(counts == count)
        columns = gather(chunk, at[rows], int(count))
        for place, row in enumerate(rows):
            values: list[Value] = []
            for column in columns:
                column.values.validate(full=True)
                value = column.values[place].as_py()
                if column.unchanged[place]:
                    assert value is None
                    values.append(("u", b""))
                elif value is None:
                    values.append(("n", b""))
                else:
                    values.append(("b" if column.binary else "t", value))
            found[row] = values
    return found


def rows_of(chunk: Chunk) -> list[Row]:
    old, new = tuples(chunk, chunk.old_at), tuples(chunk, chunk.new_at)
    return [
        (
            chr(chunk.kind[row]),
            int(chunk.commit_lsn[chunk.transaction[row]]),
            int(chunk.relation[row]),
            chr(chunk.old_kind[row]) if chunk.old_kind[row] else "",
            old[row],
            new[row],
        )
        for row in range(chunk.row_count)
    ]


def cut(data: bytes, at: list[int]) -> list[bytes]:
    ends = sorted({place % (len(data) + 1) for place in at} | {len(data)})
    starts = [0, *ends]
    return [data[start:end] for start, end in zip(starts, ends, strict=False)]


oids = st.integers(0, 2**32 - 1)
formats = st.sampled_from(["t", "b"])


def values(kind: str) -> st.SearchStrategy[Value]:
    written = st.binary(max_size=40).map(lambda value: (kind, value))
    return st.one_of(written, st.sampled_from([("n", b""), ("u", b"")]))


@st.composite
def streams(pick: st.DrawFn) -> tuple[bytes, list[Row], list[tuple[int, object]]]:
    """Draw bytes, their rows, and the marks with the index of the row after them."""
    kind = pick(formats)
    tuple_values = st.lists(values(kind), max_size=5)
    data = b""
    rows: list[Row] = []
    marks: list[tuple[int, object]] = []
    lsn = 0
    for xid in range(pick(st.integers(0, 6))):
        lsn += pick(st.integers(1, 2**40))
        data += wire.begin(lsn, 1_000_000 + xid, xid)
        for _ in range(pick(st.integers(0, 6))):
            what = pick(st.sampled_from("IIUUDDRYTMOk"))
            oid, new, old = pick(oids), pick(tuple_values), pick(tuple_values)
            old_kind = pick(st.sampled_from(["K", "O"]))
            if what == "I":
                data += wire.insert(oid, new)
                rows.append(("I", lsn, oid, "", None, new))
            elif what == "U":
                if pick(st.booleans()):
                    data += wire.update(oid, new, old_kind, old)
                    rows.append(("U", lsn, oid, old_kind, old, new))
                else:
                    data += wire.update(oid, new)
                    rows.append(("U", lsn, oid, "", None, new))
            elif what == "D":
                data += wire.delete(oid, old_kind, old)
                rows.append(("D", lsn, oid, old_kind, old, None))
            elif what == "R":
                data += wire.relation(oid, "shop", "ärger", [("a", 23), ("b", 25)])
                columns = (RelationColumn("a", 23, -1, True), RelationColumn("b", 25, -1, True))
                marks.append((len(rows), Relation(oid, "shop", "ärger", "d", columns)))
            elif what == "Y":
                data += wire.type_name(oid, "", "mood")
                marks.append((len(rows), TypeName(oid, "pg_catalog", "mood")))
            elif what == "T":
                data += wire.truncate([oid, 7], 2)
                marks.append((len(rows), Truncate((oid, 7), False, True)))
            elif what == "M":
                data += wire.logical_message(9, "us", b"\0x", transactional=True)
                marks.append((len(rows), LogicalMessage(True, 9, "us", b"\0x")))
            elif what == "O":
                data += wire.origin(5, "elsewhere")
            else:
                data += wire.keepalive(lsn)
        data += wire.commit(lsn, lsn + 48, 1_000_000 + xid)
        lsn += 48
    return data, rows, marks


@given(
    streams(), st.lists(st.integers(0, 100_000), max_size=20), st.sampled_from([64, 300, 1 << 20])
)
@settings(max_examples=200)
def test_decoder_yields_same_messages_however_bytes_are_split(
    stream: tuple[bytes, list[Row], list[tuple[int, object]]], places: list[int], capacity: int
) -> None:
    data, rows, marks = stream
    chunks = decoded(cut(data, places), capacity)
    assert [row for chunk in chunks for row in rows_of(chunk)] == rows
    before = 0
    found = []
    for chunk in chunks:
        found += [(before + place, mark) for place, mark in chunk.marks]
        assert len(chunk.mark_transaction) == len(chunk.marks)
        before += chunk.row_count
    assert found == marks


@given(streams(), st.lists(st.integers(0, 100_000), max_size=20))
def test_decoder_reports_each_transaction_once_with_times_however_bytes_are_split(
    stream: tuple[bytes, list[Row], list[tuple[int, object]]], places: list[int]
) -> None:
    chunks = decoded(cut(stream[0], places), 300)
    ends: dict[int, int] = {}
    for chunk in chunks:
        assert (np.diff(chunk.commit_lsn) > 0).all()
        for lsn, end, xid, time in zip(
            chunk.commit_lsn, chunk.end_lsn, chunk.xid, chunk.committed_us, strict=True
        ):
            assert time == 1_000_000 + xid
            assert ends.get(int(lsn), 0) == 0, "a transaction continues after its end"
            ends[int(lsn)] = int(end)
        # Only the last transaction may be open.
        assert (chunk.end_lsn[:-1] > 0).all()
    assert all(end == lsn + 48 for lsn, end in ends.items())
    assert [chunk.wal_end for chunk in chunks] == sorted(chunk.wal_end for chunk in chunks)
    if ends:
        assert chunks[-1].wal_end == max(ends.values())


def test_decoder_keepalive_sets_wal_end_and_reply_request() -> None:
    data = wire.keepalive(70) + wire.keepalive(50, reply=True)
    (chunk,) = decoded([data], 1 << 16)
    assert (chunk.row_count, chunk.wal_end, chunk.reply_requested) == (0, 70, True)
    decoder = Decoder()
    taken = None
    for data_part in (data, wire.keepalive(60)):
        decoder.space()[: len(data_part)] = data_part
        decoder.filled(len(data_part))
        decoder.scan()
        taken = decoder.take()
    assert taken is not None
    assert (taken.wal_end, taken.reply_requested) == (70, False)
    assert decoder.take() is None


def test_decoder_reads_frame_larger_than_its_buffer() -> None:
    large = [("t", b"x" * 1_000_000), ("n", b"")]
    data = wire.begin(1, 0, 1) + wire.insert(5, large) + wire.insert(5, [("t", b"y")])
    data += wire.commit(1, 2, 0)
    chunks = decoded([data[at : at + 4_096] for at in range(0, len(data), 4_096)], 65_536)
    assert [row[5] for chunk in chunks for row in rows_of(chunk)] == [large, [("t", b"y")]]


def test_decoder_mark_outside_transaction_has_no_transaction() -> None:
    data = wire.logical_message(3, "us", b"", transactional=False)
    data += wire.begin(9, 0, 1) + wire.truncate([5]) + wire.commit(9, 12, 0)
    (chunk,) = decoded([data], 1 << 16)
    assert chunk.mark_transaction.tolist() == [-1, 0]


def test_decoder_returns_frame_without_change_at_its_position() -> None:
    data = wire.keepalive(4) + wire.frame(b"N", b"notice") + wire.keepalive(5)
    decoder = Decoder()
    decoder.space()[: len(data)] = data
    decoder.filled(len(data))
    frame = decoder.scan()
    assert frame is not None
    assert (frame.kind, frame.body) == (b"N", b"notice")
    assert decoder.scan() is None
    chunk = decoder.take()
    assert chunk is not None
    assert chunk.wal_end == 5


INSERT = wire.insert(1, [("t", b"abc")])
DAMAGED = {
    "a frame has an impossible length": b"d\0\0\0\3xxxx",
    "a frame has an impossible length ": b"d\xff\xff\xff\xffxxxx",
    "a frame holds neither": wire.frame(b"d", b"z" * 40),
    "a frame holds neither a message": wire.frame(b"d", b""),
    "unknown type, b'S'": wire.message(b"S\0\0"),
    "cut short": wire.message(b"B\0\0"),
    "is cut short": wire.frame(b"d", b"k\0"),
    "message is cut short": wire.frame(b"d", b"w" + bytes(24)),
    "longer than": wire.message(b"B" + bytes(21)),
    "does not end with its message": wire.begin(1, 0, 1) + wire.frame(b"d", INSERT[5:] + b"!"),
    "tuple does not end": wire.begin(1, 0, 1) + wire.frame(b"d", INSERT[5:-1]),
    "outside of a transaction": INSERT,
    "begins inside another": wire.begin(1, 0, 1) + wire.begin(2, 0, 2),
    "did not begin": wire.commit(1, 2, 0),
    "that did not begin": wire.begin(1, 0, 1) + wire.commit(3, 4, 0),
    "tuple of an unknown kind": wire.begin(1, 0, 1) + wire.message(b"D\0\0\0\1N\0\0"),
    "of an unknown kind": wire.begin(1, 0, 1) + wire.message(b"I\0\0\0\1K\0\0"),
    "message b'T' is too short": wire.begin(1, 0, 1) + wire.message(b"T\xff\xff\xff\xff\0"),
    "message b'R' is too short": wire.begin(1, 0, 1) + wire.message(b"R\0\0\0\1no end"),
    "message b'Y' is too long": wire.begin(1, 0, 1) + wire.message(b"Y\0\0\0\1a\0b\0c"),
}


@pytest.mark.parametrize("reason", DAMAGED)
def test_decoder_with_malformed_bytes_raises_transient_error_with_reason(reason: str) -> None:
    with pytest.raises(TransientError, match=reason.strip()):
        decoded([DAMAGED[reason]], 1 << 16)


def test_decoder_keeps_rows_before_malformed_message() -> None:
    data = wire.begin(1, 0, 1) + INSERT + wire.message(b"?")
    decoder = Decoder()
    decoder.space()[: len(data)] = data
    decoder.filled(len(data))
    with pytest.raises(TransientError):
        decoder.scan()
    chunk = decoder.take()
    assert chunk is not None
    assert rows_of(chunk) == [("I", 1, 1, "", None, [("t", b"abc")])]
    with pytest.raises(TransientError):
        decoder.scan()


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda path: path.stem)
def test_recorded_pgoutput_streams_contain_all_row_messages(recorded: Path) -> None:
    chunks = decoded([recorded.read_bytes()], 1 << 16)
    assert {row[0] for chunk in chunks for row in rows_of(chunk)} == {"I", "U", "D"}


def outcome(data: bytes, fill: int) -> object:
    """Return all observable results of decoding and gathering `data`."""
    decoder = Decoder(1 << 16)
    decoder._buffer[:] = fill
    decoder.space()[: len(data)] = data
    decoder.filled(len(data))
    seen: list[object] = []
    try:
        for _ in range(len(data)):
            if (frame := decoder.scan()) is None:
                break
            seen.append(frame)
    except TransientError as error:
        seen.append(str(error))
    try:
        chunk = decoder.take()
        if chunk is not None:
            seen += rows_of(chunk)
            seen += chunk.marks
            seen.append((chunk.commit_lsn.tolist(), chunk.end_lsn.tolist(), chunk.wal_end))
    except TransientError as error:
        seen.append(str(error))
    return seen


@given(
    st.integers(0, 1 << 20),
    st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), max_size=8),
    st.integers(0, 1 << 20),
    st.integers(0, 1 << 20),
)
@settings(max_examples=400)
@example(0, [], 0, 1 << 20)
def test_decoder_with_damaged_bytes_does_not_read_beyond_its_input(
    which: int, flips: list[tuple[int, int]], start: int, length: int
) -> None:
    """The memory after the bytes must not affect any result."""
    data = bytearray(RECORDED[which % len(RECORDED)].read_bytes())
    for place, byte in flips:
        data[place % len(data)] = byte
    begin = start % len(data) if start % 3 == 0 else 0
    part = bytes(data[begin : begin + length])
    assert outcome(part, 0) == outcome(part, 0xFF)


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda path: path.stem)
def test_decoder_scans_only_complete_frames(recorded: Path) -> None:
    data = recorded.read_bytes()
    boundaries, at = [0], 0
    while at < len(data):
        at += 1 + int.from_bytes(data[at + 1 : at + 5])
        boundaries.append(at)
    for end in range(len(data)):
        decoder = Decoder(1 << 13)
        decoder._buffer[: len(data)] = np.frombuffer(data, np.uint8)
        decoder.filled(end)
        assert decoder.scan() is None
        assert decoder.scanned == max(place for place in boundaries if place <= end)


@given(st.lists(st.integers(-5, 5_000), max_size=5), st.integers(0, 5), st.data())
def test_gather_at_invalid_positions_raises_or_returns_valid_arrays(
    at: list[int], columns: int, data: st.DataObject
) -> None:
    raw = np.frombuffer(RECORDED[0].read_bytes(), np.uint8)
    size = data.draw(st.integers(0, len(raw)))
    (chunk,) = decoded([wire.keepalive(1)], 64)
    chunk.buffer = np.concatenate([raw[:size]])
    try:
        gathered = gather(chunk, np.array(at, np.int64), columns)
    except (InternalError, TransientError):
        return
    for column in gathered:
        column.values.validate(full=True)
        assert len(column.values) == len(at)


def test_gather_of_no_rows_and_absent_tuples_returns_nulls() -> None:
    (chunk,) = decoded([wire.keepalive(1)], 64)
    assert [len(column.values) for column in gather(chunk, np.zeros(0, np.int64), 3)] == [0, 0, 0]
    (column,) = gather(chunk, np.array([-1, -1]), 1)
    assert column.values.to_pylist() == [None, None]
    assert column.values.type == pa.binary()


def test_gather_of_column_in_two_formats_raises_transient_error() -> None:
    data = wire.begin(1, 0, 1) + wire.insert(1, [("t", b"a")]) + wire.insert(1, [("b", b"a")])
    (chunk,) = decoded([data], 1 << 16)
    with pytest.raises(TransientError, match="both as text and as binary"):
        gather(chunk, chunk.new_at, 1)


def test_chunk_repr_shows_no_data_and_chunk_survives_pickle() -> None:
    (chunk,) = decoded([wire.begin(1, 0, 1) + wire.insert(1, [("t", b"secret")])], 1 << 16)
    assert repr(chunk) == "<Chunk: 1 rows, 1 transactions>"
    assert rows_of(pickle.loads(pickle.dumps(chunk))) == rows_of(chunk)
