"""Each event comes in once, at a time that neither compaction nor a restart changes."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from penstock.errors import UsageError
from penstock.progress import Antichain, PartitionedFrontier, PartitionedTime
from penstock.reclock import (
    KAFKA,
    KINESIS,
    POSTGRES,
    SHAPES,
    WHOLE,
    Bindings,
    compaction_bound,
)
from tests.reclock.sources import (
    FIRST_SEQUENCE_NUMBER,
    PARTITIONS,
    History,
    closed,
    histories,
    written,
)

planted = settings(
    max_examples=1_000, derandomize=True, database=None, phases=[Phase.generate], deadline=None
)


def events_of(history: History) -> list[tuple[Any, int]]:
    """Offsets around every edge there is."""
    base = FIRST_SEQUENCE_NUMBER if history.shape == KINESIS else 0
    return [
        (partition, offset)
        for partition in PARTITIONS[history.shape.name]
        for offset in (0, *range(base, base + 18))
    ]


def check_following(
    time_of: Callable[[History, Bindings, Any, int], int | None], trial: settings
) -> None:
    @trial
    @given(history=histories())
    def law(history: History) -> None:
        bindings = history.bindings()
        frontiers = [
            PartitionedFrontier.of(bindings.frontier_as_of(time) or {}).antichain()
            for time in range(history.upper)
        ]
        for partition, offset in events_of(history):
            # By the definition: the first time whose frontier is not open at the event.
            event = PartitionedTime.exactly(partition, offset=offset)
            lands = [time for time, each in enumerate(frontiers) if not each.open_at(event)]
            assert time_of(history, bindings, partition, offset) == (lands[0] if lands else None)

    law()


def test_an_event_lands_at_the_first_time_whose_binding_covers_it():
    check_following(
        lambda _, bindings, partition, offset: bindings.time_of(partition, offset), settings()
    )


def inclusive(_: History, bindings: Bindings, partition: Any, offset: int) -> int | None:
    return bindings.time_of(partition, offset - 1)


def at_the_next_binding(history: History, _: Bindings, partition: Any, offset: int) -> int | None:
    bound = [t for t, f in history.frontiers.items() if f.get(partition, 0) >= offset]
    return bound[0] if bound else None


@pytest.mark.parametrize("wrong", [inclusive, at_the_next_binding])
def test_a_wrong_time_is_caught(wrong: Any):
    with pytest.raises(AssertionError):
        check_following(wrong, planted)


@given(histories())
def test_following_is_monotonic(history: History):
    bindings = history.bindings()
    for partition in PARTITIONS[history.shape.name]:
        times = [
            bindings.time_of(partition, offset)
            for other, offset in events_of(history)
            if other == partition
        ]
        bound = [time for time in times if time is not None]
        assert bound == sorted(bound)
        assert times == bound + [None] * (len(times) - len(bound)), "what is unbound comes last"


@given(histories(), st.integers(0, 25))
def test_following_commutes_with_compaction(history: History, since: int):
    since = min(since, history.upper - 1)
    bindings, compacted = history.bindings(), history.bindings(since)
    for partition, offset in events_of(history):
        time = bindings.time_of(partition, offset)
        assert compacted.time_of(partition, offset) == (None if time is None else max(time, since))
    for time in range(since, history.upper):
        assert compacted.frontier_as_of(time) == bindings.frontier_as_of(time)
        assert compacted.resume_from(time + 1) == bindings.resume_from(time + 1)


@given(histories(), st.integers(1, 5), st.integers(0, 30))
def test_following_a_closed_source_commutes_with_compaction(
    history: History, later: int, since: int
):
    ended = closed(history, history.upper + later)
    bindings, compacted = ended.bindings(), ended.bindings(since)
    for partition, offset in events_of(history):
        time = bindings.time_of(partition, offset)
        assert time is not None, "everything has landed"
        assert compacted.time_of(partition, offset) == max(time, since)
    everything: Antichain[PartitionedTime[Any]] = Antichain.empty()
    assert compacted.upper_at(everything) == ended.upper


@given(histories(), st.data())
def test_a_restart_neither_skips_nor_repeats(history: History, data: st.DataObject):
    upper = data.draw(st.integers(0, history.upper))
    since = data.draw(st.integers(0, compaction_bound([upper])))
    bindings = history.bindings(since)
    resumed = bindings.resume_from(upper)
    assert resumed is not None
    for partition, offset in events_of(history):
        time = bindings.time_of(partition, offset)
        stored = time is not None and time < upper
        read_again = offset >= resumed.get(partition, 0)
        assert stored != read_again


@given(histories(), st.data())
def test_the_collection_is_complete_below_the_times_still_to_come(
    history: History, data: st.DataObject
):
    bindings = history.bindings()
    base = FIRST_SEQUENCE_NUMBER if history.shape == KINESIS else 0
    offsets = st.one_of(st.just(0), st.integers(base, base + 18))
    read = data.draw(
        st.dictionaries(st.sampled_from(PARTITIONS[history.shape.name]), offsets), label="read"
    )
    still_to_come = [
        time
        for partition, offset in events_of(history)
        if offset >= read.get(partition, 0)
        and (time := bindings.time_of(partition, offset)) is not None
    ]
    assert bindings.upper_at(read) == min([*still_to_come, history.upper])
    assert bindings.upper_at(PartitionedFrontier.of(read).antichain()) == bindings.upper_at(read)


@given(histories(), st.data())
def test_what_is_read_up_to_a_binding_is_complete_up_to_the_next(
    history: History, data: st.DataObject
):
    upper = data.draw(st.integers(1, history.upper))
    bindings = history.bindings()
    read = bindings.resume_from(upper)
    assert read is not None
    assert bindings.upper_at(read) >= upper


@given(
    st.lists(st.integers(1, 40), unique=True).map(sorted),
    st.lists(st.integers(1, 60), min_size=1, max_size=6).map(sorted),
)
def test_a_transaction_lands_at_one_time_and_in_the_order_of_commits(
    commits: list[int], probes: list[int]
):
    # All changes of a transaction have the position of its commit.
    bound = {time: {WHOLE: probe} for time, probe in enumerate(probes, start=1)}
    history = written(POSTGRES, bound, upper=len(probes) + 1)
    bindings = history.bindings()
    times = [bindings.time_of(WHOLE, commit) for commit in commits]
    landed = [time for time in times if time is not None]
    assert landed == sorted(landed)
    assert len(landed) == sum(commit < probes[-1] for commit in commits)


def test_remap_may_be_compacted_to_what_the_least_collection_resumes_from():
    assert compaction_bound([1001, 501]) == 500
    assert compaction_bound([1001, 0]) == 0
    assert compaction_bound([]) == 0


def test_resuming_past_what_remap_knows_is_refused_with_what_to_do():
    history = written(KAFKA, {10: {0: 3}, 20: {0: 5}}, upper=21)
    bindings = history.bindings(since=15)
    assert bindings.resume_from(16) == {0: 3}
    with pytest.raises(UsageError, match='source "s" cannot resume at 15') as refused:
        bindings.resume_from(15)
    assert "compacted to 15" in refused.value.detail
    with pytest.raises(UsageError, match="cannot be read as of 21"):
        bindings.resume_from(22)


def test_a_closed_source_has_nothing_to_resume():
    history = closed(written(KAFKA, {10: {0: 3}}, upper=11), at=20)
    assert history.bindings().resume_from(20) == {0: 3}
    assert history.bindings().resume_from(21) is None


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_before_the_first_binding_nothing_has_landed(shape: Any):
    bindings = written(shape, {}, upper=5).bindings()
    assert bindings.time_of(PARTITIONS[shape.name][0], 0) is None
    assert bindings.upper_at({}) == 5
    assert bindings.resume_from(5) == {}
