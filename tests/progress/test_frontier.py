import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.progress import SINGLE_PARTITION, Frontier

PARTITIONS = ["a", "b", "c"]

positions = st.dictionaries(st.sampled_from(PARTITIONS), st.integers(0, 3))
frontiers = positions.map(Frontier)


@given(positions)
def test_position_of_partition_that_is_not_listed_is_zero(listed: dict[str, int]):
    frontier = Frontier(listed)
    assert {partition: frontier[partition] for partition in PARTITIONS} == dict.fromkeys(
        PARTITIONS, 0
    ) | listed
    assert [frontier.get(partition) for partition in PARTITIONS] == [
        listed.get(partition) for partition in PARTITIONS
    ]
    assert dict(frontier.items()) == listed
    assert list(frontier) == list(listed)


@given(frontiers, frontiers)
def test_order_is_the_order_in_each_partition(a: Frontier[str], b: Frontier[str]):
    assert (a <= b) == all(a[partition] <= b[partition] for partition in PARTITIONS)


@given(frontiers, frontiers, frontiers)
def test_order_is_reflexive_transitive_antisymmetric(
    a: Frontier[str], b: Frontier[str], c: Frontier[str]
):
    assert a <= a
    assert a <= c or not (a <= b and b <= c)
    assert (a == b) == (a <= b and b <= a)
    assert Frontier() <= a


@given(frontiers, frontiers)
def test_equal_frontiers_have_equal_hashes(a: Frontier[str], b: Frontier[str]):
    assert (a == b) == all(a[partition] == b[partition] for partition in PARTITIONS)
    assert a != b or hash(a) == hash(b)


@given(frontiers, frontiers, frontiers)
def test_join_is_least_upper_bound(a: Frontier[str], b: Frontier[str], c: Frontier[str]):
    assert (a | b <= c) == (a <= c and b <= c)
    assert (a <= b) == (a | b == b)
    assert {*(a | b)} == {*a, *b}


@given(frontiers, frontiers, frontiers)
def test_join_is_idempotent_commutative_associative(
    a: Frontier[str], b: Frontier[str], c: Frontier[str]
):
    assert a | a == a
    assert a | b == b | a
    assert (a | b) | c == a | (b | c)
    assert a | Frontier() == a


@given(frontiers)
def test_pickled_frontier_is_equal(frontier: Frontier[str]):
    copy = pickle.loads(pickle.dumps(frontier))
    assert copy == frontier
    assert list(copy) == list(frontier)


def test_frontier_does_not_change_with_its_argument():
    listed = {SINGLE_PARTITION: 1}
    frontier = Frontier(listed)
    listed[SINGLE_PARTITION] = 2
    assert frontier[SINGLE_PARTITION] == 1
    assert frontier != {SINGLE_PARTITION: 1}
    with pytest.raises(AttributeError):
        frontier._positions = {}  # type: ignore[misc]
