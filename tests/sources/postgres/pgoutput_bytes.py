"""Frames of a replication stream, encoded as a server sends them."""

import struct
from collections.abc import Sequence

Value = tuple[str, bytes]
"""Kind (`n`, `u`, `t` or `b`), and the bytes of kinds `t` and `b`."""

EPOCH_US = 946_684_800_000_000


def frame(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack(">i", len(body) + 4) + body


def message(body: bytes) -> bytes:
    return frame(b"d", b"w" + struct.pack(">qqq", 1, 2, 3) + body)


def keepalive(wal_end: int, *, reply: bool = False) -> bytes:
    return frame(b"d", b"k" + struct.pack(">qqB", wal_end, 3, reply))


def begin(commit_lsn: int, committed_us: int, xid: int) -> bytes:
    return message(b"B" + struct.pack(">qqI", commit_lsn, committed_us - EPOCH_US, xid))


def commit(commit_lsn: int, end_lsn: int, committed_us: int) -> bytes:
    return message(b"C\0" + struct.pack(">qqq", commit_lsn, end_lsn, committed_us - EPOCH_US))


def tuple_data(values: Sequence[Value]) -> bytes:
    written = struct.pack(">H", len(values))
    for kind, value in values:
        written += kind.encode()
        if kind in "tb":
            written += struct.pack(">i", len(value)) + value
    return written


def insert(relation: int, new: Sequence[Value]) -> bytes:
    return message(b"I" + struct.pack(">I", relation) + b"N" + tuple_data(new))


def update(
    relation: int, new: Sequence[Value], old_kind: str = "", old: Sequence[Value] = ()
) -> bytes:
    before = old_kind.encode() + tuple_data(old) if old_kind else b""
    return message(b"U" + struct.pack(">I", relation) + before + b"N" + tuple_data(new))


def delete(relation: int, old_kind: str, old: Sequence[Value]) -> bytes:
    return message(b"D" + struct.pack(">I", relation) + old_kind.encode() + tuple_data(old))


def string(text: str) -> bytes:
    return text.encode() + b"\0"


def relation(oid: int, namespace: str, name: str, columns: Sequence[tuple[str, int]]) -> bytes:
    body = b"R" + struct.pack(">I", oid) + string(namespace) + string(name) + b"d"
    body += struct.pack(">H", len(columns))
    for column, type_oid in columns:
        body += b"\1" + string(column) + struct.pack(">Ii", type_oid, -1)
    return message(body)


def type_name(oid: int, namespace: str, name: str) -> bytes:
    return message(b"Y" + struct.pack(">I", oid) + string(namespace) + string(name))


def truncate(relations: Sequence[int], options: int = 0) -> bytes:
    listed = struct.pack(f">{len(relations)}I", *relations)
    return message(b"T" + struct.pack(">IB", len(relations), options) + listed)


def origin(lsn: int, name: str) -> bytes:
    return message(b"O" + struct.pack(">q", lsn) + string(name))


def logical_message(lsn: int, prefix: str, content: bytes, *, transactional: bool) -> bytes:
    body = struct.pack(">Bq", transactional, lsn) + string(prefix)
    return message(b"M" + body + struct.pack(">i", len(content)) + content)
