"""Key ranges of shards, and addresses that need TLS."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import UsageError
from penstock.protocol.key_range import WHOLE, KeyRange, split_evenly
from penstock.protocol.transport_security import Security, is_private
from tests.protocol.vectors import cases, name

hashes = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize("case", cases("shard_split"), ids=name)
def test_split_of_key_range_equals_flow(case):
    key_range = KeyRange(case["input"]["key_begin"], case["input"]["key_end"])
    children = [[half.begin, half.end] for half in key_range.split()]
    assert children == case["expect"]["children"]
    assert [str(half).split("-") for half in key_range.split()] == case["expect"]["children_hex"]


@pytest.mark.parametrize("case", cases("initial_splits"), ids=name)
def test_split_evenly_equals_flow(case):
    ranges = [str(shard).split("-") for shard in split_evenly(case["input"]["count"])]
    assert ranges == case["expect"]["ranges_hex"]


@pytest.mark.parametrize("case", cases("shard_routing"), ids=name)
def test_hash_belongs_to_shard_of_flow(case):
    ranges = [KeyRange(*bounds) for bounds in case["input"]["ranges"]]
    key_hash = case["expect"]["hash_u32"]
    [index] = [number for number, shard in enumerate(ranges) if shard.contains(key_hash)]
    assert index == case["expect"]["shard_index"]


@given(count=st.integers(1, 500), key_hash=hashes)
def test_split_evenly_puts_every_hash_in_one_shard(count, key_hash):
    ranges = split_evenly(count)
    assert sum(shard.contains(key_hash) for shard in ranges) == 1
    widths = [shard.width for shard in ranges]
    assert sum(widths) == WHOLE.width
    assert max(widths) - min(widths) <= 1


@given(first=st.tuples(hashes, hashes), second=st.tuples(hashes, hashes), key_hash=hashes)
def test_overlaps_and_covers_agree_with_contains(first, second, key_hash):
    one, other = KeyRange(*sorted(first)), KeyRange(*sorted(second))
    if one.contains(key_hash) and other.contains(key_hash):
        assert one.overlaps(other)
    if one.covers(other):
        assert one.overlaps(other)
        assert one.contains(other.begin)
        assert one.contains(other.end)
    assert one.overlaps(other) is other.overlaps(one)


@pytest.mark.parametrize(("begin", "end"), [(1, 0), (-1, 5), (0, 2**32)])
def test_key_range_with_invalid_ends_raises_usage_error(begin, end):
    with pytest.raises(UsageError, match=r"key range .* is invalid"):
        KeyRange(begin, end)


@pytest.mark.parametrize(
    ("address", "private"),
    [
        ("unix:/tmp/x.sock", True),
        ("127.0.0.1:80", True),
        ("localhost:1", True),
        ("[::1]:5", True),
        ("127.1.2.3:5", True),
        ("unix-abstract:x", False),
        ("0.0.0.0:5", False),
        ("[::]:5", False),
        ("example.com:5", False),
        ("10.0.0.1:5", False),
        ("localhost.example.com:5", False),
    ],
)
def test_security_check_of_public_address_needs_tls(address, private):
    assert is_private(address) is private
    if private:
        Security().check(address)
    else:
        with pytest.raises(UsageError, match="needs TLS"):
            Security(token="secret").check(address)
        Security(plaintext=True).check(address)
    assert "secret" not in repr(Security(token="secret"))
