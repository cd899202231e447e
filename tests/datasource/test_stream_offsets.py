import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.datasource.stream_offsets import Offset, admit, first_batch_start
from penstock.errors import UsageError

times = st.dictionaries(st.integers(0, 50), st.integers(1, 9)).map(lambda d: sorted(d.items()))


def updates_below(counts: list[tuple[int, int]], upper: int) -> int:
    return sum(count for time, count in counts if time < upper)


@given(times, st.integers(1, 20))
def test_admit_returns_largest_upper_within_limit(counts, limit):
    upper = admit(counts, 60, limit)
    first = counts[0][0] if counts else 0
    assert updates_below(counts, upper) <= limit or [t for t, _ in counts if t < upper] == [first]
    if upper < 60:
        assert updates_below(counts, upper) > 0
        assert updates_below(counts, upper + 1) > limit


def test_offset_json_round_trip():
    first = Offset(collection="l1/7", upper=5, begins=5, snapshot=True)
    assert first.up_to(9).to_json() == {
        "collection": "l1/7",
        "upper": 9,
        "begins": 5,
        "snapshot": True,
    }
    second = first.up_to(9).up_to(12)
    assert second.to_json() == {"collection": "l1/7", "upper": 12}
    for offset in (first, second):
        assert Offset.from_json(offset.to_json()) == offset


def test_end_of_first_batch_contains_its_start():
    logged = Offset(collection="l1/7", upper=9, begins=5, snapshot=True)
    now = Offset(collection="l1/7", upper=20, begins=20, snapshot=False)
    assert first_batch_start(now, logged) == Offset(
        collection="l1/7", upper=5, begins=5, snapshot=True
    )
    assert first_batch_start(now, now.up_to(30)) == now
    assert first_batch_start(now, Offset(collection="l1/7", upper=30)) == now


def test_offset_needs_snapshot_time_or_previous_time():
    assert Offset(collection="c", upper=5, begins=5, snapshot=True).needs == 5
    assert Offset(collection="c", upper=5, begins=5).needs == 4
    assert Offset(collection="c", upper=0, begins=0).needs == 0


def test_offset_from_foreign_json_raises_usage_error():
    with pytest.raises(UsageError, match="checkpoint was not written by a stream"):
        Offset.from_json({"partition-1": 3})
