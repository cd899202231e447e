"""The cases of tests/vectors/materialize.json about reclocking.

`STATUS` says for each case whether it holds unchanged, holds in another form by decision, or does
not apply. A remap frontier in a case is an antichain with intervals for unseen partitions. Here
it is increments, and a partition at 0 has no row.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from penstock.data.remap_form import KAFKA, KINESIS, S3
from penstock.progress import Frontier
from penstock.reclock import (
    ClockReading,
    Minted,
    Regressed,
    Tick,
    Unmoved,
    accumulate,
    mint,
    next_time,
    progress_as_of,
)
from tests.reclock.histories import History, make_history

STATUS = {
    "R05": "unchanged",
    "R06": "unchanged",
    "R07": "decided: increments, so only the partition that advanced has a row",
    "R09": "unchanged in our form: the loser reads the winning binding and mints the remainder",
    "R10c": "unchanged",
    "R10d": "unchanged",
    "R10e": "unchanged",
    "R10f": "unchanged",
    "R11b": "decided: offsets are exclusive uppers, so +42 covers 0 to 41",
    "R17": "unchanged",
    "R20": "decided: the first binding is at its own time, and since begins there",
    "R22": "unchanged",
    "R25": "decided: reported, without an error, and nothing is minted",
    "R27": "decided in part: a missing topic has moved backwards and is reported; its source "
    "stops with a definite error, and the bindings stay (tests/sources/kafka)",
    "R28": "unchanged: offsets do not show a recreated topic; its id does",
    "R30": "unchanged, tested with a real topic (tests/sources/kafka/test_topics.py)",
    "R40": "unchanged: stored as text, compared as a number",
    "R41": "in part: times keep the order of the source frontiers",
    "R42": "in part, as R41",
    "R45": "unchanged",
}

NOT_APPLICABLE = {
    **dict.fromkeys(
        ["R03b", "R03c", "R03d", "R03e"],
        "one entry commits data, remap and uppers, so data and remap have the same upper",
    ),
    "R01": "no source closes, so remap has no last binding",
    "R21": "as R01",
    "R41": "a child shard is read after its parent by the Kinesis client, which knows parents",
    "R42": "as R41, for a merged shard with two parents",
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


def test_vectors_all_have_a_status():
    assert STATUS.keys() | NOT_APPLICABLE.keys() == CASES.keys()


# Conversion from the form of the cases.


def offsets(elements: list[list[Any]]) -> dict[int, int]:
    """Return the offsets of single partitions: `[1,1]` is partition 1, `(1,)` all after it."""
    matches = ((re.fullmatch(r"\[(\d+),\1\]", text), offset) for text, offset in elements)
    return {int(match[1]): offset for match, offset in matches if match}


def history(state: Any) -> History:
    bound = {int(time): offsets(frontier) for time, frontier in state["bindings"].items()}
    return make_history(KAFKA, bound).compact(since=state.get("since", 0))


def current_frontier(state: Any) -> Frontier[int]:
    return accumulate(KAFKA, history(state).updates)


def rows_of(outcome: Any) -> list[tuple[Any, ...]]:
    columns = [column.to_pylist() for column in outcome.updates.columns]
    return list(zip(*columns, strict=True))


def accumulate_increments(increments: list[list[Any]]) -> dict[int, dict[Any, int]]:
    current: dict[Any, int] = {}
    frontiers: dict[int, dict[Any, int]] = {}
    for partition, time, increment in increments:
        current[partition] = current.get(partition, 0) + increment
        frontiers[time] = dict(current)
    return frontiers


# Times of events.


@pytest.mark.parametrize("id", ["R05", "R06"])
def test_event_has_first_time_that_covers_it(id: str):
    bound = history(given(id))
    times = [[event["d"], bound.time_of(event["p"], event["o"])] for event in given(id)["events"]]
    assert times == expected(id)["reclocked"]


@pytest.mark.parametrize("id", ["R10c", "R10d", "R10e", "R10f"])
def test_source_resumes_at_binding_below_upper(id: str):
    resume_frontier = history(given(id)).frontier_as_of(given(id)["into_frontier"] - 1)
    assert resume_frontier == Frontier(offsets(expected(id)["source_upper"]))


def test_r11b_offsets_are_exclusive():
    increments = given("R11b")["increments"]
    bound = make_history(KAFKA, accumulate_increments(increments))
    assert sorted(rows_of(bound)) == sorted(map(tuple, increments))
    for partition, first, last, time in expected("R11b")["literal_ranges"]:
        # Inclusive ranges: the first has one offset too many, and the next begins one too late.
        assert bound.time_of(partition, max(first - 1, 0)) == time
        assert bound.time_of(partition, last - 1) == time
        assert bound.time_of(partition, last) != time
    progress = progress_as_of(KAFKA, bound.updates, bound.upper - 1)
    assert progress.column("offset").to_pylist() == [45, 44]


def test_r45_appended_bytes_of_an_object_have_a_later_time():
    bound = make_history(S3, accumulate_increments(given("R45")["remap"]))
    # A record is covered when its last byte is.
    times = [bound.time_of("k", end - 1) for end in given("R45")["record_end_offsets"]]
    assert times == expected("R45")["record_times"]


# Minting.


def mint_operation(operation: Any, current: Frontier[int]) -> Minted | Unmoved | Regressed:
    frontier = offsets(operation["source_frontier"])
    return mint(KAFKA, current, Frontier(frontier), time=operation["binding_ts"])


def test_r07_binding_is_increment_of_advanced_partition():
    operation, state = given("R07")["op"]["mint"], given("R07")["state"]
    outcome = mint_operation(operation, current_frontier(state))
    assert isinstance(outcome, Minted)
    assert rows_of(outcome) == [(0, 1000, 4)]
    probed = offsets(operation["source_frontier"])
    assert outcome.frontier == Frontier(probed)


def test_r09_loser_reads_winning_binding_and_mints_remainder():
    first, second = (operation["mint"] for operation in given("R09")["ops"])
    current = current_frontier(given("R09")["state"])
    winner = mint_operation(first, current)
    assert isinstance(winner, Minted)
    remainder = mint_operation(second, accumulate(KAFKA, winner.updates, before=current))
    assert isinstance(remainder, Minted)
    assert rows_of(winner) + rows_of(remainder) == [(0, 1000, 3), (0, 11000, 2)]


def test_r17_mint_without_advance_has_no_rows():
    operation, state = given("R17")["op"]["mint"], given("R17")["state"]
    assert mint_operation(operation, current_frontier(state)) == Unmoved()
    assert expected("R17")["updates"] == []


def test_r20_first_binding_is_at_its_own_time():
    operation = given("R20")["op"]["mint"]
    outcome = mint_operation(operation, current_frontier(given("R20")["state"]))
    assert isinstance(outcome, Minted)
    assert rows_of(outcome) == [(0, operation["binding_ts"], 10000)]


def test_r22_tick_is_clock_rounded_down():
    case = given("R22")
    decision = next_time(
        ClockReading(case["now_ms"], boot_ms=0),
        interval_ms=case["interval_ms"],
        upper=0,
        reference=None,
        upstream_ms=case["now_ms"],
    )
    assert isinstance(decision, Tick)
    assert decision.time == expected("R22")["binding_ts"]


# Topics.


def watermarks(topic: Any) -> Frontier[int]:
    return Frontier({int(partition): offset for partition, offset in (topic or {}).items()})


def test_r25_watermark_moved_backwards_is_regressed():
    before, now = watermarks(given("R25")["prev"]), watermarks(given("R25")["now"])
    assert mint(KAFKA, before, now, time=1000) == Regressed(0, was=1, now=0)


def test_r27_missing_topic_with_records_is_regressed():
    before, now = watermarks(given("R27")["prev"]), watermarks(given("R27")["now"])
    assert mint(KAFKA, before, now, time=1000) == Unmoved()
    assert mint(KAFKA, Frontier({0: 1}), now, time=1000) == Regressed(0, was=1, now=None)


def test_r28_recreated_topic_with_more_records_is_not_detected_by_offsets():
    before, now = watermarks(given("R28")["prev"]), watermarks(given("R28")["now"])
    outcome = mint(KAFKA, before, now, time=1000)
    assert isinstance(outcome, Minted) is not expected("R28")["detected"]


# Streams.


def test_r40_sequence_number_is_stored_exactly():
    text = given("R40")["sequence_number"]
    assert len(text) == expected("R40")["decimal_digits"]
    # Offsets are exclusive: one past the last sequence number.
    bound = make_history(KINESIS, {10: {"s": int(text)}, 20: {"s": int(text) + 1}})
    assert bound.time_of("s", int(text)) == 20
    assert bound.time_of("s", int(text) - 1) == 10
    assert bound.frontier_as_of(20) == Frontier({"s": int(text) + 1})
    shorter = make_history(KINESIS, {10: {"s": 9}, 20: {"s": 10}})
    assert shorter.frontier_as_of(20) == Frontier({"s": 10}), "compared as a number"


def test_r41_r42_times_keep_order_of_source_frontiers():
    parent, child, other = "0", "1", "2"
    ends = {parent: 20 + 1}
    probes = {10: {parent: 11}, 20: ends, 30: {**ends, child: 31}, 40: {child: 31, other: 32}}
    bound = make_history(KINESIS, probes)
    for earlier, later in expected("R41")["order_constraints"]:
        (shard, number), (next_shard, first) = earlier.split(":"), later.split(":")
        earlier_time = bound.time_of(shard, int(number))
        later_time = bound.time_of(next_shard, int(first))
        assert earlier_time is not None
        assert later_time is not None
        assert earlier_time <= later_time
    # The parent is missing from the last probe, and its row stays.
    assert bound.frontier_as_of(40) == Frontier({parent: 21, child: 31, other: 32})
    merged = make_history(KINESIS, {10: {"1": 5, "2": 6}, 20: {"1": 5, "2": 6, "3": 9}})
    child_start = merged.time_of("3", 0)
    assert child_start is not None
    for parent in expected("R42")["child_starts_after"]:
        parent_end = merged.time_of(parent, 4)
        assert parent_end is not None
        assert parent_end <= child_start
