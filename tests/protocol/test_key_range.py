"""Who has which keys."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import UsageError
from penstock.protocol.key_range import WHOLE, KeyRange, shards
from penstock.protocol.transport_security import Security, is_private
from tests.protocol.vectors import cases, name

hashes = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize("case", cases("shard_split"), ids=name)
def test_a_range_is_split_as_in_flow(case):
    said = KeyRange(case["input"]["key_begin"], case["input"]["key_end"])
    children = [[each.begin, each.end] for each in said.split()]
    assert children == case["expect"]["children"]
    assert [str(each).split("-") for each in said.split()] == case["expect"]["children_hex"]


@pytest.mark.parametrize("case", cases("initial_splits"), ids=name)
def test_shards_are_as_in_flow(case):
    found = [str(each).split("-") for each in shards(case["input"]["count"])]
    assert found == case["expect"]["ranges_hex"]


@pytest.mark.parametrize("case", cases("shard_routing"), ids=name)
def test_a_hash_is_in_one_shard(case):
    ranges = [KeyRange(*each) for each in case["input"]["ranges"]]
    [index] = [at for at, each in enumerate(ranges) if each.contains(case["expect"]["hash_u32"])]
    assert index == case["expect"]["shard_index"]


@given(count=st.integers(1, 500), key_hash=hashes)
def test_every_hash_is_in_exactly_one_shard(count, key_hash):
    found = shards(count)
    assert sum(each.contains(key_hash) for each in found) == 1
    assert sum(each.width for each in found) == WHOLE.width
    assert max(each.width for each in found) - min(each.width for each in found) <= 1


@given(first=st.tuples(hashes, hashes), second=st.tuples(hashes, hashes), key_hash=hashes)
def test_overlaps_and_covers_are_what_they_say(first, second, key_hash):
    one, other = KeyRange(*sorted(first)), KeyRange(*sorted(second))
    if one.contains(key_hash) and other.contains(key_hash):
        assert one.overlaps(other)
    if one.covers(other):
        assert one.overlaps(other)
        assert one.contains(other.begin)
        assert one.contains(other.end)
    assert one.overlaps(other) is other.overlaps(one)


@pytest.mark.parametrize(("begin", "end"), [(1, 0), (-1, 5), (0, 2**32)])
def test_what_is_no_range(begin, end):
    with pytest.raises(UsageError, match="no key range"):
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
def test_where_nobody_else_can_listen(address, private):
    assert is_private(address) is private
    if private:
        Security().check(address)
    else:
        with pytest.raises(UsageError, match="in plaintext"):
            Security(token="secret").check(address)
        Security(plaintext=True).check(address)
    assert "secret" not in repr(Security(token="secret"))
