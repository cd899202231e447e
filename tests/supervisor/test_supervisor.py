"""The supervisor: restarts, requests and errors that end one task or all."""

import json
import random
import threading
from dataclasses import dataclass, field

import pytest

from penstock import persist
from penstock.catalog.inspect import inspect_lake
from penstock.clock import SYSTEM_CLOCK, SystemClock
from penstock.errors import (
    DefiniteError,
    Fenced,
    IndeterminateError,
    TransientError,
    UsageError,
)
from penstock.persist.lock import owner_of
from penstock.persist.requests import forget_old_answers, send_request
from penstock.persist.state_store import PAUSED, StateStore
from penstock.persist.store import open_store
from penstock.supervisor import Supervisor, Task, request_queue, supervised_task
from penstock.supervisor.status import ErrorStatus, SourceStatus


@dataclass
class Scripted:
    """A loop that raises the given errors in turn, and then runs until it is stopped."""

    errors: list = field(default_factory=list)
    starts: int = 0
    runs: threading.Event = field(default_factory=threading.Event)
    tables: list = field(default_factory=list)
    is_resumable: bool = False
    commits = 0
    step = "run"

    def run(self, stop, *, once):
        self.starts += 1
        if self.errors:
            raise self.errors.pop(0)
        self.runs.set()
        if not once:
            stop.wait()
        self.runs.clear()

    def status(self):
        return SourceStatus.parse({"rows": self.starts, "tables": self.tables})


class Resyncing(Scripted):
    """A loop that responds to requests when it starts, and every 10 ms until it is stopped."""

    def use_requests(self, requests):
        self.requests = requests
        self.resynced: list[tuple[str, ...]] = []

    def run(self, stop, *, once):
        self.runs.set()
        while True:
            for request in self.requests.loop_requests():
                self.resynced.append(request.tables)
                self.requests.respond(request, left={"t": "loading"}, corrected_rows=3)
            if once or stop.wait(0.01):
                return


class Tasks:
    """Tasks in a separate lake, run in a thread."""

    def __init__(self, folder):
        self.lake = f"file:{folder}/lake"
        self.loops: dict[str, Scripted] = {}
        self.tasks: list[Task] = []
        self.dropped: list[str] = []
        self.drop_errors: list[Exception] = []
        self.catalog_errors: list[Exception] = []
        self.stop = threading.Event()
        self.error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def add(self, name, *errors, kind="source", writer="w", build_errors=(), form=Scripted):
        loop = self.loops[name] = form([*errors])
        build_errors = [*build_errors]
        url = f"{self.lake}/{name}"

        def drop(client, keep_target):
            if self.drop_errors:
                raise self.drop_errors.pop(0)
            self.dropped.append(f"{name} {keep_target}")

        def build(client):
            if build_errors:
                raise build_errors.pop(0)
            return loop

        self.tasks.append(Task(name, kind, url, writer, build, drop))
        return loop

    def _forget(self, task):
        if self.catalog_errors:
            raise self.catalog_errors.pop(0)

    def start(self, *, restarts=True, once=False, clock=SYSTEM_CLOCK):
        self.running = Supervisor(
            self.tasks, self.stop, restarts=restarts, clock=clock, dropped=self._forget
        )

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

    def request(self, name, verb, **options):
        blob = open_store(f"{self.lake}/{name}", persist.Settings())
        try:
            return send_request(
                blob,
                verb,
                clock=SYSTEM_CLOCK,
                rng=random.Random(),
                patience_ms=30_000,
                **options,
            )
        finally:
            blob.close()

    def leave_request(self, name, verb, *, until_ms=60_000):
        """Store a request without waiting for its answer, and return its id."""
        now = SYSTEM_CLOCK.now_ms()
        id = f"{now:013d}-{random.getrandbits(32):08x}"
        blob = open_store(f"{self.lake}/{name}", persist.Settings())
        blob.put(f"asks/{id}", f'{{"verb": "{verb}", "until_ms": {now + until_ms}}}'.encode())
        blob.close()
        return id

    def await_answer(self, name, id):
        blob = open_store(f"{self.lake}/{name}", persist.Settings())
        try:
            for _ in range(3_000):
                if (status := blob.get(f"answers/{id}")) is not None:
                    return json.loads(status)
                SYSTEM_CLOCK.wait(threading.Event(), 10)
        finally:
            blob.close()
        raise AssertionError(f"{id} is not answered")

    def await_state(self, name, state):
        for _ in range(3_000):
            if self.running.status()[name].state == state:
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


def test_store_error_restarts_task(tasks):
    loop = tasks.add("a", IndeterminateError("away"), RuntimeError("a mistake of ours"))
    tasks.start()
    assert loop.runs.wait(60)
    assert loop.starts == 3
    assert tasks.running.status()["a"].restarts == 2
    tasks.end()
    assert tasks.error is None


def test_transient_error_before_the_loop_is_built_restarts_task(tasks):
    loop = tasks.add("a", build_errors=[TransientError("away")])
    tasks.start()
    assert loop.runs.wait(60)
    assert loop.starts == 1
    assert tasks.running.status()["a"].restarts == 1
    tasks.end()
    assert tasks.error is None


@pytest.mark.parametrize("restarts", [True, False])
def test_transient_error_of_loop_resumes_it(tasks, restarts):
    loop = tasks.add("a", TransientError("away"), TransientError("still away"))
    tasks.start(restarts=restarts)
    assert loop.runs.wait(60)
    assert loop.starts == 3
    status = tasks.running.status()["a"]
    assert (status.state, status.restarts, status.error) == ("running", 0, None)
    tasks.end()
    assert tasks.error is None


def test_failed_task_leaves_others_running(tasks):
    tasks.add("a", DefiniteError("no such column", hint="Add it."))
    other = tasks.add("b")
    tasks.start()
    tasks.await_state("a", "stopped")
    assert other.runs.wait(60)
    assert tasks.running.status()["a"].error == ErrorStatus("no such column", hint="Add it.")
    assert tasks.request("a", "resume") == {"done": True, "left": {}}
    assert tasks.loops["a"].runs.wait(60)
    assert tasks.running.status()["a"].error is None
    tasks.end()
    assert tasks.error is None


def test_supervisor_ends_with_error_when_no_task_runs(tasks):
    tasks.add("a", DefiniteError("first"))
    tasks.add("b", UsageError("second"))
    tasks.start()
    tasks.wait()
    assert str(tasks.error) in ("first", "second")


def test_fenced_writer_ends_all_tasks(tasks):
    tasks.add("a", Fenced("a newer one is there"))
    tasks.add("b")
    tasks.start()
    tasks.wait()
    assert isinstance(tasks.error, Fenced)
    assert tasks.loops["a"].starts == 1


def test_unexpected_error_without_restarts_ends_all_tasks(tasks):
    tasks.add("a", RuntimeError("a mistake"))
    tasks.add("b")
    tasks.start(restarts=False)
    tasks.wait()
    assert isinstance(tasks.error, RuntimeError)


def test_held_lock_stops_only_its_task(tasks):
    with persist.open(f"{tasks.lake}/a", writer="somebody else"):
        tasks.add("a")
        other = tasks.add("b")
        tasks.start()
        tasks.await_state("a", "stopped")
        assert other.runs.wait(60)
        assert "somebody else" in str(tasks.running.status()["a"].error)
        tasks.end()
    assert tasks.error is not None


def test_once_runs_sources_before_materializations(tasks):
    order = []
    for name, kind in (("m", "materialization"), ("s", "source")):
        loop = tasks.add(name, kind=kind)
        loop.run = lambda stop, *, once, name=name: order.append(name)
    tasks.start(once=True)
    tasks.wait()
    assert (tasks.error, order) == (None, ["s", "m"])


def test_once_resumes_a_loop_whose_server_has_answered(tasks):
    loop = tasks.add("s", TransientError("away"))
    loop.is_resumable = True
    tasks.start(once=True, restarts=False)
    tasks.wait()
    assert (tasks.error, loop.starts) == (None, 2)


def test_once_with_a_failed_source_materializes_nothing(tasks):
    tasks.add("s", TransientError("away"))
    later = tasks.add("m", kind="materialization")
    tasks.start(once=True, restarts=False)
    tasks.wait()
    assert isinstance(tasks.error, TransientError)
    assert later.starts == 0


def test_paused_task_stays_paused_after_restart(tasks):
    loop = tasks.add("a")
    tasks.start()
    assert loop.runs.wait(60)
    assert tasks.request("a", "pause")["done"]
    tasks.await_state("a", PAUSED)
    tasks.end()
    with persist.open(f"{tasks.lake}/a", hold=False) as client:
        assert StateStore(client, "a").get(PAUSED)
    starts = loop.starts
    tasks.stop.clear()
    tasks.start()
    tasks.await_state("a", PAUSED)
    refused = tasks.request("a", "resync")
    assert refused["error"] == 'source "a" cannot resync: it is paused'
    assert loop.starts == starts
    assert tasks.request("a", "resume")["done"]
    assert loop.runs.wait(60)
    tasks.end()


def test_dropped_task_does_not_restart(tasks):
    loop = tasks.add("a")
    other = tasks.add("b", kind="materialization")
    tasks.start()
    assert loop.runs.wait(60)
    assert other.runs.wait(60)
    assert tasks.request("b", "drop", keep_target=True)["done"]
    assert tasks.dropped == ["b True"]
    tasks.await_state("b", "ended")
    assert loop.runs.is_set()
    tasks.end()


def test_unsupported_request_is_answered_and_task_continues(tasks):
    loop = tasks.add("a")
    other = tasks.add("m", kind="materialization")
    tasks.start()
    assert loop.runs.wait(60)
    assert other.runs.wait(60)
    assert tasks.request("a", "dance")["error"] == 'source "a" cannot dance'
    assert tasks.request("m", "resync")["error"] == 'materialization "m" cannot resync'
    assert tasks.request("a", "compact")["done"]
    assert loop.runs.wait(60)
    tasks.end()
    assert tasks.error is None


def test_resync_is_handled_by_the_loop_and_does_not_interrupt_it(tasks):
    loop = tasks.add("a", form=Resyncing)
    tasks.start()
    assert loop.runs.wait(60)
    answer = tasks.request("a", "resync", tables=["t", "u"])
    assert answer == {"done": True, "left": {"t": "loading"}, "mended": 3}
    assert loop.resynced == [("t", "u")]
    assert tasks.running.status()["a"].state == "running"
    tasks.end()


def test_resync_pending_before_a_run_with_once_is_handled(tasks, monkeypatch):
    monkeypatch.setattr(request_queue, "POLL_MS", 3_600_000)
    tasks.add("a", form=Resyncing)
    persist.open(f"{tasks.lake}/a", writer="w").close()
    id = tasks.leave_request("a", "resync")
    tasks.start(once=True)
    tasks.wait()
    assert tasks.await_answer("a", id)["done"]


@pytest.mark.parametrize("age_ms", [7_200_000, 660_000])
def test_expired_drop_is_not_executed(tasks, age_ms):
    loop = tasks.add("a")
    persist.open(f"{tasks.lake}/a", writer="w").close()
    blob = open_store(f"{tasks.lake}/a", persist.Settings())
    old = f"{SYSTEM_CLOCK.now_ms() - age_ms:013d}-0000002a"
    blob.put(f"asks/{old}", b'{"verb": "drop"}')
    tasks.start()
    assert loop.runs.wait(60)
    for _ in range(3_000):
        if blob.get(f"answers/{old}") is not None:
            break
        SYSTEM_CLOCK.wait(threading.Event(), 10)
    assert b"is past its deadline" in blob.get(f"answers/{old}")
    tasks.end()
    blob.close()
    assert tasks.dropped == []


def test_old_answers_are_removed(tmp_path):
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


def still_writes(client, name):
    StateStore(client, name).put({"mine": True})
    client.close()


def test_fenced_stopped_task_does_not_take_lock_back(tasks):
    tasks.add("a", DefiniteError("no such column"))
    tasks.add("b")
    tasks.start()
    tasks.await_state("a", "stopped")
    other = persist.open(f"{tasks.lake}/a", writer="w")
    tasks.leave_request("a", "resume")
    tasks.wait()
    assert isinstance(tasks.error, Fenced)
    assert tasks.loops["a"].starts == 1
    still_writes(other, "a")


def test_idle_task_detects_fencing(tasks, monkeypatch):
    monkeypatch.setattr(supervised_task, "LOCK_CHECK_MS", 20)
    loop = tasks.add("a")
    tasks.start()
    assert loop.runs.wait(60)
    assert tasks.request("a", "pause")["done"]
    tasks.await_state("a", PAUSED)
    other = persist.open(f"{tasks.lake}/a", writer="w")
    tasks.wait()
    assert isinstance(tasks.error, Fenced)
    still_writes(other, "a")


def test_lock_taken_between_restarts_is_not_taken_back(tasks):
    class Overtaken(SystemClock):
        other = None

        def wait(self, event, timeout_ms):
            if threading.current_thread().name == "a" and self.other is None:
                self.other = persist.open(f"{tasks.lake}/a", writer="w")
            return super().wait(event, timeout_ms)

    clock = Overtaken()
    loop = tasks.add("a", build_errors=[TransientError("away")])
    tasks.start(clock=clock)
    tasks.wait()
    assert isinstance(tasks.error, Fenced)
    assert loop.starts == 0
    still_writes(clock.other, "a")


def test_task_in_backoff_keeps_lock_and_answers_requests(tasks):
    paused = threading.Event()

    class Watching(SystemClock):
        holder = None

        def wait(self, event, timeout_ms):
            if threading.current_thread().name == "a" and not paused.is_set():
                self.holder = owner_of(f"{tasks.lake}/a")
                paused.set()
                return super().wait(event, 60_000)
            return super().wait(event, timeout_ms)

    clock = Watching()
    loop = tasks.add("a", build_errors=[TransientError("away")])
    tasks.start(clock=clock)
    assert paused.wait(60)
    assert tasks.running.status()["a"].state == "restarting"
    assert clock.holder.id == "w"
    assert tasks.request("a", "pause")["done"]
    tasks.await_state("a", PAUSED)
    assert loop.starts == 0
    tasks.end()


def test_fenced_maintenance_ends_all_tasks(tasks):
    loop = tasks.add("a")
    tasks.start()
    assert loop.runs.wait(60)
    other = persist.open(f"{tasks.lake}/a", writer="w")
    tasks.leave_request("a", "compact")
    tasks.wait()
    assert isinstance(tasks.error, Fenced)
    still_writes(other, "a")


def test_dropped_task_stays_dropped_if_catalog_write_fails(tasks):
    loop = tasks.add("a")
    other = tasks.add("b")
    tasks.catalog_errors.append(UsageError("the catalog is locked"))
    tasks.start()
    assert loop.runs.wait(60)
    assert other.runs.wait(60)
    assert tasks.request("a", "drop")["done"]
    tasks.await_state("a", "ended")
    tasks.end()
    assert (tasks.error, tasks.dropped, loop.starts) == (None, ["a False"], 1)


def test_concurrent_drops_are_both_answered(tasks):
    loop = tasks.add("a")
    other = tasks.add("b")
    persist.open(f"{tasks.lake}/a", writer="w").close()
    ids = [tasks.leave_request("a", verb) for verb in ("drop", "drop", "pause")]
    tasks.start()
    assert other.runs.wait(60)
    answers = [tasks.await_answer("a", id) for id in sorted(ids)]
    tasks.end()
    done = [answer for answer in answers if answer["done"]]
    assert len(done) >= 2
    assert tasks.dropped == ["a False"]
    assert loop.starts <= 2


def test_unexpected_error_of_request_is_answered(tasks):
    loop = tasks.add("a")
    tasks.drop_errors.append(OSError("boom"))
    tasks.start()
    assert loop.runs.wait(60)
    answer = tasks.request("a", "drop")
    assert answer["error"] == 'source "a" could not drop'
    assert "OSError: boom" in answer["detail"]
    assert tasks.request("a", "drop")["done"]
    tasks.wait()
    assert tasks.error is None


def test_expired_request_is_rejected(tasks):
    loop = tasks.add("a")
    persist.open(f"{tasks.lake}/a", writer="w").close()
    late = tasks.leave_request("a", "drop", until_ms=-1)
    tasks.start()
    assert loop.runs.wait(60)
    assert "is past its deadline" in tasks.await_answer("a", late)["error"]
    tasks.end()
    assert tasks.dropped == []


def test_withdrawn_request_is_not_executed(tasks):
    loop = tasks.add("a")
    busy, goes_on = threading.Event(), threading.Event()

    def slow(stop, *, once):
        stop.wait()
        busy.set()
        goes_on.wait(60)

    loop.run = slow
    tasks.start()
    tasks.await_state("a", "running")
    id = tasks.leave_request("a", "drop")
    assert busy.wait(60)
    blob = open_store(f"{tasks.lake}/a", persist.Settings())
    blob.delete(f"asks/{id}")
    blob.close()
    loop.run = Scripted.run.__get__(loop)
    goes_on.set()
    assert loop.runs.wait(60)
    tasks.end()
    assert tasks.dropped == []


def test_interrupted_wait_withdraws_request(tmp_path):
    class Ended(SystemClock):
        def wait(self, event, timeout_ms):
            raise SystemExit(143)

    url = f"file:{tmp_path}/src"
    persist.open(url, writer="w").close()
    blob = open_store(url, persist.Settings())
    with pytest.raises(SystemExit):
        send_request(blob, "drop", clock=Ended(), rng=random.Random(), patience_ms=1_000)
    assert blob.list("asks/") == []
    blob.close()


def test_stopped_task_accepts_requests_after_reopening(tasks):
    with persist.open(f"{tasks.lake}/a", writer="somebody else"):
        loop = tasks.add("a")
        tasks.add("b")
        tasks.start()
        tasks.await_state("a", "stopped")
        SYSTEM_CLOCK.wait(threading.Event(), 100)
    assert tasks.request("a", "resume")["done"]
    assert loop.runs.wait(60)
    tasks.end()


def test_unreadable_requests_do_not_block_other_tasks(tasks, monkeypatch):
    tasks.add("a")
    loop = tasks.add("b")
    read = request_queue.requests

    def broken(blob, *, now_ms):
        if blob.name.endswith("/a"):
            raise RuntimeError("not foreseen")
        return read(blob, now_ms=now_ms)

    monkeypatch.setattr(request_queue, "requests", broken)
    tasks.start()
    assert loop.runs.wait(60)
    assert tasks.request("b", "pause")["done"]
    tasks.end()


def test_once_with_paused_task_fails(tasks):
    with persist.open(f"{tasks.lake}/a", writer="w") as client:
        StateStore(client, "a").put({PAUSED: True})
    loop = tasks.add("a")
    later = tasks.add("m", kind="materialization")
    tasks.start(once=True, restarts=False)
    tasks.wait()
    assert str(tasks.error) == 'source "a" is paused, so nothing was done for it'
    assert tasks.error.hint.endswith(f"penstock resume {tasks.lake} a")
    assert (loop.starts, later.starts) == (0, 0)


def test_once_with_table_in_error_fails(tasks):
    loop = tasks.add("s")
    loop.tables = [
        {"name": "public.a", "error": ""},
        {
            "name": "public.b",
            "error": "table public.b has changed",
            "error_detail": "Its key is another.",
            "error_hint": "Copy it again.",
        },
    ]
    later = tasks.add("m", kind="materialization")
    tasks.start(once=True, restarts=False)
    tasks.wait()
    assert str(tasks.error) == 'source "s" has tables in error: public.b'
    assert tasks.error.detail == "table public.b has changed. Its key is another."
    assert tasks.error.hint == "Copy it again."
    assert later.starts == 1, "the materialization runs all the same"


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("kind", ["source", "materialization"])
def test_error_that_stops_a_task_is_reported_by_status_until_it_runs_again(tmp_path, kind, once):
    error = DefiniteError("slot is lost", detail="It was dropped.", hint="Create it.")
    tasks = Tasks(tmp_path)
    tasks.add("shop", error, kind=kind)
    tasks.start(once=once)
    tasks.wait()
    assert tasks.error is error
    (status,) = inspect_lake(tasks.lake, persist.Settings())
    [task] = status.to_json()[f"{kind}s"]
    assert (task["phase"], task["error"]) == (
        "stopped",
        {"message": "slot is lost", "detail": "It was dropped.", "hint": "Create it."},
    )
    again = Tasks(tmp_path)
    again.add("shop", kind=kind)
    again.start(once=True)
    again.wait()
    assert again.error is None
    (status,) = inspect_lake(tasks.lake, persist.Settings())
    assert status.to_json()[f"{kind}s"] == []


def test_task_stopped_while_it_waits_to_be_built_ends_without_error(tmp_path):
    stop, waits = threading.Event(), threading.Event()

    def build(_client):
        waits.set()
        assert stop.wait(60)
        raise TransientError("stopped before Spark was ready")

    url = f"file:{tmp_path}/lake/desk"
    task = Task("desk", "materialization", url, "w", build, lambda _client, _keep_target: None)
    supervisor = Supervisor([task], stop)
    threading.Thread(target=lambda: waits.wait(60) and stop.set()).start()
    supervisor.run(once=False)
    assert supervisor.status()["desk"].error is None
