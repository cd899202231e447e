"""Each planted bug is noticed, and without it the same execution is clean.

The executions are the ones of the hazards, told step by step; the checker is
the one that judges the nemesis.
"""

import errno
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from penstock.durable.disk import Disk
from penstock.durable.files import FileBlob
from penstock.durable.log import entry_key
from penstock.errors import IndeterminateError, PenstockError
from penstock.testing.stores import (
    CarelessDisk,
    Fate,
    PlantedBug,
    PowerCutDisk,
    UnreliableBlob,
)
from tests.faults.history import Event
from tests.faults.planted import BUGS, planted
from tests.faults.stage import HOUR_MS, HookBlob, SlowClock, Stage, on, once
from tests.faults.validator import Invariant, violations

WITH_AND_WITHOUT = pytest.mark.parametrize("bug", [True, False], ids=["planted", "clean"])


def judged(history: list[Event], bug: bool, *expected: Invariant) -> None:
    """Exactly the planted bug is found; and nothing is, without it."""
    found = violations(history)
    if bug:
        assert {each.invariant for each in found} & set(expected), [*map(str, found)]
    else:
        assert not found, "\n".join(map(str, found))


# Row 1. The one with a stopped process is in test_stopped.py.


@WITH_AND_WITHOUT
def test_a_truncated_number_that_is_created_again_is_not_acknowledged(bug: bool) -> None:
    with on(Stage.in_memory()) as stage:
        first = stage.enter("w1", writer="a")
        words = first.words()
        first.scribe.append(words, [1], 0, 2)
        _run_past(stage)
        with planted("no_floor_check" if bug else None):
            first.scribe.append(words, [2], 2, 3)
        judged(stage.history(), bug, Invariant.ACKNOWLEDGED)


def _run_past(stage: Stage) -> None:
    """A successor takes over, writes, rolls up and truncates the log to its very end."""
    second = stage.enter("w2", writer="a")
    words = second.words()
    upper = words.upper
    for _ in range(3):
        second.scribe.append(words, [upper], upper, upper + 10)
        upper += 10
        stage.clock.advance(HOUR_MS)
        second.roll_up()
    stage.clock.advance(2 * HOUR_MS)
    second.scribe.append(words, [upper], upper, upper + 10)
    second.roll_up()
    second.scribe.append(words, [upper + 10], upper + 10, upper + 20)
    second.truncate()


# Row 2.


@WITH_AND_WITHOUT
def test_a_file_that_is_about_to_be_linked_is_not_swept(bug: bool) -> None:
    with on(Stage.in_memory(inline_bytes=0)) as stage, planted("sweep_by_age" if bug else None):
        writer = stage.enter("w", writer="a")
        words = writer.words()

        writer.blob.after = once("create", "batch/", lambda _: writer.upkeep.sweep())
        writer.scribe.append(words, [1], 0, 2, wide=100)
        judged(stage.history(), bug, Invariant.LINKED)


@WITH_AND_WITHOUT
def test_a_sweep_with_an_old_state_does_not_take_what_a_successor_linked(bug: bool) -> None:
    name = "sweep_reads_state_first" if bug else None
    with on(Stage.in_memory(inline_bytes=0)) as stage, planted(name):
        first = stage.enter("w1", writer="a")
        first.words()

        def succeed(_: bytes) -> None:
            second = stage.enter("w2", writer="a")
            second.scribe.append(second.words(), [1], 0, 2, wide=100)

        first.blob.before = once("list", "batch/", succeed)
        first.upkeep.sweep()
        judged(stage.history(), bug, Invariant.LINKED)


# Row 3.


class LateBlob(HookBlob):
    """A store in which one creation is long on its way: its answer is lost, it lands later."""

    def __init__(self, inner: HookBlob, prefix: str) -> None:
        super().__init__(inner)
        self._prefix: str | None = prefix
        self._late: tuple[str, bytes] | None = None

    def late(self, prefix: str) -> None:
        self._prefix = prefix

    def create(self, key: str, data: bytes) -> bool:
        if self._prefix is not None and key.startswith(self._prefix):
            self._prefix, self._late = None, (key, data)
            raise IndeterminateError(f'no answer to the creation of "{key}"')
        if self._late is not None:
            self.land()
        return self.inner.create(key, data)

    def land(self) -> None:
        if self._late is not None:
            late, self._late = self._late, None
            self.inner.create(*late)


@WITH_AND_WITHOUT
def test_a_missing_entry_is_not_taken_for_one_that_was_not_written(bug: bool) -> None:
    with on(Stage.in_memory()) as stage:
        late = LateBlob(HookBlob(stage.store(stage.clock)), prefix="nothing")
        writer = stage.enter("w", writer="a", inner=late)
        words = writer.words()
        late.late("log/")
        with planted("missing_means_failed" if bug else None):
            writer.scribe.append(words, [1], 0, 2)
        late.land()
        judged(stage.history(), bug, Invariant.ONE_OUTCOME)


@WITH_AND_WITHOUT
@pytest.mark.parametrize("fate", [Fate.ANSWER_LOST, Fate.REQUEST_LOST, Fate.FAILED])
def test_an_attempt_is_repeated_with_the_same_bytes(bug: bool, fate: Fate) -> None:
    with on(Stage.in_memory()) as stage:
        clean = stage.enter("w0", writer="a")
        clean.words()
        clean.client.close()
        # The epoch is taken in peace; then comes the append.
        unreliable = UnreliableBlob(stage.store(stage.clock), script=[Fate.ANSWERED, fate])
        writer = stage.enter("w", writer="a", inner=unreliable)
        words = writer.words()
        with planted("new_bytes_on_retry" if bug and fate is Fate.ANSWER_LOST else None):
            writer.scribe.append(words, [1], 0, 2)
        assert fate in unreliable.fates
        judged(stage.history(), bug and fate is Fate.ANSWER_LOST, Invariant.ONE_OUTCOME)


# Row 4.


@WITH_AND_WITHOUT
def test_an_entry_of_a_stale_epoch_that_lands_late_changes_nothing(bug: bool) -> None:
    with on(Stage.in_memory()) as stage, planted("no_void_rule" if bug else None):
        first = stage.enter("w1", writer="a")
        words = first.words()
        first.scribe.append(words, [1], 0, 2)

        def overtaken(entry: bytes) -> None:
            """The successor's epoch takes the number, and our other creation lands behind it."""
            second = stage.enter("w2", writer="a")
            head = second.client.state.seqno
            second.blob.inner.create(entry_key(head), entry)
            second.scribe.append(second.words(), [2], 2, 3)

        first.blob.before = once("create", "log/", overtaken)
        assert first.scribe.append(words, [2], 2, 3) == "fenced" or bug
        judged(stage.history(), bug, Invariant.STALE_EPOCH, Invariant.ONE_OUTCOME)


# Row 5.


@WITH_AND_WITHOUT
def test_the_inline_batch_of_a_truncated_entry_is_still_readable(bug: bool) -> None:
    name = "rollup_points_at_entries" if bug else None
    with on(Stage.in_memory()) as stage, planted(name):
        writer = stage.enter("w", writer="a")
        words = writer.words()
        writer.scribe.append(words, [1], 0, 2)
        writer.roll_up()
        stage.clock.advance(2 * HOUR_MS)
        writer.scribe.append(words, [2], 2, 3)
        writer.roll_up()
        writer.scribe.append(words, [3], 3, 4)
        writer.roll_up()
        writer.truncate()
        judged(stage.history(), bug, Invariant.READABLE)


# Row 6.


@WITH_AND_WITHOUT
def test_a_listener_overtaken_by_truncation_goes_on_from_a_rollup(bug: bool) -> None:
    with on(Stage.in_memory()) as stage:
        first = stage.enter("w1", writer="a")
        first.scribe.append(first.words(), [1], 0, 2)
        reader = stage.enter("r")
        listening = reader.scribe.listen(reader.client.collection("words"), -1, "l")
        assert listening.step()
        _run_past(stage)
        with planted("wait_on_missing" if bug else None):
            while listening.step(timeout_ms=30_000):
                pass
        listening.ended(expected=stage.actors[-1].words().upper)
        judged(stage.history(), bug, Invariant.LISTENER)


@WITH_AND_WITHOUT
@pytest.mark.parametrize("name", ["listener_holds_at_frontier", "merge_past_the_listener"])
def test_merging_gives_a_listener_nothing_twice(bug: bool, name: str) -> None:
    with on(Stage.in_memory()) as stage, planted(name if bug else None):
        writer = stage.enter("w", writer="a")
        words = writer.words()
        listening = writer.scribe.listen(words, -1, "l")
        writer.scribe.append(words, [1, 5], 0, 10)
        assert listening.step()
        writer.scribe.append(words, [11], 10, 20)
        words.allow_compaction(18).result()
        writer.client.compact()
        assert listening.step()
        writer.scribe.append(words, [21], 20, 30)
        words.allow_compaction(28).result()
        writer.client.compact()
        assert listening.step()
        listening.ended(expected=30)
        listening.listener.close()
        judged(stage.history(), bug, Invariant.LISTENER, Invariant.DEFINITE)


# Row 7.


@WITH_AND_WITHOUT
def test_a_hold_placed_while_since_is_moving_counts_or_is_refused(bug: bool) -> None:
    name = "holds_looked_at_before_announcing" if bug else None
    with on(Stage.in_memory()) as stage, planted(name):
        writer = stage.enter("w", writer="a")
        words = writer.words()
        writer.scribe.append(words, [1, 30], 0, 100)
        writer.client.collection("words").allow_compaction(2).result()

        def hold(_: bytes) -> None:
            holder = stage.enter("h")
            holder.client.hold("owner").move({"words": 5})
            holder.scribe.recorder.note("held", holder="owner", id=words.id, since=5)
            holder.scribe.snapshot(holder.client.collection("words"), 5)

        # The permission is one entry and the announcement the next.
        writer.blob.before = once(
            "create", "log/", lambda _: setattr(writer.blob, "before", once("create", "log/", hold))
        )
        words.allow_compaction(50).result()
        writer.scribe.look(words)
        writer.client.compact()
        reader = stage.enter("r")
        reader.scribe.snapshot(reader.client.collection("words"), 5, held=True)
        judged(stage.history(), bug, Invariant.HELD)


@WITH_AND_WITHOUT
def test_an_entry_that_lost_its_number_is_looked_at_again(bug: bool) -> None:
    with on(Stage.in_memory()) as stage:
        first = stage.enter("w1", writer="a")
        words = first.words()
        first.scribe.append(words, [1], 0, 2)
        first.blob.before = once("create", "log/", lambda _: stage.enter("w2", writer="a"))
        with planted("renumber_without_looking" if bug else None):
            first.scribe.append(words, [2], 2, 3)
        judged(stage.history(), bug, Invariant.ACKNOWLEDGED)


@WITH_AND_WITHOUT
def test_a_live_hold_does_not_expire_by_its_owners_slow_clock(bug: bool) -> None:
    name = "expire_by_readers_clock" if bug else None
    with on(Stage.in_memory()) as stage, planted(name):
        writer = stage.enter("w", writer="a")
        words = writer.words()
        writer.scribe.append(words, [1, 30], 0, 100)
        reader = stage.enter("r", clock=SlowClock(stage.clock, HOUR_MS))
        mine = reader.client.collection("words")
        with mine.listen(5):
            reader.scribe.recorder.note("held", holder="r", id=words.id, since=5)
            words.allow_compaction(50).result()
            writer.client.compact()
            writer.scribe.look(words)
            reader.scribe.snapshot(mine, 5, held=True)
            reader.scribe.recorder.note("unheld", holder="r", id=words.id)
        judged(stage.history(), bug, Invariant.HELD)


@WITH_AND_WITHOUT
def test_a_reader_beside_the_writer_is_not_forgotten(bug: bool) -> None:
    name = "claims_are_not_kept" if bug else None
    with on(Stage.in_memory()) as stage, planted(name):
        writer = stage.enter("w", writer="a")
        words = writer.words()
        writer.scribe.append(words, [1, 30], 0, 100)
        with words.listen(5):
            writer.scribe.recorder.note("held", holder="l", id=words.id, since=5)
            words.allow_compaction(50).result()
            writer.client.compact()
            writer.scribe.look(words)
            writer.scribe.snapshot(words, 5, held=True)
            writer.scribe.recorder.note("unheld", holder="l", id=words.id)
        judged(stage.history(), bug, Invariant.HELD)


# Row 8.


def _on_disk(disk: Disk) -> Stage:
    return Stage(lambda clock: FileBlob("/lake", disk=disk, clock=clock))


def _written(stage: Stage, then: Callable[[], None]) -> None:
    """Small and large appends; `then` arms the disk once the location is open."""
    writer = stage.enter("w", writer="a", inline_bytes=1 << 10)
    words = writer.words()
    then()
    with suppress(PenstockError):
        for number in range(4):
            writer.scribe.append(words, [number], number, number + 1, wide=100 * (number % 2))


def _after_cut(stage: Stage, disk: PowerCutDisk, chance: random.Random) -> list[Event]:
    stage.close()
    found = disk.after_power_cut(chance)
    stage.store = lambda clock: FileBlob("/lake", disk=found, clock=clock)
    stage.recorders[0].note("power_cut")
    return stage.history()


@WITH_AND_WITHOUT
def test_a_power_cut_leaves_no_entry_that_is_linked_and_half_written(bug: bool) -> None:
    found = []
    for step in range(45):
        disk = PowerCutDisk()
        stage = _on_disk(CarelessDisk(disk, PlantedBug.LINK_BEFORE_SYNC) if bug else disk)
        with on(stage):
            _written(stage, lambda: setattr(disk, "_cut_before", len(disk.steps) + step))  # noqa: B023
            found += violations(_after_cut(stage, disk, random.Random(step)))
    assert bool(found) == bug, "\n".join(map(str, found))


@WITH_AND_WITHOUT
def test_a_sync_that_failed_is_not_tried_again_and_believed(bug: bool) -> None:
    found = []
    for sync in range(15):
        disk = PowerCutDisk()
        stage = _on_disk(CarelessDisk(disk, PlantedBug.RETRY_SYNC) if bug else disk)
        with on(stage):
            _written(stage, lambda: setattr(disk, "_failing_syncs", {disk._syncs + sync}))  # noqa: B023
            found += violations(_after_cut(stage, disk, random.Random(sync)))
    assert bool(found) == bug, "\n".join(map(str, found))


class WatchedDisk:
    """A `Disk` that calls `before_sync` whenever a folder is about to be synced."""

    def __init__(self, inner: Disk) -> None:
        self._inner = inner
        self.before_sync: Callable[[], None] | None = None

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def sync_folder(self, folder: int) -> None:
        if self.before_sync is not None:
            watcher, self.before_sync = self.before_sync, None
            watcher()
        self._inner.sync_folder(folder)


@WITH_AND_WITHOUT
def test_a_reader_does_not_act_on_an_entry_that_a_power_cut_may_take_back(bug: bool) -> None:
    found = []
    for seed in range(16):
        disk = PowerCutDisk()
        watched = WatchedDisk(disk)
        stage = _on_disk(watched)  # type: ignore[arg-type]
        with on(stage), planted("reader_does_not_settle" if bug else None):
            writer = stage.enter("w", writer="a")
            words = writer.words()
            writer.scribe.append(words, [1], 0, 2)
            reader = stage.enter("r", inner=FileBlob("/lake", disk=disk), hold=False)
            mine = reader.client.collection("words")

            def reads_then_power_fails() -> None:
                reader.scribe.look(mine)  # noqa: B023
                reader.scribe.snapshot(mine, 2)  # noqa: B023
                raise OSError(errno.EIO, "the plug was pulled")

            watched.before_sync = reads_then_power_fails
            writer.scribe.append(words, [2], 2, 3)
            found += violations(_after_cut(stage, disk, random.Random(seed)))
    assert bool(found) == bug, "\n".join(map(str, found))


# Row 28 needs processes; see test_two_writers.py.


def test_every_planted_bug_has_a_test() -> None:
    here = Path(__file__).parent
    told = "".join(path.read_text() for path in here.glob("test_*.py"))
    assert not [name for name in BUGS if f'"{name}"' not in told]
