"""Ingest loop of every source kind: one log entry per tick, complete or absent."""

import contextlib
import itertools
import json
import random
import threading

import pytest

from penstock import persist
from penstock.errors import DefiniteError, Fenced, InternalError, TransientError, UsageError
from penstock.failpoints import Action, Failpoint, armed
from penstock.ingest.loop import IngestLoop
from penstock.ingest.progress_views import find_progress_view, progress_views_in
from penstock.persist.requests import Request, answer, send_request
from penstock.persist.store import open_store
from penstock.progress import Frontier
from penstock.sources.source import ComparisonFailed
from penstock.supervisor import Task, run_loop
from penstock.supervisor.request_queue import RequestQueue
from penstock.testing.clocks import ManualClock
from penstock.testing.sources import ScriptedSource
from tests.ingest.pump import until

START = 1_700_000_000_000
FIRST = START
"""First tick of a loop without an earlier binding."""
PARTITIONS = {
    "kafka": (0, 1),
    "kafka-topics": ("a-0", "b-0"),
    "kinesis": ("s-0", "s-1"),
    "postgres": ((),),
    "pubnub": (1, 2),
    "s3": ("a", "b"),
}


class Run:
    """Loop that a test runs one tick at a time."""

    def __init__(self, url: str, source: ScriptedSource, clock: ManualClock, **more) -> None:
        self.clock = clock
        self.client = persist.open(url, writer="test", settings=persist.Settings(background=False))
        self.source = source
        self.ingest = IngestLoop(
            "src",
            source,
            self.client,
            tick_ms=1_000,
            retain_ms=3_600_000,
            clock=clock,
            **more,
        )
        task = Task("src", "source", url, "test", lambda _: self.ingest, lambda *_: None)
        self.requests = RequestQueue(task, stop=threading.Event(), clock=clock)
        self.ingest.use_requests(self.requests)

    def run(self, stop: threading.Event) -> None:
        """Run until `stop` is set, and resume after transient errors."""
        run_loop(self.ingest, stop, once=False, clock=self.clock, name="src")

    def ticks(self, count: int) -> None:
        """Poll the requests, then run `count` ticks, with any number of reconnects."""
        self.requests.poll()
        stop = threading.Event()
        seen = len(self.source.confirmed)
        real = self.source.committed

        def committed(frontier) -> None:
            real(frontier)
            if len(self.source.confirmed) - seen >= count:
                stop.set()

        self.source.committed = committed
        try:
            self.run(stop)
        finally:
            self.source.committed = real


@pytest.fixture
def beats(monkeypatch):
    """Make heartbeats frequent with a clock that advances while a tick waits."""
    monkeypatch.setattr("penstock.ingest.loop.VERIFY_MS", 20)

    def run_on(clock: ManualClock) -> None:
        boot_ms, later = clock.boot_ms, itertools.count(0, 1_000)
        clock.boot_ms = lambda: boot_ms() + next(later)

    return run_on


def test_long_tick_sends_heartbeats_and_reports_wait(turn, beats):
    source = ScriptedSource("kafka")
    source.waiting = "godot"
    run = turn(source)
    read_into, told = source.read_into, []

    def slow(tick, up_to):
        source.proofs = 0
        until(lambda: source.proofs > 1, "proofs")
        told.append(run.ingest.status().waits_for)
        return read_into(tick, up_to)

    source.read_into = slow
    beats(run.clock)
    run.ticks(2)
    assert told == ["godot", "godot"]


def test_long_open_sends_heartbeats_and_reports_opening(turn, beats):
    source = ScriptedSource("kafka")
    source.append(0, "one")
    run = turn(source)
    beats(run.clock)
    opens, told = source.open, []

    def slow(*given):
        source.waiting = "godot"
        until(lambda: source.proofs > 1, "proofs")
        told.append(run.ingest.status())
        source.waiting = ""
        opens(*given)

    source.open = slow
    run.ticks(1)
    assert [(status.phase, status.waits_for) for status in told] == [("opening", "godot")]
    assert told[0].kind == "kafka"
    assert run.ingest.status().phase == "following"
    assert 0 < (run.ingest.status().counted_since_ms or 0) <= run.clock.now_ms()


@pytest.mark.parametrize("step", ["open", "read_into"])
def test_stop_while_source_waits_cancels_the_wait(turn, beats, caplog, step):
    source = ScriptedSource("kafka")
    source.append(0, "one")
    run = turn(source)
    beats(run.clock)
    stop = threading.Event()

    def waits(*_):
        source.waiting = "godot"
        until(lambda: run.ingest.status().waits_for == "godot", "status")
        stop.set()
        assert source.stop.wait(10)
        raise TransientError("given up")

    setattr(source, step, waits)
    run.run(stop)
    assert "retrying" not in caplog.text
    assert run.ingest.status().waits_for == ""


def test_fenced_writer_cancels_wait_of_source(turn, beats, tmp_path):
    source = ScriptedSource("kafka")
    run = turn(source)
    beats(run.clock)

    def waits(*_):
        assert source.stop.wait(10)
        raise TransientError("given up")

    source.open = waits
    with (
        persist.open(f"file:{tmp_path}/lake/src", writer="test"),
        pytest.raises(Fenced),
    ):
        run.run(threading.Event())


def test_heartbeat_does_not_overwrite_newer_status_of_tick(turn, beats, monkeypatch):
    monkeypatch.setattr("penstock.ingest.loop.STATUS_EVERY_MS", 0)
    source = ScriptedSource("kafka")
    source.append(0, "one")
    run = turn(source)
    beats(run.clock)
    read_into, commit = source.read_into, source.committed
    beating, durable, told = threading.Event(), threading.Event(), []

    def waits_for():
        beating.set()
        durable.wait(0.5)  # The tick commits now if the lock permits it.
        return ""

    def slow(*given):
        assert beating.wait(10)
        return read_into(*given)

    def committed(frontier):
        durable.set()
        until(lambda: source.proofs, "the beat")
        told.append(run.ingest.status().rows)
        commit(frontier)

    source.waits_for, source.read_into, source.committed = waits_for, slow, committed
    run.ticks(1)
    assert told == [1]


def test_failed_heartbeat_is_logged_and_heartbeats_continue(turn, beats, caplog):
    source = ScriptedSource("kafka")
    source.append(0, "one")
    run = turn(source)
    beats(run.clock)
    opens, asked = source.open, []

    def waits_for():
        asked.append(1)
        if len(asked) == 1:
            raise RuntimeError("planted")
        return ""

    def slow(*given):
        until(lambda: source.proofs > 0, "proofs")
        opens(*given)

    source.waits_for, source.open = waits_for, slow
    run.ticks(1)
    assert "lock verification failed" in caplog.text
    assert "planted" in caplog.text


def test_heartbeat_is_due_after_fifteen_seconds_between_ticks_and_after_two_in_a_tick(turn):
    source = ScriptedSource("kafka")
    source.append(0, "one")
    run = turn(source)
    probe, counted = source.probe, []
    moves_ms = [(14_999, 1), (1_999, 1)]
    """Clock moves at the probe before the first tick, and at the probe in it."""

    def probing():
        for move_ms in moves_ms.pop(0):
            run.clock.move_ms(move_ms)
            run.ingest._verify_lock()
            counted.append(source.proofs)
        return probe()

    source.probe = probing
    run.ticks(1)
    assert counted == [0, 1, 1, 2]


@pytest.mark.parametrize("step", ["open", "read_into"])
def test_heartbeat_while_source_is_not_open_sends_nothing(turn, step):
    source = ScriptedSource("kafka")
    source.append(0, "one")
    run = turn(source)
    beat, closes, proofs = run.ingest._verify_lock, source.close, []

    def close() -> None:
        run.clock.wait(threading.Event(), 60_000)
        beat()
        proofs.append(source.proofs)
        closes()

    source.close = close
    source.fail(step)
    run.ticks(1)
    assert proofs == [0, 0], "after the failure, and at the end"


@pytest.fixture
def turn(tmp_path):
    """Yield a function that opens a run over one location and closes the previous one."""
    made: list[Run] = []

    def make(source: ScriptedSource, clock: ManualClock | None = None, **more) -> Run:
        for run in made:
            run.client.close()
        made.clear()
        run = Run(f"file:{tmp_path}/lake/src", source, clock or ManualClock(START + 500), **more)
        made.append(run)
        return run

    yield make
    for run in made:
        with contextlib.suppress(Fenced):
            run.client.close()


def words(run: Run, as_of: int | None = None) -> list[str]:
    collection = run.client.collection("words")
    time = collection.upper - 1 if as_of is None else as_of
    return sorted(update.data["word"] for update in collection.snapshot(time))


@pytest.mark.parametrize("kind", PARTITIONS)
def test_rows_of_every_source_kind_are_written_once_and_bound(turn, kind):
    source = ScriptedSource(kind)
    first = PARTITIONS[kind][0]
    source.append(first, "one", "two")
    run = turn(source)
    run.ticks(1)
    for partition in PARTITIONS[kind]:
        source.append(partition, f"three of {partition}")
    run = turn(source, ManualClock(run.clock.now_ms() + 1_000))
    run.ticks(2)
    assert words(run) == sorted(["one", "two", *(f"three of {p}" for p in PARTITIONS[kind])])
    progress, remap = progress_views_in(run.client)
    assert (progress.name, remap.name) == ("src_progress", "src_remap")
    upper = run.client.collection("words").upper
    shown = progress.as_of(upper - 1).to_pylist()
    assert sorted(int(list(row.values())[-1]) for row in shown) == sorted(
        [3] + [1] * (len(PARTITIONS[kind]) - 1)
    )
    assert source.opened[1] == Frontier({first: 2}), "the source does not resume at its binding"


def test_first_binding_sets_since_of_collection(turn):
    source = ScriptedSource("kafka")
    source.append(0, "one")
    run = turn(source)
    run.ticks(1)
    collection = run.client.collection("words")
    assert collection.since == FIRST
    assert collection.upper == FIRST + 1
    with pytest.raises(persist.SinceError) as caught:
        collection.snapshot(FIRST - 1)
    assert str(FIRST) in caught.value.detail


def test_empty_tick_advances_upper_and_writes_no_rows(turn):
    source = ScriptedSource("kafka")
    source.append(0, "one")
    run = turn(source)
    run.ticks(3)
    assert run.client.collection("words").upper == FIRST + 2_001
    progress, remap = progress_views_in(run.client)
    assert progress.changes(progress.remap.since + 1, FIRST + 2_001).num_rows == 1
    assert remap.remap.upper == FIRST + 2_001


@pytest.mark.parametrize("step", ["open", "probe", "read_into", "committed"])
def test_transient_error_is_retried_without_duplicate_rows(turn, step):
    source = ScriptedSource("kafka")
    source.append(0, "one", "two")
    run = turn(source)
    source.fail(step)
    source.fail(step)
    run.ticks(2)
    assert words(run) == ["one", "two"]


@pytest.mark.parametrize("point", [Failpoint.TICK_BEGIN, Failpoint.TICK_DONE])
def test_failed_tick_is_complete_or_absent_after_restart(turn, point):
    source = ScriptedSource("kafka")
    source.append(0, "one")
    run = turn(source)
    run.ticks(1)
    source.append(0, "two")
    with armed(point, Action.ERROR), pytest.raises(Exception, match=r"failpoint .* fired"):
        run.ticks(1)
    run = turn(source, ManualClock(run.clock.now_ms() + 1_000))
    run.ticks(1)
    assert words(run) == ["one", "two"]
    assert source.opened[-1] == Frontier({0: 2 if point == Failpoint.TICK_DONE else 1})


def test_definite_error_stops_loop_and_is_reported_in_status(turn):
    source = ScriptedSource("kafka")
    source.append(0, "one")
    run = turn(source)
    source.fail("read_into", DefiniteError("topic was deleted", hint="Drop it."))
    with pytest.raises(DefiniteError, match="topic was deleted"):
        run.ticks(1)
    told = run.ingest.status().to_json()
    assert told["phase"] == "stopped"
    assert told["error"] == {"message": "topic was deleted", "detail": "", "hint": "Drop it."}
    run.ticks(1)
    assert run.ingest.status().phase != "stopped"
    assert not run.ingest.status().error


def test_source_with_decreasing_offset_raises_internal_error(turn):
    source = ScriptedSource("kafka")
    source.append(0, "one", "two")
    run = turn(source)
    run.ticks(1)
    source.forget(0, 1)
    with pytest.raises(InternalError, match="moved back from 2 to 1"):
        run.ticks(1)


def test_fenced_writer_raises_fenced_at_next_tick(turn, tmp_path):
    source = ScriptedSource("kafka")
    source.append(0, "one")
    run = turn(source)
    run.ticks(1)
    with persist.open(f"file:{tmp_path}/lake/src", writer="test"):
        source.append(0, "two")
        with pytest.raises(Fenced):
            run.ticks(1)


def test_loop_with_clock_far_ahead_waits_for_upstream_time(turn, caplog):
    source = ScriptedSource("kafka")
    source.append(0, "one")
    run = turn(source)
    run.ticks(1)
    year = 365 * 24 * 3_600_000
    source.now_ms = FIRST + 2_000
    clock = ManualClock(START + 10 * year)
    run = turn(source, clock)
    stop = threading.Event()
    waited = []
    real = clock.wait

    def wait(event, timeout_ms):
        waited.append(timeout_ms)
        if len(waited) > 5:
            stop.set()
        return real(event, timeout_ms)

    clock.wait = wait
    run.ingest.run(stop)
    assert run.client.collection("words").upper == FIRST + 1, "the timeline did not jump"
    assert "clock far ahead" in caplog.text
    # The clock is corrected; the wrong clock has produced no stored time.
    source.now_ms = FIRST + 10_000
    source.append(0, "two")
    run = turn(source, ManualClock(FIRST + 10_000))
    run.ticks(1)
    assert words(run) == ["one", "two"]
    assert run.client.collection("words").upper == FIRST + 10_001


def test_tick_times_after_error_before_first_binding_do_not_decrease(turn):
    source = ScriptedSource("kafka")
    source.append(0, "one")
    read_into = source.read_into
    source.read_into = lambda tick, up_to: tick.fail("words", DefiniteError("it is odd"))
    turn(source).ticks(1)

    def recovering(tick, up_to):
        tick.recover("words")
        return read_into(tick, up_to)

    source.read_into = recovering
    run = turn(source, ManualClock(START - 30_000))
    run.ticks(1)
    assert words(run) == ["one"]
    assert run.client.collection("words").upper == FIRST + 1


def test_resync_request_is_executed_and_answered(turn, tmp_path):
    source = ScriptedSource("kafka")
    source.append(0, "one")
    run = turn(source)
    answers = []

    def request() -> None:
        blob = open_store(f"file:{tmp_path}/lake/src", persist.Settings())
        answers.append(
            send_request(
                blob,
                "resync",
                ["words"],
                clock=persist.Settings().clock,
                rng=random.Random(2),
                patience_ms=60_000,
            )
        )
        blob.close()

    thread = threading.Thread(target=request)
    thread.start()
    while thread.is_alive():
        run.ticks(1)
        thread.join(0.05)
        run = turn(source, ManualClock(run.clock.now_ms() + 2_000))
    assert answers == [{"done": True, "left": {}, "mended": 0}]
    assert source.asked == [("words",)]


class TableSource(ScriptedSource):
    """Source whose status has tables, and whose next tick marks one of them errored."""

    def __init__(self, **tables: str) -> None:
        super().__init__("kafka")
        self.tables = {
            name: {"name": name, "collection": "words", "phase": phase, "error": None}
            for name, phase in tables.items()
        }
        self.failure: DefiniteError | None = None

    def read_into(self, tick, up_to):
        reached = super().read_into(tick, up_to)
        if self.failure is not None:
            tick.fail("words", self.failure)
            self.mark_errored(str(self.failure))
            self.failure = None
        return reached

    def mark_errored(self, error: str) -> None:
        self.tables["words"] |= {"phase": "errored", "error": error}

    def status(self):
        return {**super().status(), "tables": [*self.tables.values()]}


@pytest.fixture
def resync(turn, tmp_path):
    """Return a function that requests a resync, runs ticks and returns the answer or None."""

    def request(source, *, ticks=1, tables=("words",)):
        source.append(0, "one")
        run = turn(source)
        blob = open_store(f"file:{tmp_path}/lake/src", persist.Settings())
        id = f"{run.clock.now_ms():013d}-0000002a"
        blob.put(f"asks/{id}", json.dumps({"verb": "resync", "tables": [*tables]}).encode())
        run.ticks(ticks)
        found = blob.get(f"answers/{id}")
        pending = [each.key for each in blob.list("asks/")]
        assert pending == ([f"asks/{id}"] if found is None else [])
        blob.close()
        return None if found is None else json.loads(found)

    return request


def test_resync_of_table_that_stays_errored_is_answered_with_its_error(resync):
    source = TableSource(words="live", numbers="live")
    source.mark_errored("column was dropped")
    answered = {"done": True, "left": {"words": "column was dropped"}, "mended": 0}
    assert resync(source) == answered
    assert source.asked == [("words",)]


@pytest.mark.parametrize("tables", [("words",), ()])
def test_resync_of_table_that_becomes_errored_in_same_tick_is_postponed(resync, tables):
    source = TableSource(words="live", numbers="live")
    source.failure = DefiniteError("column was dropped")
    assert resync(source, tables=tables) is None
    assert source.asked == [tables]


def test_resync_postponed_by_errored_table_is_answered_by_next_tick(resync):
    source = TableSource(words="live")
    source.failure = DefiniteError("column was dropped")
    answered = {"done": True, "left": {"words": "column was dropped"}, "mended": 0}
    assert resync(source, ticks=2) == answered
    assert source.asked == [("words",), ("words",)]


def test_resync_of_failed_tick_is_executed_by_next_tick(resync, monkeypatch):
    source = TableSource(words="live")
    read_into, errors = source.read_into, [TransientError("connection was closed")]

    def fail_once(tick, up_to):
        if errors:
            raise errors.pop()
        return read_into(tick, up_to)

    monkeypatch.setattr(source, "read_into", fail_once)
    assert resync(source) == {"done": True, "left": {}, "mended": 0}
    assert source.asked == [("words",), ("words",)]


def test_withdrawn_resync_is_not_executed(turn, tmp_path):
    source = ScriptedSource("kafka")
    source.append(0, "one")
    run = turn(source)
    blob = open_store(f"file:{tmp_path}/lake/src", persist.Settings())
    key = f"asks/{run.clock.now_ms():013d}-0000002a"
    blob.put(key, b'{"verb": "resync"}')
    run.requests.poll()
    assert len(run.requests.loop_requests()) == 1
    blob.delete(key)
    assert run.requests.loop_requests() == []
    run.ticks(1)
    assert source.asked == []
    blob.close()


def test_resync_with_failed_comparison_is_answered_in_same_tick(resync):
    source = TableSource(words="live")
    source.failure = ComparisonFailed("table was altered during each attempt")
    answered = {
        "done": True,
        "left": {"words": "table was altered during each attempt"},
        "mended": 0,
    }
    assert resync(source) == answered


def test_resync_of_table_with_incomplete_snapshot_is_answered_with_reason(resync):
    told = resync(TableSource(words="loading", numbers="loading"))
    assert [*told["left"]] == ["words"]
    assert "its initial snapshot is in progress" in told["left"]["words"]


def test_resync_of_all_tables_is_answered_with_each_table_left(resync):
    source = TableSource(words="live", numbers="loading", letters="live")
    source.mark_errored("column was dropped")
    told = resync(source, tables=())
    assert [*told["left"]] == ["words", "numbers"]


def test_request_without_response_is_withdrawn(tmp_path):
    persist.open(f"file:{tmp_path}/src", writer="w").close()
    blob = open_store(f"file:{tmp_path}/src", persist.Settings())
    with pytest.raises(UsageError, match="did not respond"):
        send_request(
            blob, "resync", [], clock=ManualClock(), rng=random.Random(3), patience_ms=1_000
        )
    assert blob.list("asks/") == []
    answer(blob, Request("1700000000000-0000002a", "resync", ()))
    assert blob.list("answers/") == [], "nobody waits for it"
    blob.close()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b"{}",
        b'{"verb": 1, "tables": []}',
        b'{"verb": "resync", "tables": "public.orders"}',
        b'{"verb": "resync", "tables": [1]}',
        b'{"verb": "\xff", "tables": []}',
        b'{"tables": ' + b"[" * 100_000,
    ],
)
def test_malformed_request_is_answered_with_error_and_loop_continues(turn, tmp_path, caplog, data):
    source = ScriptedSource("kafka")
    source.append(0, "one")
    run = turn(source)
    blob = open_store(f"file:{tmp_path}/lake/src", persist.Settings())
    id = f"{run.clock.now_ms():013d}-0000002a"
    blob.put(f"asks/{id}", data)
    run.ticks(1)
    assert blob.list("asks/") == []
    told = blob.get(f"answers/{id}")
    assert told is not None
    assert json.loads(told)["error"] == f'request "{id}" is malformed'
    assert "malformed request removed" in caplog.text
    assert source.asked == []
    assert words(run) == ["one"]
    blob.close()


def test_progress_view_has_configured_name_or_first_free_one(turn, tmp_path):
    source = ScriptedSource("kafka")
    source.append(0, "one")
    run = turn(source, taken={"src_progress"})
    run.ticks(1)
    assert [each.name for each in progress_views_in(run.client)] == ["src_progress1", "src_remap"]
    run = turn(source, ManualClock(START + 60_000), progress="how_far", taken=set())
    run.ticks(1)
    found = find_progress_view(
        f"file:{tmp_path}/lake", "how_far", hold=False, settings=persist.Settings()
    )
    assert found is not None
    found[0].close()
