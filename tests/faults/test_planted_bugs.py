"""The checker detects each planted bug, and the same execution without it is clean.

The executions follow the hazards, step by step. The nemesis uses the same checker.
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
from tests.faults.planted_bugs import BUGS, planted
from tests.faults.stage import HOUR_MS, HookBlob, SlowClock, Stage, on, once
from tests.faults.validator import Invariant, violations

WITH_AND_WITHOUT = pytest.mark.parametrize("bug", [True, False], ids=["planted", "clean"])


def judged(history: list[Event], bug: bool, *expected: Invariant) -> None:
    """Assert an expected violation with the planted bug, and none without it."""
    found = violations(history)
    if bug:
        assert {each.invariant for each in found} & set(expected), [*map(str, found)]
    else:
        assert not found, "\n".join(map(str, found))


# Row 1. The test with a stopped process is in test_sigstop.py.


@WITH_AND_WITHOUT
def test_append_at_truncated_log_number_is_not_acknowledged(bug: bool) -> None:
    with on(Stage.in_memory()) as stage:
        first = stage.enter("w1", writer="a")
        words = first.words()
        first.scribe.append(words, [1], 0, 2)
        _run_past(stage)
        with planted("no_floor_check" if bug else None):
            first.scribe.append(words, [2], 2, 3)
        judged(stage.history(), bug, Invariant.ACKNOWLEDGED)


def _run_past(stage: Stage) -> None:
    """Start a successor that takes over, writes, rolls up and truncates the log to its head."""
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
def test_sweep_keeps_batch_file_that_is_not_linked_yet(bug: bool) -> None:
    with on(Stage.in_memory(inline_bytes=0)) as stage, planted("sweep_by_age" if bug else None):
        writer = stage.enter("w", writer="a")
        words = writer.words()

        writer.blob.after = once("create", "batch/", lambda _: writer.maintenance.sweep())
        writer.scribe.append(words, [1], 0, 2, wide=100)
        judged(stage.history(), bug, Invariant.LINKED)


@WITH_AND_WITHOUT
def test_sweep_with_stale_state_keeps_files_linked_by_successor(bug: bool) -> None:
    name = "sweep_reads_state_first" if bug else None
    with on(Stage.in_memory(inline_bytes=0)) as stage, planted(name):
        first = stage.enter("w1", writer="a")
        first.words()

        def succeed(_: bytes) -> None:
            second = stage.enter("w2", writer="a")
            second.scribe.append(second.words(), [1], 0, 2, wide=100)

        first.blob.before = once("list", "batch/", succeed)
        first.maintenance.sweep()
        judged(stage.history(), bug, Invariant.LINKED)


# Row 3.


class LateBlob(HookBlob):
    """Store that delays one create: the answer is lost, and the object appears later."""

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
def test_append_with_late_entry_has_one_outcome(bug: bool) -> None:
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
def test_append_with_store_fault_is_retried_with_same_bytes(bug: bool, fate: Fate) -> None:
    with on(Stage.in_memory()) as stage:
        clean = stage.enter("w0", writer="a")
        clean.words()
        clean.client.close()
        # The epoch is taken without a fault; the append follows.
        unreliable = UnreliableBlob(stage.store(stage.clock), script=[Fate.ANSWERED, fate])
        writer = stage.enter("w", writer="a", inner=unreliable)
        words = writer.words()
        with planted("new_bytes_on_retry" if bug and fate is Fate.ANSWER_LOST else None):
            writer.scribe.append(words, [1], 0, 2)
        assert fate in unreliable.fates
        judged(stage.history(), bug and fate is Fate.ANSWER_LOST, Invariant.ONE_OUTCOME)


# Row 4.


@WITH_AND_WITHOUT
def test_late_entry_of_stale_epoch_is_void(bug: bool) -> None:
    with on(Stage.in_memory()) as stage, planted("no_void_rule" if bug else None):
        first = stage.enter("w1", writer="a")
        words = first.words()
        first.scribe.append(words, [1], 0, 2)

        def overtaken(entry: bytes) -> None:
            """Start a successor that takes the number; the entry of this writer follows it."""
            second = stage.enter("w2", writer="a")
            head = second.client.state.seqno
            second.blob.inner.create(entry_key(head), entry)
            second.scribe.append(second.words(), [2], 2, 3)

        first.blob.before = once("create", "log/", overtaken)
        assert first.scribe.append(words, [2], 2, 3) == "fenced" or bug
        judged(stage.history(), bug, Invariant.STALE_EPOCH, Invariant.ONE_OUTCOME)


# Row 5.


@WITH_AND_WITHOUT
def test_inline_batch_of_truncated_entry_remains_readable(bug: bool) -> None:
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
def test_listener_overtaken_by_truncation_resumes_from_rollup(bug: bool) -> None:
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
def test_merge_delivers_no_update_twice_to_listener(bug: bool, name: str) -> None:
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
def test_hold_placed_while_since_advances_keeps_its_time_readable(bug: bool) -> None:
    name = "holds_read_before_announcing" if bug else None
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

        # The first entry allows the compaction, the second announces it.
        writer.blob.before = once(
            "create", "log/", lambda _: setattr(writer.blob, "before", once("create", "log/", hold))
        )
        words.allow_compaction(50).result()
        writer.scribe.inspect(words)
        writer.client.compact()
        reader = stage.enter("r")
        reader.scribe.snapshot(reader.client.collection("words"), 5, held=True)
        judged(stage.history(), bug, Invariant.HELD)


@WITH_AND_WITHOUT
def test_append_that_lost_its_log_number_is_validated_again(bug: bool) -> None:
    with on(Stage.in_memory()) as stage:
        first = stage.enter("w1", writer="a")
        words = first.words()
        first.scribe.append(words, [1], 0, 2)
        first.blob.before = once("create", "log/", lambda _: stage.enter("w2", writer="a"))
        with planted("renumber_without_planning_again" if bug else None):
            first.scribe.append(words, [2], 2, 3)
        judged(stage.history(), bug, Invariant.ACKNOWLEDGED)


@WITH_AND_WITHOUT
def test_live_hold_of_reader_with_slow_clock_does_not_expire(bug: bool) -> None:
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
            writer.scribe.inspect(words)
            reader.scribe.snapshot(mine, 5, held=True)
            reader.scribe.recorder.note("unheld", holder="r", id=words.id)
        judged(stage.history(), bug, Invariant.HELD)


@WITH_AND_WITHOUT
def test_listener_in_writer_process_keeps_since_at_its_time(bug: bool) -> None:
    name = "claims_are_ignored" if bug else None
    with on(Stage.in_memory()) as stage, planted(name):
        writer = stage.enter("w", writer="a")
        words = writer.words()
        writer.scribe.append(words, [1, 30], 0, 100)
        with words.listen(5):
            writer.scribe.recorder.note("held", holder="l", id=words.id, since=5)
            words.allow_compaction(50).result()
            writer.client.compact()
            writer.scribe.inspect(words)
            writer.scribe.snapshot(words, 5, held=True)
            writer.scribe.recorder.note("unheld", holder="l", id=words.id)
        judged(stage.history(), bug, Invariant.HELD)


# Row 8.


def _on_disk(disk: Disk) -> Stage:
    return Stage(lambda clock: FileBlob("/lake", disk=disk, clock=clock))


def _written(stage: Stage, then: Callable[[], None]) -> None:
    """Append small and large batches; `then` arms the disk after the location is open."""
    writer = stage.enter("w", writer="a", inline_bytes=1 << 10)
    words = writer.words()
    then()
    with suppress(PenstockError):
        for number in range(4):
            writer.scribe.append(words, [number], number, number + 1, wide=100 * (number % 2))


def _after_cut(stage: Stage, disk: PowerCutDisk, rng: random.Random) -> list[Event]:
    stage.close()
    survivor = disk.after_power_cut(rng)
    stage.store = lambda clock: FileBlob("/lake", disk=survivor, clock=clock)
    stage.recorders[0].note("power_cut")
    return stage.history()


@WITH_AND_WITHOUT
def test_append_after_power_cut_leaves_no_partial_linked_entry(bug: bool) -> None:
    found = []
    for step in range(45):
        disk = PowerCutDisk()
        stage = _on_disk(CarelessDisk(disk, PlantedBug.LINK_BEFORE_SYNC) if bug else disk)
        with on(stage):
            _written(stage, lambda: setattr(disk, "_cut_before", len(disk.steps) + step))  # noqa: B023
            found += violations(_after_cut(stage, disk, random.Random(step)))
    assert bool(found) == bug, "\n".join(map(str, found))


@WITH_AND_WITHOUT
def test_append_after_failed_sync_does_not_trust_a_second_sync(bug: bool) -> None:
    found = []
    for sync in range(15):
        disk = PowerCutDisk()
        stage = _on_disk(CarelessDisk(disk, PlantedBug.RETRY_SYNC) if bug else disk)
        with on(stage):
            _written(stage, lambda: setattr(disk, "_failing_syncs", {disk._syncs + sync}))  # noqa: B023
            found += violations(_after_cut(stage, disk, random.Random(sync)))
    assert bool(found) == bug, "\n".join(map(str, found))


class WatchedDisk:
    """`Disk` that calls `before_sync` before a folder is synced."""

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
def test_reader_settles_entry_before_use_and_survives_power_cut(bug: bool) -> None:
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
                reader.scribe.inspect(mine)  # noqa: B023
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
