"""Encoding of all stored bytes, for every released version.

Entries, rollups and holds are *frames*:

    0    4   magic, "PNST"
    4    1   kind: E entry, R rollup, H hold
    5    1   encoding version, 1 or 2
    6    2   zero
    8    8   length of the body, little-endian
    16   …   the body: MessagePack
    …    8   XXH64 (seed 0) of all bytes before it, little-endian

A frame that is too short, too long, altered or of an unsupported version is rejected with
the name of its object. The code never guesses, skips or deletes such a frame.

A frame has the lowest version that can express its body. Version 2 is used if a collection
was replaced (ADR 0043): a release that supports only version 1 must not read past that
frame.

The bodies are the structs of `state.py` and `holds.py`, as maps by field name.
`docs/reference/format.md` specifies the format for authors of other readers.
"""

import struct
from enum import Enum
from typing import Final, TypeVar

import msgspec
from immutables import Map
from msgspec import Struct

from penstock.durable import checksum_of as checksum
from penstock.errors import Corruption, StoreRefused
from penstock.persist.state import CollectionState, Entry, ReplaceCollection, State, Writer

__all__ = [
    "ENCODING_VERSIONS",
    "FrameKind",
    "checksum",
    "decode_entry",
    "decode_frame",
    "decode_rollup",
    "encode_entry",
    "encode_frame",
    "encode_rollup",
]

ENCODING_VERSIONS: Final = (1, 2)

_MAGIC: Final = b"PNST"
_HEAD: Final = struct.Struct("<4scBHQ")
_TAIL: Final = struct.Struct("<Q")

_encoder: Final = msgspec.msgpack.Encoder()

T = TypeVar("T")


class FrameKind(Enum):
    """Kind of a frame."""

    ENTRY = b"E"
    ROLLUP = b"R"
    HOLD = b"H"


class _Rollup(Struct, frozen=True):
    """Serialized state, sorted by key."""

    seqno: int
    location: str
    epoch: int
    writer: Writer | None
    next_id: int
    collections: tuple[CollectionState, ...]
    staging: dict[str, int]
    garbage: dict[str, int]
    collecting: int | None
    collected: int
    rollups: tuple[int, ...]
    expired: dict[str, int]
    tokens: dict[int, str]


def encode_frame(kind: FrameKind, body: object, *, version: int = 1) -> bytes:
    """Encode `body` as a frame."""
    packed = _encoder.encode(body)
    head = _HEAD.pack(_MAGIC, kind.value, version, 0, len(packed)) + packed
    return head + _TAIL.pack(checksum(head))


def decode_frame(data: bytes, kind: FrameKind, body: type[T], *, key: str, where: str) -> T:
    """Decode the body of a frame, after verification.

    Raises:
        Corruption: the frame is damaged or of another kind.
        StoreRefused: this release does not support the version of the frame.
    """
    if len(data) < _HEAD.size + _TAIL.size:
        raise _damaged(key, where, f"It has {len(data)} bytes, too few for a frame.")
    magic, found, version, _, length = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        raise _damaged(key, where, "It does not begin as a frame does.")
    whole = _HEAD.size + length + _TAIL.size
    if version in ENCODING_VERSIONS and len(data) != whole:
        raise _damaged(key, where, f"It has {len(data)} bytes and should have {whole}.")
    (told,) = _TAIL.unpack_from(data, len(data) - _TAIL.size)
    if told != checksum(memoryview(data)[: -_TAIL.size]):
        raise _damaged(key, where, "Its checksum does not match its contents.")
    if version not in ENCODING_VERSIONS:
        raise StoreRefused(
            f'object "{key}" of location "{where}" has encoding version {version}',
            detail=f"This release reads versions {' and '.join(map(str, ENCODING_VERSIONS))}. "
            "Nothing was changed.",
            hint="Open the location with the release that wrote it, or a newer one.",
        )
    if found != kind.value:
        raise _damaged(key, where, f"It holds a frame of kind {found!r}, not {kind.value!r}.")
    try:
        return msgspec.msgpack.decode(memoryview(data)[_HEAD.size : -_TAIL.size], type=body)
    except msgspec.DecodeError as error:
        raise _damaged(key, where, "Its body is not what this version writes.") from error


def encode_entry(entry: Entry) -> bytes:
    """Encode a log entry."""
    replaces = any(isinstance(each, ReplaceCollection) for each in entry.operations)
    return encode_frame(FrameKind.ENTRY, entry, version=2 if replaces else 1)


def decode_entry(data: bytes, *, key: str, where: str) -> Entry:
    """Decode and verify a log entry; raises the same errors as `decode_frame`."""
    return decode_frame(data, FrameKind.ENTRY, Entry, key=key, where=where)


def encode_rollup(state: State) -> bytes:
    """Encode the complete state, with the rows of every inline batch (invariant 5)."""
    replaced = any(each.predecessors for each in state.collections.values())
    return encode_frame(
        FrameKind.ROLLUP,
        _Rollup(
            seqno=state.seqno,
            location=state.location,
            epoch=state.epoch,
            writer=state.writer,
            next_id=state.next_id,
            collections=tuple(state.collections[id] for id in sorted(state.collections)),
            staging=dict(sorted(state.staging.items())),
            garbage=dict(sorted(state.garbage.items())),
            collecting=state.collecting,
            collected=state.collected,
            rollups=state.rollups,
            expired=dict(sorted(state.expired.items())),
            tokens=dict(sorted(state.tokens.items())),
        ),
        version=2 if replaced else 1,
    )


def decode_rollup(data: bytes, *, key: str, where: str) -> State:
    """Decode and verify the state of a rollup; raises the same errors as `decode_frame`."""
    rollup = decode_frame(data, FrameKind.ROLLUP, _Rollup, key=key, where=where)
    return State(
        seqno=rollup.seqno,
        location=rollup.location,
        epoch=rollup.epoch,
        writer=rollup.writer,
        next_id=rollup.next_id,
        collections=Map({collection.id: collection for collection in rollup.collections}),
        names=Map({each.name: each.id for each in rollup.collections if not each.successor}),
        staging=Map(rollup.staging),
        garbage=Map(rollup.garbage),
        collecting=rollup.collecting,
        collected=rollup.collected,
        rollups=rollup.rollups,
        expired=Map(rollup.expired),
        tokens=Map(rollup.tokens),
    )


def _damaged(key: str, where: str, detail: str) -> Corruption:
    return Corruption(key, where=where, detail=detail)
