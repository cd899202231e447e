"""Transitions of the recovery log, and its stored form."""

from dataclasses import replace
from typing import Any

import pytest

from penstock.errors import InternalError, UsageError
from penstock.materialize.checkpoint import Checkpoint, ResourceProgress, encode
from penstock.materialize.recovery_log import HASH, RecoveryLog, ShardLog, from_entries, to_entries
from penstock.protocol.key_range import WHOLE, KeyRange

LOWER, UPPER = WHOLE.split()


def checkpoint(**frontiers: int) -> Checkpoint:
    return Checkpoint(
        "own",
        {path: ResourceProgress("lake/1", 0, frontier) for path, frontier in frontiers.items()},
    )


OLD, NEW = checkpoint(a=10, b=10), checkpoint(a=20, b=20)


def two_shards(**changes: Any) -> RecoveryLog:
    shards = (
        ShardLog(LOWER, OLD, '{"x": 1}', "first", OLD),
        ShardLog(UPPER, OLD, '{"y": 2}', "second", OLD),
    )
    return replace(RecoveryLog("v1", shards), **changes)


def test_log_plan_records_upper_and_frozen_resources() -> None:
    log = two_shards().plan(20, ["a"])
    assert (log.planned, log.frozen) == (20, {"a"})
    assert log.plan(30).frozen == frozenset()
    assert log == replace(two_shards(), planned=20, frozen=frozenset({"a"}))


def test_log_bind_marks_resources_that_are_no_longer_bound_as_unbound() -> None:
    log = two_shards(unknown=frozenset({"old"})).bind("v2", ["a", "c"])
    assert log == two_shards(version="v2", unknown=frozenset({"old", "b"}))


def test_log_bind_before_first_commit_marks_nothing_as_unbound() -> None:
    log = RecoveryLog("v1", (ShardLog(LOWER), ShardLog(UPPER, OLD)))
    assert log.bind("v2", ["a", "b"]).unknown == frozenset()
    assert RecoveryLog("v1", (ShardLog(WHOLE),)).bind("v2", []).unknown == frozenset()


def test_log_doubt_adds_resources_to_unbound() -> None:
    log = two_shards(unknown=frozenset({"old"}), planned=20)
    assert log.mark_unknown(["a"]) == two_shards(unknown=frozenset({"old", "a"}), planned=20)


def test_log_commit_replaces_shards_and_keeps_acknowledged_checkpoints() -> None:
    log = two_shards(planned=20, frozen=frozenset({"b"}), unknown=frozenset({"a", "c"}))
    committed = log.commit(
        [ShardLog(LOWER, NEW, '{"x": 9}', "third"), ShardLog(UPPER, NEW, "{}", "fourth", NEW)],
        written=["a"],
    )
    assert committed == RecoveryLog(
        "v1",
        (
            ShardLog(LOWER, NEW, '{"x": 9}', "third", OLD),
            ShardLog(UPPER, NEW, "{}", "fourth", OLD),
        ),
        unknown=frozenset({"c"}),
    )
    assert not committed.is_acknowledged


def test_log_commit_records_plan_of_next_transaction() -> None:
    log = two_shards(planned=20)
    committed = log.commit(log.shards, planned=30, frozen=["a"])
    assert (committed.planned, committed.frozen) == (30, {"a"})


def test_log_adopt_checkpoint_changes_one_shard() -> None:
    log = two_shards().adopt_checkpoint(UPPER, NEW)
    assert [each.checkpoint for each in log.shards] == [OLD, NEW]
    assert [each.acknowledged for each in log.shards] == [OLD, OLD]
    assert not log.is_acknowledged


def test_log_acknowledge_covers_every_shard() -> None:
    log = two_shards().adopt_checkpoint(UPPER, NEW).acknowledge()
    assert [each.acknowledged for each in log.shards] == [OLD, NEW]
    assert [each.checkpoint for each in log.shards] == [OLD, NEW]
    assert log.is_acknowledged


def test_log_rebalance_gives_new_ranges_common_checkpoint_and_merged_state() -> None:
    log = two_shards(unknown=frozenset({"c"}), version="v3")
    quarters = [*LOWER.split(), *UPPER.split()]
    shared = log.rebalance([quarters[0], KeyRange(quarters[1].begin, UPPER.end)], ["a", "b"])
    assert [each.key_range for each in shared.shards] == [
        quarters[0],
        KeyRange(quarters[1].begin, UPPER.end),
    ]
    assert [each.state_json for each in shared.shards] == ['{"x":1}', '{"x":1,"y":2}']
    assert {(each.session, each.checkpoint == OLD) for each in shared.shards} == {("", True)}
    assert shared.is_acknowledged
    assert (shared.version, shared.unknown) == ("v3", {"c"})


def test_log_rebalance_ignores_resources_that_are_not_bound() -> None:
    apart = (ShardLog(LOWER, OLD), ShardLog(UPPER, checkpoint(a=10, b=15)))
    shared = two_shards(shards=apart).rebalance([WHOLE], ["a"])
    assert [each.checkpoint for each in shared.shards] == [OLD]


@pytest.mark.parametrize(
    "log",
    [
        two_shards(planned=20),
        two_shards().adopt_checkpoint(UPPER, NEW),
        two_shards(shards=(ShardLog(LOWER, OLD), ShardLog(UPPER))),
    ],
    ids=["planned", "two frontiers", "one shard without a commit"],
)
def test_log_rebalance_between_frontiers_raises_internal_error(log: RecoveryLog) -> None:
    with pytest.raises(InternalError, match="different frontiers"):
        log.rebalance([WHOLE], ["a", "b"])


def test_log_rebalance_before_first_commit_changes_only_ranges() -> None:
    shared = RecoveryLog("v1", (ShardLog(WHOLE),)).rebalance([LOWER, UPPER], ["a"])
    assert shared == RecoveryLog("v1", (ShardLog(LOWER), ShardLog(UPPER)))


def test_recovery_log_round_trips_through_stored_state() -> None:
    log = two_shards(planned=20, frozen=frozenset({"b"}), unknown=frozenset({"c", "a"}))
    log = log.adopt_checkpoint(UPPER, NEW)
    stored_state = to_entries(log)
    assert stored_state["materialization"] == {
        "version": "v1",
        "planned": 20,
        "frozen": ["b"],
        "hash": HASH,
        "unbound": ["a", "c"],
    }
    assert stored_state["shard 80000000-ffffffff"] == {
        "begin": UPPER.begin,
        "end": UPPER.end,
        "checkpoint": encode(NEW).decode(),
        "state": '{"y": 2}',
        "session": "second",
        "settled": encode(OLD).decode(),
    }
    assert from_entries(dict(reversed(stored_state.items()))) == log
    assert from_entries({**stored_state, "another note": {}}) == log


def test_recovery_log_without_commits_round_trips_through_stored_state() -> None:
    log = RecoveryLog("v1", (ShardLog(WHOLE),))
    assert to_entries(log)["shard 00000000-ffffffff"]["checkpoint"] is None
    assert from_entries(to_entries(log)) == log


def test_recovery_log_of_earlier_release_has_no_frozen_resources() -> None:
    stored_state = to_entries(two_shards(planned=20))
    del stored_state["materialization"]["frozen"]
    assert from_entries(stored_state) == two_shards(planned=20)


def test_recalled_without_stored_log_returns_none() -> None:
    assert from_entries({}) is None
    assert from_entries({"connector": {}}) is None


def test_recalled_with_another_hash_raises_usage_error() -> None:
    stored_state = to_entries(two_shards())
    stored_state["materialization"]["hash"] = "crc32"
    with pytest.raises(UsageError, match="have another hash") as raised:
        from_entries(stored_state)
    assert raised.value.detail == f"The recovery log has crc32; this release uses {HASH}."
