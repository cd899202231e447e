import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.datasource.stream_offsets import Offset, admitted, begun_at
from penstock.errors import UsageError

times = st.dictionaries(st.integers(0, 50), st.integers(1, 9)).map(lambda d: sorted(d.items()))


def below(counts: list[tuple[int, int]], upper: int) -> int:
    return sum(count for time, count in counts if time < upper)


@given(times, st.integers(1, 20))
def test_as_much_is_admitted_as_fits_and_at_least_one_time(counts, limit):
    upper = admitted(counts, 60, limit)
    first = counts[0][0] if counts else 0
    assert below(counts, upper) <= limit or [t for t, _ in counts if t < upper] == [first]
    if upper < 60:
        assert below(counts, upper) > 0
        assert below(counts, upper + 1) > limit


def test_an_offset_is_small_and_comes_back_as_it_was():
    first = Offset(collection="l1/7", upper=5, begins=5, snapshot=True)
    assert first.up_to(9).to_json() == {
        "collection": "l1/7",
        "upper": 9,
        "begins": 5,
        "snapshot": True,
    }
    second = first.up_to(9).up_to(12)
    assert second.to_json() == {"collection": "l1/7", "upper": 12}
    for each in (first, second):
        assert Offset.from_json(each.to_json()) == each


def test_the_end_of_the_first_batch_says_where_it_began():
    logged = Offset(collection="l1/7", upper=9, begins=5, snapshot=True)
    now = Offset(collection="l1/7", upper=20, begins=20, snapshot=False)
    assert begun_at(now, logged) == Offset(collection="l1/7", upper=5, begins=5, snapshot=True)
    assert begun_at(now, now.up_to(30)) == now
    assert begun_at(now, Offset(collection="l1/7", upper=30)) == now


def test_a_snapshot_needs_its_own_time_and_changes_the_one_before():
    assert Offset(collection="c", upper=5, begins=5, snapshot=True).needs == 5
    assert Offset(collection="c", upper=5, begins=5).needs == 4
    assert Offset(collection="c", upper=0, begins=0).needs == 0


def test_a_strange_offset_is_refused():
    with pytest.raises(UsageError, match="checkpoint was not made by a stream of this format"):
        Offset.from_json({"partition-1": 3})
