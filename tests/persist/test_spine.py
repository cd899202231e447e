"""However batches come, there are few of them and each row is rewritten seldom."""

import math

from hypothesis import given
from hypothesis import strategies as st

from penstock.persist.merge.spine import level, next_merge


def run(arrivals: list[int], fan_in: int) -> tuple[list[int], int, int]:
    """The batches in the end, the most there ever were, and the rows that were rewritten."""
    batches: list[int] = []
    most = rewritten = 0
    for size in arrivals:
        batches.append(size)
        merges = 0
        while (chosen := next_merge(batches, fan_in=fan_in)) is not None:
            merged = sum(batches[chosen.start : chosen.stop])
            assert len(chosen) >= 2, "a merge of one changes nothing"
            batches[chosen.start : chosen.stop] = [merged]
            rewritten += merged
            merges += 1
            assert merges <= 2 * len(arrivals), "merging does not end"
        most = max(most, len(batches))
    return batches, most, rewritten


arrivals = st.one_of(
    st.lists(st.integers(1, 3), max_size=300),
    st.lists(st.integers(1, 10_000), max_size=100),
    st.lists(st.sampled_from([1, 1, 1, 5_000]), max_size=200),
)


@given(arrivals, st.sampled_from([2, 4, 8]))
def test_batches_and_rewriting_stay_logarithmic(arrivals, fan_in):
    batches, most, rewritten = run(arrivals, fan_in)
    total = sum(arrivals)
    assert sum(batches) == total
    height = level(max(total, 1), fan_in) + 1
    assert most <= (fan_in + 1) * height + 2
    assert rewritten <= total * 2 * (height + 1)


def test_many_batches_of_one_row_cost_what_they_should():
    batches, most, rewritten = run([1] * 4096, 8)
    assert len(batches) <= 8 * math.log(4096, 8) + 2
    assert most <= 40
    assert rewritten <= 4096 * (math.log(4096, 8) + 1)
