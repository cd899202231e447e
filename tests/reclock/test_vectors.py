"""The cases of tests/vectors/materialize.json that are about reclocking.

`ABOUT` says of each whether it holds here as it is, holds in another form that we
decided on, or does not apply yet. A remap frontier there is an antichain, with
intervals for the partitions not seen; here it is increments, in which a partition
at 0 has no row. An upper of null there, after all times, is `MAX_TIME` here.
"""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock.progress import (
    MAX_TIME,
    Antichain,
    Between,
    Exactly,
    PartitionedFrontier,
    PartitionedTime,
    Partitions,
)
from penstock.reclock import (
    KAFKA,
    KINESIS,
    S3,
    Bindings,
    Minted,
    Reading,
    Regressed,
    Tick,
    Unmoved,
    accumulated,
    close,
    mint,
    next_time,
    progress_as_of,
)
from tests.reclock.sources import History, written

ABOUT = {
    "R01": "as is",
    "R03b": "as is",
    "R03c": "as is",
    "R03d": "as is",
    "R03e": "as is",
    "R05": "as is",
    "R06": "as is",
    "R07": "decided: increments, so only the partition that moved has a row",
    "R09": "as is, in our form: whoever lost reads what won and mints the rest",
    "R10c": "as is",
    "R10d": "as is",
    "R10e": "as is",
    "R10f": "as is",
    "R11b": "decided: offsets are exclusive uppers, so +42 covers 0 to 41",
    "R17": "as is",
    "R20": "decided: the first binding is at its own time, and since begins there",
    "R21": "as is, in our form: what is bound is taken back, and the upper is the last one",
    "R22": "as is",
    "R25": "decided: reported, with no error and nothing minted",
    "R27": "decided in part: a topic that is gone has gone back, and is reported; its source "
    "stops with a definite error, and what was bound stays (tests/sources/kafka/test_lives.py)",
    "R28": "as is: nothing in the offsets tells; the topic's id does",
    "R30": "as is, of a real topic (tests/sources/kafka/test_topics.py)",
    "R40": "as is: kept as text, compared as a number",
    "R41": "in part: the order that a source's frontiers keep is kept by its times",
    "R42": "in part, likewise",
    "R45": "as is",
}

NOT_APPLICABLE_YET = {
    "R41": "that children are read only when their parent is drained is for the Kinesis client, "
    "which knows parents",
    "R42": "that a merged shard waits for both parents, likewise",
}

CASES = {
    case["id"]: case
    for case in json.loads(
        (Path(__file__).parents[1] / "vectors" / "materialize.json").read_text()
    )["cases"]
    if case["id"].startswith("R")
}


def given(id: str) -> Any:
    return CASES[id]["given"]


def expected(id: str) -> Any:
    return CASES[id]["expect"]


def test_every_case_is_spoken_for():
    assert ABOUT.keys() | NOT_APPLICABLE_YET.keys() == CASES.keys()


# From their form to ours.


def partitions(text: str) -> Partitions[int]:
    """`[1,1]` is one partition, `(1,)` all after it."""
    exactly = re.fullmatch(r"\[(\d+),\1\]", text)
    if exactly:
        return Exactly(int(exactly[1]))
    above, below = text[1:-1].split(",")
    return Between(int(above) if above else None, int(below) if below else None)


def antichain(elements: list[list[Any]]) -> Antichain[PartitionedTime[int]]:
    return Antichain.of(*(PartitionedTime(partitions(text), offset) for text, offset in elements))


def offsets(elements: list[list[Any]]) -> dict[int, int]:
    return {
        each.partition: offset
        for text, offset in elements
        if isinstance(each := partitions(text), Exactly)
    }


def history(state: Any) -> History:
    bound = {int(time): offsets(frontier) for time, frontier in state["bindings"].items()}
    return written(KAFKA, bound, upper=state.get("remap_upper", state.get("upper")))


def bindings(state: Any) -> Bindings:
    return history(state).bindings(since=state.get("since", 0))


def rows_of(outcome: Any) -> list[tuple[Any, ...]]:
    columns = [column.to_pylist() for column in outcome.updates.columns]
    return list(zip(*columns, strict=True))


# Following.


@pytest.mark.parametrize("id", ["R01", "R05", "R06"])
def test_events_land_at_their_times(id: str):
    case = given(id)
    followed = bindings(case)
    landed = [[event["d"], followed.time_of(event["p"], event["o"])] for event in case["events"]]
    assert landed == expected(id)["reclocked"]
    everything_read = antichain(case["source_frontier"])
    after = expected(id).get("output_frontier_after_source_done", MAX_TIME)
    assert followed.upper_at(everything_read) == after


@pytest.mark.parametrize("id", ["R03b", "R03c", "R03d", "R03e"])
def test_the_collection_is_complete_as_far_as_the_source_was_read(id: str):
    case = given(id)
    followed = bindings(case)
    assert followed.upper_at(antichain(case["source_frontier"])) == expected(id)["output_frontier"]
    assert followed.upper_at(offsets(case["source_frontier"])) == expected(id)["output_frontier"]


@pytest.mark.parametrize("id", ["R10c", "R10d", "R10e", "R10f"])
def test_reading_resumes_at_the_binding_just_below(id: str):
    case = given(id)
    resumed = bindings(case).resume_from(case["into_frontier"])
    assert resumed is not None
    theirs = antichain(expected(id)["source_upper"])
    assert PartitionedFrontier[int].of(resumed).antichain() == theirs


def test_r11b_offsets_are_exclusive():
    seen: dict[int, int] = {}
    bound: dict[int, dict[int, int]] = {}
    for partition, time, increment in given("R11b")["increments"]:
        seen[partition] = seen.get(partition, 0) + increment
        bound[time] = dict(seen)
    made = written(KAFKA, bound, upper=max(bound) + 1)
    assert sorted(rows_of(made)) == sorted(map(tuple, given("R11b")["increments"]))
    followed = made.bindings()
    for partition, first, last, time in expected("R11b")["literal_ranges"]:
        # Read literally, the first range has one offset too many, and the next begins late.
        ours_first, ours_last = max(first - 1, 0), last - 1
        assert followed.time_of(partition, ours_first) == time
        assert followed.time_of(partition, ours_last) == time
        assert followed.time_of(partition, last) != time
    shown = progress_as_of(KAFKA, made.updates, max(bound))
    assert shown.column("offset").to_pylist() == [45, 44]


def test_r45_only_new_bytes_of_an_object_are_new():
    seen: dict[str, int] = {}
    bound: dict[int, dict[str, int]] = {}
    for key, time, increment in given("R45")["remap"]:
        seen[key] = seen.get(key, 0) + increment
        bound[time] = dict(seen)
    followed = written(S3, bound, upper=max(bound) + 1).bindings()
    # A record is in once its last byte is.
    times = [followed.time_of("k", end - 1) for end in given("R45")["record_end_offsets"]]
    assert times == expected("R45")["record_times"]


# Minting.


def minted(op: Any, current: Any) -> Any:
    return mint(KAFKA, current, offsets(op["source_frontier"]), at=op["binding_ts"])


def current_of(state: Any) -> Any:
    return accumulated(KAFKA, history(state).updates)


def test_r07_a_binding_is_the_increment_of_what_moved():
    op, state = given("R07")["op"]["mint"], given("R07")["state"]
    outcome = minted(op, current_of(state))
    assert isinstance(outcome, Minted)
    assert rows_of(outcome) == [(0, 1000, 4)]
    ours = PartitionedFrontier[int].of(outcome.frontier).antichain()
    assert ours == antichain(op["source_frontier"]), "which says what their four rows say"


def test_r09_whoever_lost_reads_what_won_and_mints_the_rest():
    first, second = (op["mint"] for op in given("R09")["ops"])
    current = current_of(given("R09")["state"])
    won = minted(first, current)
    assert isinstance(won, Minted)
    followed = accumulated(KAFKA, won.updates, before=current)
    rest = minted(second, followed)
    assert isinstance(rest, Minted)
    assert rows_of(won) + rows_of(rest) == [(0, 1000, 3), (0, 11000, 2)]


def test_r17_without_movement_there_are_no_rows():
    op, state = given("R17")["op"]["mint"], given("R17")["state"]
    assert minted(op, current_of(state)) == Unmoved()
    assert expected("R17")["updates"] == []


def test_r20_the_first_binding_is_at_its_own_time():
    op = given("R20")["op"]["mint"]
    outcome = minted(op, current_of(given("R20")["state"]))
    assert isinstance(outcome, Minted)
    assert rows_of(outcome) == [(0, op["binding_ts"], 10000)]


def test_r21_closing_takes_back_what_is_bound():
    state, op = given("R21")["state"], given("R21")["op"]["mint"]
    assert op["source_frontier"] == []
    before = history(state)
    closing = close(KAFKA, current_of(state), at=op["binding_ts"])
    assert rows_of(closing) == [(0, 2000, -4)]
    both = pa.concat_tables([before.updates, closing.updates])
    followed = Bindings.read(KAFKA, both, since=0, upper=MAX_TIME, source="s")
    assert followed.frontier_as_of(1999) == {0: 4}
    assert followed.frontier_as_of(2000) is None


def test_r22_a_tick_is_the_clock_rounded_down():
    case = given("R22")
    decision = next_time(
        Reading(case["now_ms"], boot_ms=0),
        interval_ms=case["interval_ms"],
        upper=0,
        pace=None,
        upstream_ms=case["now_ms"],
    )
    assert isinstance(decision, Tick)
    assert decision.time == expected("R22")["binding_ts"]


# Topics.


def watermarks(topic: Any) -> dict[int, int]:
    return {int(partition): offset for partition, offset in (topic or {}).items()}


def test_r25_a_watermark_that_went_back_mints_nothing_and_is_reported():
    before, now = watermarks(given("R25")["prev"]), watermarks(given("R25")["now"])
    assert mint(KAFKA, before, now, at=1000) == Regressed(0, was=1, now=0)


def test_r27_a_topic_that_is_gone_is_reported_if_it_ever_held_anything():
    before, now = watermarks(given("R27")["prev"]), watermarks(given("R27")["now"])
    assert mint(KAFKA, before, now, at=1000) == Unmoved()
    assert mint(KAFKA, {0: 1}, now, at=1000) == Regressed(0, was=1, now=None)


def test_r28_a_topic_made_again_and_filled_further_cannot_be_told_by_offsets():
    before, now = watermarks(given("R28")["prev"]), watermarks(given("R28")["now"])
    outcome = mint(KAFKA, before, now, at=1000)
    assert isinstance(outcome, Minted) is not expected("R28")["detected"]


# Streams.


def test_r40_a_sequence_number_is_kept_whole():
    text = given("R40")["sequence_number"]
    assert len(text) == expected("R40")["decimal_digits"]
    # The exclusive upper, one past the last number seen.
    made = written(KINESIS, {10: {"s": int(text)}, 20: {"s": int(text) + 1}}, upper=21)
    followed = made.bindings()
    assert followed.time_of("s", int(text)) == 20
    assert followed.time_of("s", int(text) - 1) == 10
    assert followed.resume_from(21) == {"s": int(text) + 1}
    shorter = written(KINESIS, {10: {"s": 9}, 20: {"s": 10}}, upper=21)
    assert shorter.bindings().resume_from(21) == {"s": 10}, "compared as a number"


def test_r41_r42_the_order_of_a_sources_frontiers_is_the_order_of_its_times():
    parent, child, other = "0", "1", "2"
    ends = {parent: 20 + 1}
    probes = {10: {parent: 11}, 20: ends, 30: {**ends, child: 31}, 40: {child: 31, other: 32}}
    made = written(KINESIS, probes, upper=41)
    followed = made.bindings()
    for earlier, later in expected("R41")["order_constraints"]:
        (shard, number), (after, first) = earlier.split(":"), later.split(":")
        before, then = followed.time_of(shard, int(number)), followed.time_of(after, int(first))
        assert before is not None
        assert then is not None
        assert before <= then
    # The parent is gone from the last probe, and its row stays.
    assert followed.frontier_as_of(40) == {parent: 21, child: 31, other: 32}
    merged = {10: {"1": 5, "2": 6}, 20: {"1": 5, "2": 6, "3": 9}}
    joined = written(KINESIS, merged, upper=21).bindings()
    starts = joined.time_of("3", 0)
    assert starts is not None
    for waited_for in expected("R42")["child_starts_after"]:
        ended = joined.time_of(waited_for, 4)
        assert ended is not None
        assert ended <= starts
