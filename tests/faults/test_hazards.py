"""Executions of the hazards, part A, that the tests of planted bugs do not cover.

A1  test_planted_bugs, test_sigstop, and below: readers and takeovers
A2  test_planted_bugs: sweeps
A3  test_planted_bugs: lost answers, late entries, and below: a lost takeover
A4  test_planted_bugs: a listener, and below: a snapshot
A5  test_planted_bugs: power cuts, a reader that settles
A6  test_planted_bugs: holds, and below: holds that are replaced or expired
A7  test_two_writers
A8  below
"""

import pytest

from penstock.durable.log import Log, entry_key
from penstock.errors import Corruption, Fenced, IndeterminateError, StoreRefused
from penstock.persist import AlreadyFailed, HoldLost
from penstock.persist.holds import list_holds
from tests.faults.stage import HOUR_MS, Actor, HookBlob, Stage, on, once
from tests.faults.validator import violations


def run_past(stage: Stage, *, compact: bool = False) -> Actor:
    """Start a successor that takes over, writes, rolls up and truncates the log to its head."""
    second = stage.enter("successor", writer="a")
    words = second.words()
    upper = words.upper
    for _ in range(4):
        second.scribe.append(words, [upper], upper, upper + 10, wide=20)
        upper += 10
        if compact:
            words.allow_compaction(upper - 1).result()
            second.client.compact()
        stage.clock.advance(HOUR_MS)
        second.roll_up()
    second.scribe.append(words, [upper], upper, upper + 10)
    second.truncate()
    return second


def judged(stage: Stage) -> None:
    found = violations(stage.history())
    assert not found, "\n".join(map(str, found))


# A1.


@pytest.mark.parametrize("asleep", ["before it looks", "while it looks"])
def test_stale_reader_ignores_void_entry_created_at_truncated_number(asleep: str) -> None:
    with on(Stage.in_memory()) as stage:
        first = stage.enter("w1", writer="a")
        words = first.words()
        first.scribe.append(words, [1], 0, 2)
        reader = stage.enter("r")
        mine = reader.client.collection("words")
        reader.scribe.inspect(mine)
        head = reader.client.state.seqno

        def sleep(_: bytes) -> None:
            """Pause both. The writer resumes first and creates a void entry before the reader."""
            successor = run_past(stage)
            assert Log(successor.blob).marks().floor > head
            assert first.scribe.append(words, [2], 2, 3) == "fenced"
            assert first.blob.get(entry_key(head)) is not None

        if asleep == "while it looks":
            reader.blob.before = once("get", "log/", sleep)
        else:
            sleep(b"")
        _, upper = reader.scribe.inspect(mine)
        assert upper == stage.actors[-1].words().upper
        reader.scribe.snapshot(mine, upper - 1)
        judged(stage)


def test_truncate_sweeps_void_entry_below_floor() -> None:
    with on(Stage.in_memory()) as stage:
        first = stage.enter("w1", writer="a")
        words = first.words()
        first.scribe.append(words, [1], 0, 2)
        successor = run_past(stage)
        first.scribe.append(words, [2], 2, 3)
        log = Log(successor.blob)
        assert log.entries()[0] < log.marks().floor
        stage.clock.advance(HOUR_MS)
        upper = successor.words().upper
        successor.scribe.append(successor.words(), [upper], upper, upper + 1)
        successor.roll_up()
        successor.truncate()
        assert log.entries()[0] >= log.marks().floor
        judged(stage)


# A3.


def test_takeover_with_late_answer_is_fenced_by_its_successors() -> None:
    """Successors follow the unacknowledged epoch and truncate the log. This writer is fenced."""
    with on(Stage.in_memory()) as stage:
        stage.enter("w0", writer="a").words()
        successors: list[Actor] = []

        class Slow(HookBlob):
            def create(self, key: str, data: bytes) -> bool:
                created = super().create(key, data)
                if key.startswith("log/") and not successors:
                    successors.append(run_past(stage))
                    raise IndeterminateError("the response was hours late")
                return created

        late = stage.enter("w1", writer="a", inner=Slow(stage.store(stage.clock)))
        successor = successors[0]
        assert late.client.epoch != successor.client.epoch
        words = late.words()
        assert late.scribe.append(words, [words.upper], words.upper, words.upper + 1) == "fenced"
        upper = successor.words().upper
        assert successor.scribe.append(successor.words(), [upper], upper, upper + 1) == (
            "acknowledged"
        )
        judged(stage)


# A4.


@pytest.mark.parametrize("hold", [True, False])
def test_snapshot_by_reader_paused_across_truncation_reads_current_upper(hold: bool) -> None:
    with on(Stage.in_memory(inline_bytes=0)) as stage:
        first = stage.enter("w1", writer="a")
        first.scribe.append(first.words(), [1], 0, 2)
        reader = stage.enter("r", hold=hold)
        mine = reader.client.collection("words")
        assert reader.scribe.snapshot(mine, 1) is not None
        successor = run_past(stage, compact=True)
        upper = successor.words().upper
        assert mine.upper == upper
        assert reader.scribe.snapshot(mine, upper - 1) is not None
        judged(stage)


def test_snapshot_by_fenced_writer_reports_no_damage_for_collected_files() -> None:
    with on(Stage.in_memory(inline_bytes=0, cache_bytes=0)) as stage:
        first = stage.enter("w1", writer="a")
        words = first.words()
        first.scribe.append(words, [1], 0, 2, wide=100)
        run_past(stage, compact=True)
        assert first.scribe.snapshot(words, 1) is None
        judged(stage)


def test_compact_by_fenced_writer_with_collected_files_raises_fenced() -> None:
    with on(Stage.in_memory(inline_bytes=0, cache_bytes=0)) as stage:
        first = stage.enter("w1", writer="a")
        words = first.words()
        first.scribe.append(words, [1], 0, 2, wide=100)
        first.scribe.append(words, [2], 2, 3, wide=100)
        run_past(stage, compact=True)
        assert first.scribe.control("compact", first.client.compact) == "fenced"
        judged(stage)


def test_difference_by_fenced_writer_with_collected_files_raises_fenced() -> None:
    with on(Stage.in_memory(inline_bytes=0, cache_bytes=0)) as stage:
        first = stage.enter("w1", writer="a")
        words = first.words()
        first.scribe.append(words, [1], 0, 2, wide=100)
        run_past(stage, compact=True)
        with pytest.raises(Fenced):
            first.client.difference(words, None, "", time=2)
        judged(stage)


def test_compact_by_current_writer_with_missing_file_raises_corruption() -> None:
    with on(Stage.in_memory(inline_bytes=0, cache_bytes=0)) as stage:
        first = stage.enter("w1", writer="a")
        first.scribe.append(first.words(), [1], 0, 2, wide=100)
        for listed in first.blob.list("batch/"):
            first.blob.delete(listed.key)
        with pytest.raises(Corruption):
            first.client.compact()


# A6.


def test_list_holds_finds_hold_that_moves_during_the_listing() -> None:
    with on(Stage.in_memory()) as stage:
        writer = stage.enter("w", writer="a")
        words = writer.words()
        writer.scribe.append(words, [1], 0, 100)
        holder = stage.enter("h")
        hold = holder.client.hold("owner")
        hold.move({"words": 5})
        blob = HookBlob(stage.store(stage.clock))
        moves = iter(range(6, 12))

        def moved(verb: str, key: str, _: bytes) -> bool:
            """Replace the hold just before each read of it."""
            since = next(moves, None) if verb == "get" and key.startswith("hold/") else None
            if since is not None:
                hold.move({"words": since})
            return False

        blob.before = moved
        (_, found) = list_holds(blob)["d-owner"]
        assert found.sinces[words.id] <= hold.sinces()["words"]


def test_snapshot_under_expired_lease_raises_hold_lost() -> None:
    with on(Stage.in_memory()) as stage:
        writer = stage.enter("w", writer="a")
        words = writer.words()
        writer.scribe.append(words, [1, 30], 0, 100)
        reader = stage.enter("r")
        mine = reader.client.collection("words")
        assert reader.scribe.snapshot(mine, 5) is not None
        words.allow_compaction(3).result()
        stage.clock.advance(HOUR_MS)
        outcome: list[BaseException | None] = []

        def claim(_: bytes) -> None:
            try:
                reader.scribe.snapshot(mine, 5)
                outcome.append(None)
            except HoldLost as error:
                outcome.append(error)

        # The writer has seen the hold unchanged for its whole lease and records the expiry in
        # the log. At that time the reader resumes and tries to continue under the same hold.
        expiry = once("create", "log/", claim)
        writer.blob.after = once("create", "log/", lambda _: setattr(writer.blob, "after", expiry))
        words.allow_compaction(50).result()
        assert words.since == 50
        assert isinstance(outcome[0], HoldLost)
        judged(stage)


# A8.


def test_unsealed_updates_of_predecessor_are_reported_and_discarded() -> None:
    with on(Stage.in_memory()) as stage:
        first = stage.enter("w1", writer="a")
        words = first.words()
        first.scribe.append(words, [1], 0, 10)
        words.write([(("left", None), 15, 1)]).result()
        first.cut_off()
        second = stage.enter("w2", writer="a")
        (left,) = second.client.unsealed()
        assert (left.collection, left.updates, left.lower, left.upper) == ("words", 1, 15, 16)
        second.client.discard_unsealed()
        assert not second.client.unsealed()
        second.scribe.write(second.words(), [15])
        second.scribe.seal(second.words(), 20)
        second.scribe.snapshot(second.words(), 19)
        judged(stage)


def test_seal_queued_behind_failed_write_fails_and_keeps_upper() -> None:
    with on(Stage.in_memory()) as stage:
        writer = stage.enter("w", writer="a")
        words = writer.words()
        writer.scribe.append(words, [1], 0, 10)
        # Both are queued while the previous entry is in flight.
        queued = []

        def queue(_: bytes) -> None:
            queued.append(words.write([(("too late", None), 5, 1)]))
            queued.append(words.seal(20))

        writer.blob.before = once("create", "log/", queue)
        writer.scribe.write(words, [12])
        write, seal = queued
        assert write.exception() is not None
        assert isinstance(seal.exception(), AlreadyFailed)
        assert words.upper == 10
        judged(stage)


def test_fenced_writer_raises_fenced_on_every_further_call() -> None:
    with on(Stage.in_memory()) as stage:
        first = stage.enter("w1", writer="a")
        words = first.words()
        stage.enter("w2", writer="a")
        for _ in range(3):
            with pytest.raises(Fenced):
                words.compare_and_append([], 0, 1)
        with pytest.raises(Fenced):
            first.client.close()


@pytest.mark.parametrize("prefix", ["mark/", "rollup/"])
def test_append_with_failed_read_after_log_create_is_indeterminate(prefix: str) -> None:
    """The writer paused too long to trust its create, and then cannot read the floor."""
    with on(Stage.in_memory()) as stage:
        first = stage.enter("w1", writer="a")
        words = first.words()
        first.scribe.append(words, [1], 0, 2)
        if prefix == "rollup/":
            run_past(stage)
        stage.clock.advance(HOUR_MS)

        def refuse(_: bytes) -> None:
            raise StoreRefused("may not list any more")

        first.blob.after = once(
            "create",
            "log/",
            lambda _: setattr(first.blob, "before", once("list", prefix, refuse)),
        )
        assert first.scribe.append(words, [2], 2, 3) == "doubt"
        judged(stage)
