"""A scan plan returns the rows of a plain read after merges, discards and errors.

A real client and the model execute random histories. The test then evaluates
each scan plan by the equation in `scan.py`, in Python.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from msgspec import structs
from tests.persist.model import ModelCollection, Version
from tests.persist.shop import SCHEMA, opened, rows
from tests.persist.test_merger import Job

from penstock.data import DIFF, TIME
from penstock.durable.memory import Shelf
from penstock.errors import UsageError
from penstock.persist import (
    Changes,
    Client,
    Collection,
    NotYetComplete,
    SinceError,
    runtime,
)
from penstock.persist.batch import PartScan, part_scans_of
from penstock.persist.merge import merger
from penstock.persist.scan import plan as scan_plan
from penstock.persist.state import END, Batch, CollectionState, columns_of

GROWN = SCHEMA.append(pa.field("note", pa.string()))

KEYS = ["a", "b", None]

Action = tuple[Any, ...]

changed = st.tuples(
    st.integers(0, 3),  # How far past upper.
    st.integers(0, 2),  # Delete an existing row, or insert a row.
    st.sampled_from(range(30)),  # What of it.
    st.sampled_from([1, 1, 1, 1, 1, 2]),  # How often, if it is brought.
)

several = st.lists(changed, min_size=1, max_size=4, unique_by=lambda each: each[2] % 6)
write = st.tuples(st.just("write"), several)
seal = st.tuples(st.just("seal"), st.integers(1, 4))
allow = st.tuples(st.just("allow"), st.integers(1, 4))
keep = st.sampled_from([("compact",), ("upkeep",)])
discard, alter = st.just(("discard",)), st.just(("alter",))

actions: st.SearchStrategy[tuple[Action, ...]] = st.one_of(
    st.tuples(write, seal),
    st.tuples(allow, keep),
    st.tuples(write, seal, discard),
    st.one_of(write, seal, allow, keep, discard, alter).map(lambda action: (action,)),
)


@st.composite
def histories(
    choose: st.DrawFn, keys: Sequence[tuple[str, ...]] = ((), ("k",), ("k", "n"))
) -> "History":
    """Draw the history of a collection and its storage settings."""
    # Half of the histories begin with a possible base.
    base = st.tuples(write, seal, allow, st.just(("compact",)))
    first = choose(st.one_of(base.map(lambda one: [one]), st.just([])))
    steps = [*first, *choose(st.lists(actions, min_size=5, max_size=12))]
    return History(
        actions=[action for step in steps for action in step],
        key=choose(st.sampled_from(keys)),
        settings={
            "inline_bytes": choose(st.sampled_from([0, 100, 10_000])),
            "part_bytes": choose(st.sampled_from([60, 10_000])),
            "merge_bytes": choose(st.sampled_from([150, 1 << 20])),
            "fan_in": 2,
        },
        fold_bytes=choose(st.sampled_from([1, 1 << 20])),
        job=choose(st.booleans()),
    )


class History:
    """Actions on one collection, done by a client and by the model."""

    def __init__(
        self,
        actions: list[Action],
        key: tuple[str, ...] = ("k",),
        settings: dict[str, Any] | None = None,
        fold_bytes: int = 1 << 20,
        job: bool = False,
    ) -> None:
        self.actions = actions
        self.key = key
        self.settings = settings or {}
        self.fold_bytes = fold_bytes
        self.job = job

    def __repr__(self) -> str:
        return (
            f"History({self.actions}, key={self.key}, settings={self.settings}, "
            f"fold_bytes={self.fold_bytes}, job={self.job})"
        )

    @contextmanager
    def lived(self) -> Iterator[tuple[Collection, ModelCollection]]:
        """The collection and the model after all of it."""
        model = ModelCollection([Version(0, tuple(SCHEMA.names))])
        with (
            mock.patch.object(merger, "FOLD_BYTES", self.fold_bytes),
            mock.patch.object(runtime, "probe_location"),  # Half the time of a history.
            opened(Shelf(), **self.settings) as client,
        ):
            if self.job:
                client.delegate_big_merges(Job(client))
            table = client.create_or_load("rows", schema=SCHEMA, key_columns=self.key)
            for action in self.actions:
                act(client, table, model, *action)
            yield table, model


def act(client: Client, table: Collection, model: ModelCollection, verb: str, *args: Any) -> None:
    match verb:
        case "write":
            updates = [u for each in args[0] if (u := make_update(model, *each)) is not None]
            if updates:
                table.write(updates).result()
        case "seal":
            model.upper += args[0]
            table.seal(model.upper).result()
        case "allow":
            model.since = min(model.since + args[0], model.upper)
            table.allow_compaction(model.since).result()
        case "discard":
            client.discard_unsealed()
            model.updates = [u for u in model.updates if u[1] < model.upper]
        case "alter":
            if len(model.versions) == 1:
                table.alter(GROWN, defaults={"note": "old"})
                model.versions.append(Version(model.upper, tuple(GROWN.names), {"note": "old"}))
        case "compact":
            client.compact()
        case "upkeep":
            client.run_maintenance()
        case _:
            raise AssertionError(verb)


def make_update(
    model: ModelCollection, ahead: int, bring: int, which: int, times: int
) -> tuple[dict[str, Any], int, int] | None:
    """Return one update, applied to the model; a delete removes an existing row."""
    columns = model.versions[-1].columns
    time = model.upper + ahead
    if bring:
        row: dict[str, Any] = {"k": KEYS[which % 3], "n": which % 2}
        row |= {"note": "new"} if "note" in columns and which % 5 == 0 else {}
        row = dict(zip(columns, model.filled(row, columns), strict=True))
    else:
        later = [model.contents(t) for t in range(time, model.upper + 5)]
        there = [row for row in later[0] if all(contents[row] > 0 for contents in later)]
        if not there:
            return None
        there.sort(key=str)
        row, times = dict(zip(columns, there[which % len(there)], strict=True)), -1
    update = (row, time, times)
    model.updates.append(update)
    return update


def evaluated(table: Collection, plan: scan_plan.SnapshotScan) -> "Counter[tuple[Any, ...]]":
    """base without the keys of rows that the rest takes away + rows that the rest brings"""
    at = [columns_of(plan.schema).names.index(name) for name in plan.key]
    rest: Counter[tuple[Any, ...]] = Counter()
    count = 0
    for row, _, diff in read(table, plan.collection, plan.deltas, plan.schema):
        rest[row] += diff
        count += 1
    assert count <= plan.delta_rows
    gone = {tuple(row[i] for i in at) for row, diff in rest.items() if diff < 0}
    found = Counter(
        row
        for row, _, _ in read(table, plan.collection, plan.base, plan.schema)
        if tuple(row[i] for i in at) not in gone
    )
    found.update({row: diff for row, diff in rest.items() if diff > 0})
    return found


def read(
    table: Collection, collection: CollectionState, part_scans: tuple[PartScan, ...], schema: Any
) -> Iterator[tuple[tuple[Any, ...], int, int]]:
    """The updates in `slices`."""
    batches = table.client.reader.batches
    for each in part_scans:
        found = batches.part_rows(collection, each, schema)
        times, diffs = found.column(TIME).to_pylist(), found.column(DIFF).to_pylist()
        columns = [column.to_pylist() for column in found.drop_columns([TIME, DIFF]).columns]
        yield from zip(zip(*columns, strict=True), times, diffs, strict=True)


def given_by(changes: Any) -> "Counter[Any]":
    found: Counter[Any] = Counter()
    for row, time, diff in changes:
        found[tuple(row.values()), time] += diff
    return found


def check_snapshots(history: History) -> None:
    with history.lived() as (table, model):
        state = table.state
        assert (state.since, state.upper) == (model.since, model.upper)
        for as_of in range(model.since, model.upper):
            plan = scan_plan.scan_snapshot(state, as_of)
            expected = model.contents(as_of)
            assert evaluated(table, plan) == expected, (as_of, plan)
            plainly = Counter({tuple(r.values()): n for r, _, n in table.snapshot(as_of)})
            assert plainly == expected, as_of


def check_changes(history: History) -> None:
    with history.lived() as (table, model):
        first = model.since + 1 if model.since else 0
        for lower in range(first, model.upper + 1):
            for upper in range(lower, model.upper + 1):
                plan = scan_plan.scan_changes(table.state, lower, upper)
                found: Counter[Any] = Counter()
                for row, time, diff in read(table, plan.collection, plan.part_scans, plan.schema):
                    found[row, time] += diff
                columns = model.columns_as_of(max(upper - 1, 0))
                found = Counter({each: n for each, n in found.items() if n})
                assert found == model.changes(lower, upper, columns), (lower, upper)
            with table.listen(lower - 1) as listener:
                while (given := listener.next_changes(timeout_ms=0)) is not None:
                    assert isinstance(given, Changes)
                    columns = model.columns_as_of(given.upper - 1)
                    expected = model.changes(given.lower, given.upper, columns)
                    assert given_by(given) == expected, (given.lower, given.upper)


def check_slices(history: History) -> None:
    with history.lived() as (table, model):
        state = table.state
        for as_of in range(model.since, model.upper):
            plan = scan_plan.scan_snapshot(state, as_of)
            for batch in state.batches:
                looked = [each for each in plan.base + plan.deltas if each.part in batch.parts]
                if batch.lower > as_of and not shared(batch, state):
                    assert looked == []
                assert all(each.lower < each.upper for each in looked), (as_of, looked)
        first = model.since + 1 if model.since else 0
        for lower in range(first, model.upper):
            for upper in range(lower + 1, model.upper + 1):
                changes = scan_plan.scan_changes(state, lower, upper)
                for batch in state.batches:
                    overlaps = batch.lower < upper and lower < batch.upper
                    looked = [each for each in changes.part_scans if each.part in batch.parts]
                    if not shared(batch, state):
                        assert bool(looked) == overlaps, (lower, upper, batch)


def shared(batch: Batch, state: CollectionState) -> bool:
    """Return whether another batch has a part of the same bytes."""
    others = [other for other in state.batches if other.id != batch.id]
    return any(part in other.parts for other in others for part in batch.parts)


@given(histories())
@settings(max_examples=100)
def test_a_planned_snapshot_is_the_sum_of_all_updates_up_to_its_time(history):
    check_snapshots(history)


@given(histories())
@settings(max_examples=60)
def test_planned_changes_are_what_a_listener_is_given(history):
    check_changes(history)


@given(histories())
@settings(max_examples=60)
def test_batches_outside_the_times_are_in_no_slice(history):
    check_slices(history)


# Planted bugs and requests.


@pytest.fixture
def state() -> Iterator[CollectionState]:
    """A collection with a since of 3 and an upper of 8."""
    with opened(Shelf()) as client:
        table = client.create_or_load("rows", schema=SCHEMA)
        table.compare_and_append(rows(*(("a", 1, time, 1) for time in range(8))), 0, 8)
        table.allow_compaction(3).result()
        yield table.state


def test_a_snapshot_is_planned_from_since_to_upper(state):
    for as_of in range(3, 8):
        assert scan_plan.scan_snapshot(state, as_of).as_of == as_of
    with pytest.raises(SinceError, match="as of 2"):
        scan_plan.scan_snapshot(state, 2)
    with pytest.raises(NotYetComplete, match="as of 8"):
        scan_plan.scan_snapshot(state, 8)


def test_changes_are_planned_from_past_since_to_upper(state):
    assert scan_plan.scan_changes(state, 4, 8).part_scans
    assert scan_plan.scan_changes(state, 8, 8).part_scans == ()
    # What lay below since has been brought up to it.
    with pytest.raises(SinceError):
        scan_plan.scan_changes(state, 3, 8)
    with pytest.raises(NotYetComplete):
        scan_plan.scan_changes(state, 4, 9)
    with pytest.raises(UsageError, match="from 6 to 5"):
        scan_plan.scan_changes(state, 6, 5)
    unmoved = structs.replace(state, since=0)
    assert scan_plan.scan_changes(unmoved, 0, 8).part_scans[0].whole


# Bugs that the laws must find.


def ignore_until() -> Any:
    """Planted bug: a scan includes discarded updates."""

    def part_scans(collection: CollectionState, batch: Batch, **bounds: int) -> Iterator[PartScan]:
        return part_scans_of(collection, structs.replace(batch, until=END), **bounds)

    return mock.patch.object(scan_plan, "part_scans_of", part_scans)


def any_merge_is_a_base() -> Any:
    """A merge is a base, however often its rows are there."""
    best = scan_plan._base

    def base(collection: CollectionState, as_of: int) -> Batch | None:
        batches = tuple(structs.replace(b, distinct=b.merged) for b in collection.batches)
        return best(structs.replace(collection, batches=batches), as_of)

    return mock.patch.object(scan_plan, "_base", base)


def forget_what_lies_above_the_base() -> Any:
    """Planted bug: a batch that contains the base has no deltas."""
    plan = scan_plan.scan_snapshot

    def planned(collection: CollectionState, as_of: int) -> scan_plan.SnapshotScan:
        found = plan(collection, as_of)
        rest = tuple(s for s in found.deltas if s.part not in [b.part for b in found.base])
        return replace(found, deltas=rest)

    return mock.patch.object(scan_plan, "scan_snapshot", planned)


def base_to_the_end() -> Any:
    """Planted bug: all times of a base batch belong to the base."""
    plan = scan_plan.scan_snapshot

    def planned(collection: CollectionState, as_of: int) -> scan_plan.SnapshotScan:
        found = plan(collection, as_of)
        return replace(found, base=tuple(replace(s, upper=END) for s in found.base))

    return mock.patch.object(scan_plan, "scan_snapshot", planned)


def distinct_rows_whatever_their_keys() -> Any:
    """Rows are distinct if each is there once, though two have the same key."""
    exact = merger.distinct

    def distinct(updates: pa.Table, _key: tuple[str, ...], *, since: int) -> bool:
        return exact(updates, (), since=since)

    return mock.patch.object(merger, "distinct", distinct)


@pytest.mark.parametrize(
    "bug",
    [
        ignore_until,
        any_merge_is_a_base,
        forget_what_lies_above_the_base,
        base_to_the_end,
    ],
)
def test_a_planted_bug_in_a_snapshot_is_found(bug):
    @given(histories(keys=[("k",)]))
    @settings(max_examples=5_000, phases=[Phase.generate], report_multiple_bugs=False)
    def law(history: History) -> None:
        check_snapshots(history)

    with bug(), pytest.raises(AssertionError):
        law()


def test_discarded_updates_in_planned_changes_are_found():
    @given(histories(keys=[("k",)]))
    @settings(max_examples=5_000, phases=[Phase.generate], report_multiple_bugs=False)
    def law(history: History) -> None:
        check_changes(history)

    with ignore_until(), pytest.raises(AssertionError):
        law()


def test_two_rows_of_one_key_taken_for_a_base_are_found():
    both = ("write", [(0, 1, 0, 1), (0, 1, 3, 1)])
    one_gone = ("write", [(0, 0, 0, 1)])
    history = History([both, ("seal", 2), ("allow", 1), ("compact",), one_gone, ("seal", 1)])
    check_snapshots(history)
    with distinct_rows_whatever_their_keys(), pytest.raises(AssertionError):
        check_snapshots(history)
