"""One process's view of a location: written, fenced and damaged entries."""

import random
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from tests.persist.shop import by_hand

from penstock.durable.log import entry_key
from penstock.durable.memory import MemoryBlob, Shelf
from penstock.errors import (
    Corruption,
    DeterminateError,
    DurabilityLost,
    Fenced,
    IndeterminateError,
    InternalError,
    UsageError,
)
from penstock.persist.encoding import decode_entry, decode_rollup, encode_entry
from penstock.persist.machine import READ_AHEAD, Machine, PlanFailed
from penstock.persist.paths import ROLLUPS, rollup_key
from penstock.persist.state import (
    TOKENS_KEPT,
    Batch,
    Create,
    Entry,
    Link,
    OpenStaging,
    Operation,
    Release,
    SchemaVersion,
    State,
    Stored,
    TakeEpoch,
    Writer,
)
from penstock.testing.clocks import ManualClock

PROOF_MS = 10_000
NAME = "memory:machine"
SCHEMA = SchemaVersion(0, 0, pa.schema([("k", pa.string())]).serialize().to_pybytes())


class ScriptedBlob(MemoryBlob):
    """A store that calls hooks, each at most once."""

    before_create: Callable[[str, bytes], bool | None] | None = None
    """Called in place of the next create, if its result is not None."""

    before_get: Callable[[str], None] | None = None
    before_list: Callable[[str], None] | None = None
    lists: int = 0

    def create(self, key: str, data: bytes) -> bool:
        hook, self.before_create = self.before_create, None
        result = hook(key, data) if hook else None
        return super().create(key, data) if result is None else result

    def get(self, key: str, *, start: int = 0) -> bytes | None:
        hook, self.before_get = self.before_get, None
        if hook:
            hook(key)
        return super().get(key, start=start)

    def list(self, prefix: str, *, after: str = "") -> Any:
        self.lists += 1
        hook, self.before_list = self.before_list, None
        if hook:
            hook(prefix)
        return super().list(prefix, after=after)


class Place:
    """A storage location and the machines that are open on it."""

    def __init__(self) -> None:
        self.shelf, self.clock = Shelf(), ManualClock()
        self.seeds = iter(range(1_000))

    def machine(self, proof_ms: int = PROOF_MS) -> Machine:
        blob = ScriptedBlob(self.shelf, name=NAME, clock=self.clock)
        chance = random.Random(next(self.seeds))
        return Machine(blob, by_hand(clock=self.clock, chance=chance, proof_ms=proof_ms))

    def writer(self, name: str = "w", proof_ms: int = PROOF_MS) -> Machine:
        machine = self.machine(proof_ms)
        machine.load()
        machine.take_epoch(lambda _: [TakeEpoch(Writer(name, host="h", pid=7), "l1")])
        return machine

    def entry(self, number: int) -> Entry:
        data = self.shelf.objects[entry_key(number)][0]
        return decode_entry(data, key=entry_key(number), where=NAME)

    def truncate(self, machine: Machine) -> None:
        """Write a rollup of all that a machine knows, and delete the log below it."""
        machine.write_rollup(machine.state)
        machine.log.truncate(machine.state.seqno, head=machine.state.seqno)


@pytest.fixture
def place() -> Place:
    return Place()


def blob_of(machine: Machine) -> ScriptedBlob:
    assert isinstance(machine.blob, ScriptedBlob)
    return machine.blob


def create(machine: Machine, name: str) -> tuple[State, State]:
    return machine.commit(lambda _: [Create(name, SCHEMA)])


def names(state: State) -> set[str]:
    return {*state.names}


def test_load_of_an_empty_location_returns_the_empty_state(place: Place) -> None:
    machine = place.machine()
    assert machine.load() == machine.state == State()
    assert machine.epoch is None
    assert machine.bytes_since_rollup == 0


def test_commit_without_an_epoch_raises_internal_error(place: Place) -> None:
    machine = place.machine()
    with pytest.raises(InternalError, match="commit without an epoch"):
        create(machine, "c")
    assert not place.shelf.objects


def test_commit_writes_one_entry_and_returns_the_states_around_it(place: Place) -> None:
    machine = place.writer()
    place.clock.move_ms(77)
    before, after = create(machine, "c")
    assert (before.seqno, after.seqno) == (1, 2)
    assert (names(before), names(after)) == (set(), {"c"})
    assert machine.state is after
    written = place.entry(1)
    assert (written.location, written.epoch) == ("l1", 1)
    assert written.at_ms == place.clock.now_ms()
    assert len(written.token) == 16
    assert int(written.token, 16) >= 0
    assert written.token != place.entry(0).token
    assert after.tokens[1] == written.token
    sizes = [len(place.shelf.objects[entry_key(number)][0]) for number in (0, 1)]
    assert machine.bytes_since_rollup == sum(sizes)

    reader = place.machine()
    assert reader.load() == after
    assert reader.bytes_since_rollup == sum(sizes)


def test_commit_of_an_empty_plan_writes_nothing(place: Place) -> None:
    machine = place.writer()
    before = machine.state
    assert machine.commit(lambda _: []) == (before, before)
    assert machine.log.entries() == [0]


@pytest.mark.parametrize("error", [ValueError("no"), UsageError("no")])
def test_commit_whose_plan_raises_writes_nothing(place: Place, error: Exception) -> None:
    machine = place.writer()

    def plan(_: State) -> list[Operation]:
        raise error

    with pytest.raises(PlanFailed if isinstance(error, ValueError) else UsageError) as caught:
        machine.commit(plan)
    if isinstance(error, ValueError):
        assert caught.value.__cause__ is error
        assert f'"{NAME}"' in str(caught.value)
    assert machine.log.entries() == [0]
    create(machine, "c")


def test_commit_of_a_void_entry_raises_internal_error_and_writes_nothing(place: Place) -> None:
    machine = place.writer()
    create(machine, "c")
    part = Stored("batch/9-0/a.parquet", 9, 7, footer=8, footer_checksum=5)
    batch = Batch(0, 0, 1, 1, 9, (part,))
    with pytest.raises(InternalError, match='would be void: staging id "9-0" is closed'):
        machine.commit(lambda _: [Link(1, (batch,))])
    assert machine.log.entries() == [0, 1]


def test_first_epoch_names_the_location_and_later_ones_do_not(place: Place) -> None:
    place.writer()
    second = place.machine()
    second.load()
    state = second.take_epoch(lambda _: [TakeEpoch(Writer("x"), "l2")])
    assert (state.location, state.epoch, second.epoch) == ("l1", 2, 2)
    assert place.entry(1).location == "l1"


def test_take_epoch_for_nobody_fences_the_writer_and_owns_nothing(place: Place) -> None:
    writer, operator = place.writer(), place.machine()
    operator.load()
    state = operator.take_epoch(lambda _: [TakeEpoch(None, "")], own=False)
    assert (state.epoch, state.writer, operator.epoch) == (2, None, None)
    with pytest.raises(InternalError):
        create(operator, "c")
    with pytest.raises(Fenced, match="was fenced") as caught:
        create(writer, "c")
    assert "wrote in epoch 1; epoch 2 has begun, released by an operator" in caught.value.detail
    assert writer.log.entries() == [0, 1]


def test_take_epoch_over_an_entry_not_seen_plans_again(place: Place) -> None:
    first, second = place.writer(), place.machine()
    second.load()
    planned: list[int] = []

    def plan(state: State) -> list[Operation]:
        planned.append(state.seqno)
        if len(planned) == 1:
            create(first, "c")
        return [TakeEpoch(Writer("x"), "l1")]

    state = second.take_epoch(plan)
    assert planned == [1, 2]
    assert (names(state), state.epoch, second.epoch) == ({"c"}, 2, 2)


def test_commit_of_a_fenced_writer_raises_fenced_and_writes_nothing(place: Place) -> None:
    old, new = place.writer("old"), place.writer("new")
    with pytest.raises(Fenced, match=f'writer of location "{NAME}" was fenced') as caught:
        create(old, "c")
    assert 'taken over by "new", process 7 on host "h"' in caught.value.detail
    assert old.log.entries() == [0, 1]
    assert create(new, "c")[1].seqno == 3


def test_commit_after_release_raises_fenced_and_writes_nothing(place: Place) -> None:
    machine = place.writer()
    machine.commit(lambda _: [Release()])
    with pytest.raises(Fenced, match=f'writer of location "{NAME}" gave up its lock'):
        create(machine, "c")
    assert machine.log.entries() == [0, 1]


def test_commit_at_an_occupied_number_plans_again_on_the_new_state(place: Place) -> None:
    first, second = place.writer(), place.machine()
    second.load()
    second.adopt(1)
    assert second.epoch == 1
    create(first, "a")
    seen: list[set[str]] = []

    def plan(state: State) -> list[Operation]:
        seen.append(names(state))
        return [Create("b", SCHEMA)]

    before, after = second.commit(plan)
    assert seen == [set(), {"a"}]
    assert (names(before), names(after)) == ({"a"}, {"a", "b"})
    assert place.machine().load() == after


def test_adopt_of_an_epoch_that_is_over_raises_fenced(place: Place) -> None:
    machine = place.machine()
    machine.load()
    place.writer("old")
    place.writer("new")
    with pytest.raises(Fenced):
        machine.adopt(1)
    with pytest.raises(Fenced):
        create(machine, "c")


def test_commit_whose_earlier_attempt_landed_counts_once(place: Place) -> None:
    machine = place.writer()

    def lost_response(key: str, data: bytes) -> bool:
        assert blob_of(machine).create(key, data)
        return False  # As a retry finds it.

    blob_of(machine).before_create = lost_response
    before, after = create(machine, "c")
    assert (before.seqno, after.seqno) == (1, 2)
    assert place.machine().load() == after


def test_commit_whose_create_is_indeterminate_raises_indeterminate(place: Place) -> None:
    machine = place.writer()

    def lost(key: str, data: bytes) -> bool:
        raise IndeterminateError("as asked")

    blob_of(machine).before_create = lost
    with pytest.raises(IndeterminateError, match="as asked"):
        create(machine, "c")
    assert machine.state.seqno == 1


class Overtaken:
    """A writer that stops in the middle of a commit while the log is truncated past it."""

    def __init__(self, place: Place, *, landed: bool, outcome: Any, epochs: int = 0) -> None:
        self.place, self.outcome, self.landed, self.epochs = place, outcome, landed, epochs
        self.machine, self.other = place.writer(), place.machine()
        self.other.load()
        self.other.adopt(1)
        blob_of(self.machine).before_create = self.stop

    def stop(self, key: str, data: bytes) -> bool | None:
        if self.landed:
            assert blob_of(self.machine).create(key, data)
            self.other.refresh()
        else:
            create(self.other, "other")
        for _ in range(self.epochs):
            self.other.take_epoch(lambda _: [TakeEpoch(Writer("w"), "l1")])
        self.place.truncate(self.other)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        assert self.outcome is None or isinstance(self.outcome, bool)
        return self.outcome


LOST = IndeterminateError("as asked")


@pytest.mark.parametrize("outcome", [False, LOST], ids=["occupied", "lost"])
def test_commit_that_landed_before_a_truncation_counts(place: Place, outcome: Any) -> None:
    overtaken = Overtaken(place, landed=True, outcome=outcome)
    before, after = create(overtaken.machine, "c")
    assert (before.seqno, after.seqno) == (1, 2)
    assert names(after) == {"c"}
    assert overtaken.machine.log.entries() == []
    assert place.machine().load() == after


@pytest.mark.parametrize("outcome", [False, LOST], ids=["occupied", "lost"])
def test_commit_that_was_overtaken_by_a_truncation_is_written_again(
    place: Place, outcome: Any
) -> None:
    overtaken = Overtaken(place, landed=False, outcome=outcome)
    before, after = create(overtaken.machine, "c")
    assert (names(before), names(after)) == ({"other"}, {"other", "c"})
    assert overtaken.machine.log.entries() == [2]
    assert place.machine().load() == after


def test_commit_created_at_a_truncated_number_does_not_count(place: Place) -> None:
    overtaken = Overtaken(place, landed=False, outcome=None)
    place.clock.move_ms(PROOF_MS)
    before, after = create(overtaken.machine, "c")
    assert (names(before), names(after)) == ({"other"}, {"other", "c"})
    # Number 1 is void, though an object has it.
    assert overtaken.machine.log.entries() == [1, 2]
    assert place.machine().load() == after


def test_commit_less_than_proof_ms_after_the_head_was_seen_lists_nothing(place: Place) -> None:
    machine = place.writer()
    create(machine, "a")
    place.clock.move_ms(PROOF_MS - 1)
    listed = blob_of(machine).lists
    create(machine, "b")
    place.clock.move_ms(PROOF_MS - 1)
    create(machine, "c")  # The creation of "b" was a proof too.
    assert blob_of(machine).lists == listed
    place.clock.move_ms(PROOF_MS)
    create(machine, "d")
    assert blob_of(machine).lists > listed


def test_proof_of_a_commit_dates_from_before_its_request(place: Place) -> None:
    machine = place.writer()

    def slow(key: str, data: bytes) -> None:
        place.clock.move_ms(PROOF_MS - 1)

    blob_of(machine).before_create = slow
    create(machine, "a")
    place.clock.move_ms(1)
    listed = blob_of(machine).lists
    create(machine, "b")
    assert blob_of(machine).lists > listed


def test_commit_overtaken_by_many_epochs_raises_indeterminate(place: Place) -> None:
    overtaken = Overtaken(place, landed=False, outcome=False, epochs=TOKENS_KEPT + 1)
    with pytest.raises(IndeterminateError, match=f'of epoch 1 in location "{NAME}" is in doubt'):
        create(overtaken.machine, "c")


def test_commit_without_durability_is_not_looked_up(place: Place) -> None:
    lost = DurabilityLost("as asked")
    overtaken = Overtaken(place, landed=True, outcome=lost)
    with pytest.raises(DurabilityLost, match="as asked"):
        create(overtaken.machine, "c")


@pytest.mark.parametrize("outcome", [None, False, LOST], ids=["created", "occupied", "lost"])
def test_commit_whose_lookup_fails_raises_indeterminate(place: Place, outcome: Any) -> None:
    overtaken = Overtaken(place, landed=outcome is not None, outcome=outcome)
    machine = overtaken.machine
    cause = DeterminateError("the store is away", hint="Wait.")

    def away(_: str) -> None:
        raise cause

    def stop(key: str, data: bytes) -> bool | None:
        blob_of(machine).before_list = away
        return overtaken.stop(key, data)

    blob_of(machine).before_create = stop
    place.clock.move_ms(PROOF_MS)
    with pytest.raises(IndeterminateError, match=f'location "{NAME}" is in doubt') as caught:
        create(machine, "c")
    assert caught.value.__cause__ is cause
    assert "the store is away" in caught.value.detail
    assert caught.value.hint == "Wait."


def test_rollup_holds_the_state_and_load_begins_from_the_newest(place: Place) -> None:
    machine = place.writer()
    create(machine, "a")
    machine.write_rollup(machine.state)
    create(machine, "b")
    assert machine.bytes_since_rollup == len(place.shelf.objects[entry_key(2)][0])
    state = machine.state
    machine.write_rollup(state)
    assert machine.bytes_since_rollup == 0
    data = place.shelf.objects[rollup_key(3)][0]
    assert decode_rollup(data, key=rollup_key(3), where=NAME) == state
    # Names that are not rollups are ignored, and entries below the rollup are not read.
    place.shelf.objects[f"{ROLLUPS}zzz"] = (b"", 0)
    place.shelf.objects[entry_key(0)] = (b"damaged", 0)
    create(machine, "c")
    reader = place.machine()
    assert reader.load() == machine.state
    assert reader.bytes_since_rollup == machine.bytes_since_rollup


def test_load_again_never_goes_back(place: Place) -> None:
    machine = place.writer()
    machine.write_rollup(machine.state)
    create(machine, "c")
    after = machine.state
    place.shelf.objects[entry_key(0)] = (b"damaged", 0)
    place.shelf.objects[entry_key(1)] = (b"damaged", 0)
    assert machine.load() is after


def test_load_of_a_rollup_of_another_number_raises_corruption(place: Place) -> None:
    machine = place.writer()
    create(machine, "c")
    machine.write_rollup(machine.state)
    place.shelf.objects[rollup_key(3)] = place.shelf.objects[rollup_key(2)]
    with pytest.raises(Corruption) as caught:
        place.machine().load()
    assert caught.value.key == rollup_key(3)
    assert NAME in str(caught.value)
    assert caught.value.detail == "It holds another rollup."


def test_load_of_a_damaged_rollup_names_it(place: Place) -> None:
    place.shelf.objects[rollup_key(3)] = (b"damaged", 0)
    with pytest.raises(Corruption) as caught:
        place.machine().load()
    assert caught.value.key == rollup_key(3)
    assert NAME in str(caught.value)


def test_load_of_a_rollup_that_is_listed_and_missing_raises_corruption(place: Place) -> None:
    machine = place.machine()
    listed = [*MemoryBlob(Shelf({rollup_key(3): (b"", 0)})).list(ROLLUPS)]
    blob_of(machine).list = lambda prefix, *, after="": listed if prefix == ROLLUPS else []
    with pytest.raises(Corruption) as caught:
        machine.load()
    assert caught.value.key == rollup_key(3)
    assert caught.value.detail == "It is listed but cannot be read."


def test_load_of_a_rollup_deleted_meanwhile_reads_the_newer_one(place: Place) -> None:
    writer = place.writer()
    writer.write_rollup(writer.state)
    create(writer, "c")
    reader = place.machine()

    def replace(key: str) -> None:
        assert key == rollup_key(1)
        place.truncate(writer)
        del place.shelf.objects[rollup_key(1)]

    blob_of(reader).before_get = replace
    assert reader.load() == writer.state


def test_load_without_a_rollup_that_reaches_the_floor_raises_corruption(place: Place) -> None:
    writer = place.writer()
    create(writer, "c")
    writer.write_rollup(writer.state)
    create(writer, "d")
    writer.log.truncate(3, head=3)
    with pytest.raises(Corruption) as caught:
        place.machine().load()
    assert caught.value.key == rollup_key(3)
    assert "begins at entry 3 and no rollup reaches that far" in caught.value.detail


def test_load_with_a_rollup_at_the_floor_returns_its_state(place: Place) -> None:
    writer = place.writer()
    create(writer, "c")
    place.truncate(writer)
    assert place.machine().load() == writer.state


@pytest.mark.parametrize("count", [READ_AHEAD - 1, READ_AHEAD, READ_AHEAD + 1, 2 * READ_AHEAD])
def test_load_of_a_long_log_reads_all_of_it(place: Place, count: int) -> None:
    writer = place.writer()
    while writer.state.seqno < count:
        writer.commit(lambda state: [OpenStaging(f"1-{state.seqno}")])
    reader = place.machine()
    assert reader.load() == writer.state
    assert reader.state.seqno == count


def test_refresh_follows_the_writer(place: Place) -> None:
    writer, reader = place.writer(), place.machine()
    reader.load()
    create(writer, "c")
    assert reader.state.seqno == 1
    assert reader.refresh() == writer.state
    assert reader.refresh(thorough=True) == writer.state


def test_follow_of_a_damaged_entry_names_it_and_keeps_what_came_before(place: Place) -> None:
    writer, reader = place.writer(), place.machine()
    reader.load()
    create(writer, "c")
    good = writer.state
    create(writer, "d")
    place.shelf.objects[entry_key(2)] = (b"damaged", 0)
    with pytest.raises(Corruption) as caught:
        reader.refresh()
    assert caught.value.key == entry_key(2)
    assert NAME in str(caught.value)
    assert reader.state == good


def test_follow_of_a_void_entry_counts_it_and_changes_nothing(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "penstock")
    writer, reader = place.writer(), place.machine()
    void = Entry(location="l2", epoch=1, token="t", at_ms=0, operations=(Create("v", SCHEMA),))
    assert writer.log.create(1, encode_entry(void))
    state = reader.load()
    assert (state.seqno, state.epoch, names(state)) == (2, 1, set())
    assert [record.getMessage() for record in caplog.records].count("entry is void") == 1
    before, after = create(writer, "c")
    assert (before.seqno, after.seqno, names(after)) == (2, 3, {"c"})


def lose_the_head(place: Place, *, truncated: bool = False) -> Machine:
    """Return a reader of a log whose newest entry is lost, and was witnessed."""
    writer, reader = place.writer(), place.machine()
    if truncated:
        place.truncate(writer)
    reader.load()
    create(writer, "c")
    writer.log.witness(2)
    del place.shelf.objects[entry_key(1)]
    return reader


def test_refresh_of_a_log_that_lost_its_head_is_noticed_after_proof_ms(place: Place) -> None:
    reader = lose_the_head(place)
    place.clock.move_ms(PROOF_MS - 1)
    assert reader.refresh().seqno == 1
    # The time is counted from the previous read.
    place.clock.move_ms(PROOF_MS - 1)
    assert reader.refresh().seqno == 1
    place.clock.move_ms(PROOF_MS)
    with pytest.raises(Corruption) as caught:
        reader.refresh()
    assert caught.value.key == entry_key(1)
    assert caught.value.detail == "The log entry is missing, though the log once reached 2."


@pytest.mark.parametrize("truncated", [False, True])
def test_thorough_refresh_of_a_log_that_lost_its_head_raises_corruption(
    place: Place, truncated: bool
) -> None:
    reader = lose_the_head(place, truncated=truncated)
    with pytest.raises(Corruption) as caught:
        reader.refresh(thorough=True)
    assert caught.value.key == entry_key(1)


def test_thorough_refresh_of_a_log_with_a_hole_raises_corruption(place: Place) -> None:
    writer, reader = place.writer(), place.machine()
    reader.load()
    create(writer, "c")
    create(writer, "d")
    del place.shelf.objects[entry_key(1)]
    assert reader.refresh().seqno == 1
    with pytest.raises(Corruption) as caught:
        reader.refresh(thorough=True)
    assert caught.value.key == entry_key(1)
    with pytest.raises(Corruption):
        place.machine().load()


def test_thorough_refresh_of_a_log_truncated_past_the_reader_loads_a_rollup(
    place: Place,
) -> None:
    writer, reader = place.writer(), place.machine()
    reader.load()
    create(writer, "c")
    place.truncate(writer)
    assert reader.refresh().seqno == 1
    assert reader.refresh(thorough=True) == writer.state


def test_adopt_during_a_truncation_loads_a_rollup_and_writes_after_it(place: Place) -> None:
    writer, second = place.writer(), place.machine()
    second.load()
    create(writer, "a")
    writer.log.witness(2)
    place.clock.move_ms(PROOF_MS)
    # After the marks were listed, and before the entry is read.
    blob_of(second).before_get = lambda _: place.truncate(writer)
    second.adopt(1)
    assert second.state == writer.state
    create(second, "b")
    assert names(place.machine().load()) == {"a", "b"}


def test_refresh_after_proof_ms_ignores_what_lies_at_a_truncated_number(place: Place) -> None:
    writer, reader = place.writer(), place.machine()
    reader.load()
    create(writer, "c")
    place.truncate(writer)
    # A writer that was paused made this at a number that is void.
    late = Entry(location="l1", epoch=1, token="t", at_ms=0, operations=(Create("v", SCHEMA),))
    assert writer.log.create(1, encode_entry(late))
    place.clock.move_ms(PROOF_MS)
    assert reader.refresh() == writer.state
    assert names(reader.state) == {"c"}
