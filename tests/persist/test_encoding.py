"""Bytes at rest decode to the written value, or are rejected."""

import pytest

from penstock.errors import Corruption, StoreRefused
from penstock.persist.encoding import (
    ENCODING_VERSIONS,
    FrameKind,
    checksum,
    decode_entry,
    decode_frame,
    decode_rollup,
    encode_entry,
    encode_frame,
    encode_rollup,
)
from penstock.persist.holds import Hold
from penstock.persist.state import Entry, OpenStaging, State, TakeEpoch, Writer

TAKES = TakeEpoch(Writer("w", "h", 1), "l"), OpenStaging("1-0")
ENTRY = encode_entry(Entry(location="l", epoch=1, token="t", at_ms=5, operations=TAKES))
ROLLUP = encode_rollup(State(seqno=3, location="l", epoch=2))
HOLD = encode_frame(FrameKind.HOLD, Hold("r1", "me", 1, 9, 4, {1: 2}, 0, 0))


def decode(kind: FrameKind, data: bytes) -> object:
    match kind:
        case FrameKind.ENTRY:
            return decode_entry(data, key="log/7", where="here")
        case FrameKind.ROLLUP:
            return decode_rollup(data, key="rollup/7", where="here")
        case FrameKind.HOLD:
            return decode_frame(data, FrameKind.HOLD, Hold, key="hold/7", where="here")


FRAMES = [(FrameKind.ENTRY, ENTRY), (FrameKind.ROLLUP, ROLLUP), (FrameKind.HOLD, HOLD)]


@pytest.mark.parametrize(("kind", "frame"), FRAMES)
def test_decode_of_frame_with_flipped_bit_raises_corruption(kind, frame):
    decode(kind, frame)
    for at in range(len(frame)):
        for bit in range(8):
            flipped = bytearray(frame)
            flipped[at] ^= 1 << bit
            with pytest.raises(Corruption, match="/7"):
                decode(kind, bytes(flipped))


@pytest.mark.parametrize(("kind", "frame"), FRAMES)
def test_decode_of_frame_with_wrong_length_raises_corruption(kind, frame):
    for length in range(len(frame)):
        with pytest.raises(Corruption):
            decode(kind, frame[:length])
    with pytest.raises(Corruption):
        decode(kind, frame + b"\0")


@pytest.mark.parametrize("version", [0, max(ENCODING_VERSIONS) + 1, 255])
def test_decode_of_other_encoding_version_raises_store_refused(version):
    frame = bytearray(ENTRY)
    frame[5] = version
    frame[-8:] = checksum(bytes(frame[:-8])).to_bytes(8, "little")
    with pytest.raises(StoreRefused, match=f'"log/7".*encoding version {version}'):
        decode(FrameKind.ENTRY, bytes(frame))


def test_decode_of_frame_of_other_kind_raises_corruption():
    with pytest.raises(Corruption) as found:
        decode(FrameKind.ROLLUP, ENTRY)
    assert "kind" in found.value.detail


def test_decode_of_frame_with_malformed_body_raises_corruption():
    with pytest.raises(Corruption):
        decode(FrameKind.ENTRY, encode_frame(FrameKind.ENTRY, {"epoch": "one"}))
