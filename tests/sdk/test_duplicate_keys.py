"""Duplicate key check of a transaction, and its key hashes."""

import subprocess
import sys

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.materialize.errors import ConnectorRefused
from penstock.protocol.messages import Acknowledge, Acknowledged, Flush, Load
from penstock.sdk.duplicate_keys import KeyHashes
from tests.sdk.stream_client import committed, drained, ready, store
from tests.sdk.toy import keys

KEYS = st.sampled_from([b"", b"a", b"b", b"a\0", b"12345678", b"123456789"]) | st.binary(
    max_size=20
)


@given(st.lists(st.lists(KEYS, max_size=6), min_size=1, max_size=4))
def test_find_duplicate_finds_exactly_the_duplicates(batches):
    hashes = KeyHashes()
    for batch in batches:
        hashes.add(pa.array(batch, pa.binary()))
    flat = [key for batch in batches for key in batch]
    found = hashes.find_duplicate()
    if found is None:
        assert len(set(flat)) == len(flat)
    else:
        first, second = found
        assert first < second
        assert flat[first] == flat[second]


def test_find_duplicate_with_many_keys_returns_none():
    hashes = KeyHashes()
    numbers = pa.array(range(200_000)).cast(pa.string())
    for text in (numbers, joined("a rather long beginning of a key ", numbers)):
        hashes.add(text.cast(pa.binary()))
    assert hashes.find_duplicate() is None
    hashes.add(pa.array([b"a rather long beginning of a key 77"], pa.binary()))
    assert hashes.find_duplicate() == (200_077, 400_000)


def joined(before: str, texts: pa.Array) -> pa.Array:
    return pc.binary_join_element_wise(before, texts, "")


@pytest.mark.parametrize(
    "stores", [[store(7, 8, 7)], [store(7), store(8), store(7)]], ids=["in one", "in several"]
)
def test_key_stored_twice_is_rejected(toy, connection, stores):
    stream = ready(connection)
    with pytest.raises(ConnectorRefused, match="a key of things was stored twice") as caught:
        committed(stream, *stores)
    assert "Rows 0 and 2" in caught.value.detail
    assert toy.checkpoint == b""
    assert toy.rows == {}


def test_key_loaded_twice_is_rejected(connection):
    stream = ready(connection)
    for each in (1, 2, 1):
        stream.send(Load(0, keys(each)))
    stream.send(Flush())
    with pytest.raises(ConnectorRefused, match="a key of things was loaded twice"):
        drained(stream)


def test_same_key_in_other_binding_or_transaction_is_accepted(toy, connection):
    stream = ready(connection, names=("one", "two"))
    committed(stream, store(1), store(1, binding=1))
    stream.send(Acknowledge())
    assert stream.receive() == Acknowledged()
    committed(stream, store(1))
    assert {name: len(rows) for name, rows in toy.rows.items()} == {"one": 1, "two": 1}
    stream.cancel()


def test_delta_updates_with_same_key_are_accepted(toy, connection):
    stream = ready(connection, delta=True)
    committed(stream, store(1, 1), store(1))
    assert toy.checkpoint == b"cp"
    stream.cancel()


def test_hashes_differ_between_processes():
    script = (
        "import pyarrow as pa; from penstock.sdk.duplicate_keys import KeyHashes; "
        "hashes = KeyHashes(); hashes.add(pa.array([b'key'], pa.binary())); "
        "print(hashes._high[0][0], hashes._low[0][0])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    hashes = KeyHashes()
    hashes.add(pa.array([b"key", b"key"], pa.binary()))
    assert hashes.find_duplicate() == (0, 1)
    assert done.stdout.decode().split() != [str(hashes._high[0][0]), str(hashes._low[0][0])]


def test_keys_of_different_length_have_different_hashes():
    hashes = KeyHashes()
    hashes.add(pa.array([b"\2", b"\1\0"], pa.binary()))
    assert hashes._high[0][0] != hashes._high[0][1]
