"""Tasks that are kept running: what fails alone, what waits for a person, what ends all."""

import random
import threading
from dataclasses import dataclass, field

import pytest

from penstock import persist
from penstock.clock import SYSTEM_CLOCK
from penstock.errors import DefiniteError, Fenced, TransientError, UsageError
from penstock.persist.lake import open_store
from penstock.persist.memory import PAUSED, Memory
from penstock.persist.requests import ask, forget_old_answers
from penstock.pipeline.running import Running, Task


@dataclass
class Scripted:
    """A loop that raises what it is told to, one at a time, and then runs until it is stopped."""

    errors: list = field(default_factory=list)
    starts: int = 0
    runs: threading.Event = field(default_factory=threading.Event)

    def run(self, stop, *, once):
        self.starts += 1
        if self.errors:
            raise self.errors.pop(0)
        self.runs.set()
        if not once:
            stop.wait()
        self.runs.clear()

    def status(self):
        return {"rows": self.starts}


class Tasks:
    """Tasks in a lake of their own, run in a thread."""

    def __init__(self, folder):
        self.lake = f"file:{folder}/lake"
        self.loops: dict[str, Scripted] = {}
        self.tasks: list[Task] = []
        self.dropped: list[str] = []
        self.stop = threading.Event()
        self.error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def add(self, name, *errors, kind="source", writer="w"):
        loop = self.loops[name] = Scripted([*errors])
        url = f"{self.lake}/{name}"

        def drop(client, keep_target):
            self.dropped.append(f"{name} {keep_target}")

        self.tasks.append(Task(name, kind, url, writer, lambda _: loop, drop))
        return loop

    def start(self, *, restarts=True, once=False):
        self.running = Running(self.tasks, self.stop, restarts=restarts)

        def run():
            try:
                self.running.run(once=once)
            except BaseException as error:  # noqa: BLE001 - looked at by the test
                self.error = error

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def end(self):
        self.stop.set()
        self.wait()

    def wait(self):
        self._thread.join(60)
        assert not self._thread.is_alive()

    def ask(self, name, verb, **options):
        blob = open_store(f"{self.lake}/{name}", persist.Settings())
        try:
            return ask(
                blob,
                verb,
                clock=SYSTEM_CLOCK,
                chance=random.Random(),
                patience_ms=30_000,
                **options,
            )
        finally:
            blob.close()

    def await_state(self, name, state):
        for _ in range(3_000):
            if self.running.status()[name]["state"] == state:
                return
            SYSTEM_CLOCK.wait(threading.Event(), 10)
        raise AssertionError(self.running.status()[name])


@pytest.fixture
def tasks(tmp_path):
    made = Tasks(tmp_path)
    yield made
    made.stop.set()
    if made._thread is not None:
        made._thread.join(60)


def test_what_is_of_the_moment_is_tried_again(tasks):
    loop = tasks.add("a", TransientError("away"), RuntimeError("a mistake of ours"))
    tasks.start()
    assert loop.runs.wait(60)
    assert loop.starts == 3
    assert tasks.running.status()["a"]["restarts"] == 2
    tasks.end()
    assert tasks.error is None


def test_a_failed_task_leaves_the_others_running(tasks):
    tasks.add("a", DefiniteError("no such column", hint="Add it."))
    other = tasks.add("b")
    tasks.start()
    tasks.await_state("a", "stopped")
    assert other.runs.wait(60)
    assert tasks.running.status()["a"]["error"] == {
        "message": "no such column",
        "detail": "",
        "hint": "Add it.",
    }
    assert tasks.ask("a", "resume") == {"done": True, "left": {}}
    assert tasks.loops["a"].runs.wait(60)
    assert tasks.running.status()["a"]["error"] is None
    tasks.end()
    assert tasks.error is None


def test_when_nothing_runs_any_more_it_ends_with_the_error(tasks):
    tasks.add("a", DefiniteError("first"))
    tasks.add("b", UsageError("second"))
    tasks.start()
    tasks.wait()
    assert str(tasks.error) in ("first", "second")


def test_a_writer_that_was_fenced_ends_everything(tasks):
    tasks.add("a", Fenced("a newer one is there"))
    tasks.add("b")
    tasks.start()
    tasks.wait()
    assert isinstance(tasks.error, Fenced)
    assert tasks.loops["a"].starts == 1


def test_without_restarts_a_mistake_of_ours_ends_everything(tasks):
    tasks.add("a", RuntimeError("a mistake"))
    tasks.add("b")
    tasks.start(restarts=False)
    tasks.wait()
    assert isinstance(tasks.error, RuntimeError)


def test_a_lock_that_another_holds_stops_that_task_alone(tasks):
    with persist.open(f"{tasks.lake}/a", writer="somebody else"):
        tasks.add("a")
        other = tasks.add("b")
        tasks.start()
        tasks.await_state("a", "stopped")
        assert other.runs.wait(60)
        assert "somebody else" in str(tasks.running.status()["a"]["error"])
        tasks.end()
    assert tasks.error is not None


def test_once_brings_sources_to_their_end_before_what_takes_from_them(tasks):
    order = []
    for name, kind in (("m", "materialization"), ("s", "source")):
        loop = tasks.add(name, kind=kind)
        loop.run = lambda stop, *, once, name=name: order.append(name)
    tasks.start(once=True)
    tasks.wait()
    assert (tasks.error, order) == (None, ["s", "m"])


def test_once_with_a_failed_source_materializes_nothing(tasks):
    tasks.add("s", TransientError("away"))
    later = tasks.add("m", kind="materialization")
    tasks.start(once=True, restarts=False)
    tasks.wait()
    assert isinstance(tasks.error, TransientError)
    assert later.starts == 0


def test_a_paused_task_rests_also_when_all_is_started_again(tasks):
    loop = tasks.add("a")
    tasks.start()
    assert loop.runs.wait(60)
    assert tasks.ask("a", "pause")["done"]
    tasks.await_state("a", PAUSED)
    tasks.end()
    with persist.open(f"{tasks.lake}/a", hold=False) as client:
        assert Memory(client, "a").recall(PAUSED)
    starts = loop.starts
    tasks.stop.clear()
    tasks.start()
    tasks.await_state("a", PAUSED)
    refused = tasks.ask("a", "resync")
    assert refused["error"] == 'source "a" cannot resync: it is paused'
    assert loop.starts == starts
    assert tasks.ask("a", "resume")["done"]
    assert loop.runs.wait(60)
    tasks.end()


def test_what_is_dropped_does_not_come_back(tasks):
    loop = tasks.add("a")
    other = tasks.add("b", kind="materialization")
    tasks.start()
    assert loop.runs.wait(60)
    assert other.runs.wait(60)
    assert tasks.ask("b", "drop", keep_target=True)["done"]
    assert tasks.dropped == ["b True"]
    tasks.await_state("b", "ended")
    assert loop.runs.is_set()
    tasks.end()


def test_what_cannot_be_done_is_answered_and_the_task_goes_on(tasks):
    loop = tasks.add("a")
    other = tasks.add("m", kind="materialization")
    tasks.start()
    assert loop.runs.wait(60)
    assert other.runs.wait(60)
    assert tasks.ask("a", "dance")["error"] == 'source "a" cannot dance'
    assert tasks.ask("m", "resync")["error"] == 'materialization "m" cannot resync'
    assert tasks.ask("a", "compact")["done"]
    assert loop.runs.wait(60)
    tasks.end()
    assert tasks.error is None


def test_a_drop_does_not_come_long_after_it_was_meant(tasks):
    loop = tasks.add("a")
    persist.open(f"{tasks.lake}/a", writer="w").close()
    blob = open_store(f"{tasks.lake}/a", persist.Settings())
    old = f"{SYSTEM_CLOCK.now_ms() - 7_200_000:013d}-0000002a"
    blob.put(f"asks/{old}", b'{"verb": "drop"}')
    tasks.start()
    assert loop.runs.wait(60)
    for _ in range(3_000):
        if blob.get(f"answers/{old}") is not None:
            break
        SYSTEM_CLOCK.wait(threading.Event(), 10)
    assert b"came too late" in blob.get(f"answers/{old}")
    tasks.end()
    blob.close()
    assert tasks.dropped == []


def test_answers_that_nobody_came_for_are_removed_once_they_are_old(tmp_path):
    url = f"file:{tmp_path}/src"
    persist.open(url, writer="w").close()
    blob = open_store(url, persist.Settings())
    now = SYSTEM_CLOCK.now_ms()
    fresh, old = (f"answers/{ms:013d}-0000002a" for ms in (now - 60_000, now - 3_660_000))
    for key in (fresh, old, "answers/whose"):
        blob.put(key, b"{}")
    forget_old_answers(blob, now_ms=now)
    assert [each.key for each in blob.list("answers/")] == [fresh]
    blob.close()
