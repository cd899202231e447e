"""Bounds of the spine: few batches, and few rewrites of each row, for all arrivals."""

import math

from hypothesis import given
from hypothesis import strategies as st

from penstock.persist.merge.spine import level, next_merge


def run(arrivals: list[int], fan_in: int) -> tuple[list[int], int, int]:
    """Return the final batches, the maximum number of batches, and the rewritten rows."""
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
def test_spine_batch_count_and_rewrites_stay_logarithmic(arrivals, fan_in):
    batches, most, rewritten = run(arrivals, fan_in)
    total = sum(arrivals)
    assert sum(batches) == total
    height = level(max(total, 1), fan_in) + 1
    assert most <= (fan_in + 1) * height + 2
    assert rewritten <= total * 2 * (height + 1)


def test_spine_of_single_row_batches_stays_within_expected_cost():
    batches, most, rewritten = run([1] * 4096, 8)
    assert len(batches) <= 8 * math.log(4096, 8) + 2
    assert most <= 40
    assert rewritten <= 4096 * (math.log(4096, 8) + 1)
