"""Control commands: accepted names, requests to a running owner, and exit."""

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
from typer.testing import CliRunner

from penstock import persist
from penstock.catalog.objects import RequestedObject, known_objects, update_catalog
from penstock.cli.main import app
from penstock.clock import SYSTEM_CLOCK
from penstock.persist.state_store import PAUSED, StateStore
from penstock.supervisor import Supervisor, Task
from penstock.supervisor.status import SourceStatus
from tests.process_pipes import stdout_of

SOURCE = {"postgres": {"url": "postgresql://nobody@127.0.0.1:1/none", "tables": ["public.a"]}}
DESK = {
    "connector": "sqlite",
    "endpoint": {"path": "./desk.db"},
    "bindings": [{"collection": "shop.public.a", "resource": {"table": "a"}}],
}


class IdleLoop:
    """Loop that does nothing."""

    commits = 0
    is_resumable = True
    step = ""

    def run(self, stop, *, once):
        stop.wait()

    def status(self):
        return SourceStatus()


@pytest.fixture
def lake(tmp_path):
    url = f"file:{tmp_path}/lake"
    objects = [
        RequestedObject("shop", "source", SOURCE),
        RequestedObject("desk", "materialization", DESK),
    ]
    update_catalog(url, lambda _: objects)
    for name in ("shop", "desk"):
        with persist.open(f"{url}/{name}", writer="w") as client:
            StateStore(client, name).put({"status": {}})
    return url


def invoke(*words):
    return CliRunner().invoke(app, [*words])


def state_collections(url):
    with persist.open(url, hold=False) as client:
        return [name for name in client.collections(hidden=True) if name.endswith("/state")]


def is_paused(lake, name):
    with persist.open(f"{lake}/{name}", hold=False) as client:
        return StateStore(client, name).get(PAUSED)


@contextmanager
def run(lake, name):
    """Run a supervisor with one idle source task."""
    stop, runs = threading.Event(), threading.Event()

    def build(_client):
        runs.set()
        return IdleLoop()

    def drop(client, _keep_target):
        client.destroy(*client.collections(hidden=True))

    running = Supervisor([Task(name, "source", f"{lake}/{name}", "w", build, drop)], stop)
    thread = threading.Thread(target=running.run, kwargs={"once": False})
    thread.start()
    try:
        assert runs.wait(60)
        yield
    finally:
        stop.set()
        thread.join(60)


@pytest.mark.parametrize("command", ["pause", "resume", "drop", "resync"])
@pytest.mark.parametrize(("below", "name"), [("/shop", "shpo"), ("", "catalog"), ("", "shpo")])
def test_control_command_with_unknown_task_name_is_rejected_and_writes_nothing(
    lake, command, below, name
):
    refused = invoke(command, lake + below, name)
    assert refused.exit_code != 0
    assert f'has no source or materialization "{name}"' in str(refused.exception)
    assert state_collections(f"{lake}/shop") == ["shop/state"]
    assert not is_paused(lake, "shop")


@pytest.mark.parametrize("below", ["", "/desk"])
def test_control_commands_accept_lake_url_or_storage_location_url(lake, below):
    assert invoke("pause", lake + below, "desk").exit_code == 0
    assert is_paused(lake, "desk")
    done = invoke("drop", lake + below, "desk", "--keep-target")
    assert done.output.startswith("desk: dropped; its target is kept")
    assert [obj.name for obj in known_objects(lake)] == ["shop"]
    assert state_collections(f"{lake}/desk") == []


@pytest.mark.parametrize("below", ["", "/desk"])
def test_drop_of_dropped_task_reports_already_dropped(lake, below):
    assert invoke("drop", lake, "desk", "--keep-target").exit_code == 0
    again = invoke("drop", lake + below, "desk")
    assert (again.exit_code, again.output) == (0, "desk: was dropped already\n")
    assert json.loads(invoke("drop", lake, "desk", "--json").output)["already"] is True
    refused = invoke("pause", lake, "desk")
    assert "was dropped already" in str(refused.exception)


def test_drop_of_source_with_bound_materialization_is_rejected_without_force(lake):
    refused = invoke("drop", lake, "shop")
    assert str(refused.exception) == (
        'source "shop" cannot be dropped: materialization "desk" is bound to shop.public.a'
    )
    with run(lake, "shop"):
        refused = invoke("drop", f"{lake}/shop", "shop")
        assert 'materialization "desk" is bound' in str(refused.exception)
        assert state_collections(f"{lake}/shop") == ["shop/state"]
        assert invoke("drop", lake, "shop", "--force").output == "shop: dropped\n"
    assert state_collections(f"{lake}/shop") == []


def start_owner(lake, name):
    """Start a process that holds the lock of a task and answers no request."""
    script = f"import sys, penstock.persist as p; c = p.open('{lake}/{name}', writer='w'); "
    script += "print('open', flush=True); sys.stdin.read()"
    owner = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert stdout_of(owner).readline() == "open\n"
    return owner


@pytest.fixture
def killed(lake):
    """Return the lake after the owners of its tasks were killed."""
    for name in ("shop", "desk"):
        owner = start_owner(lake, name)
        owner.kill()
        owner.communicate()
    return lake


def test_pause_and_resume_after_owner_was_killed_take_its_lock(killed):
    assert invoke("pause", killed, "shop").output == "shop: paused; no process runs it\n"
    assert is_paused(killed, "shop")
    assert invoke("resume", killed, "shop").exit_code == 0
    assert not is_paused(killed, "shop")


def test_drop_after_owner_was_killed_takes_its_lock(killed):
    assert invoke("drop", killed, "desk", "--keep-target").exit_code == 0
    assert state_collections(f"{killed}/desk") == []


def test_resync_after_owner_was_killed_is_rejected_without_waiting(killed):
    refused = invoke("resync", killed, "shop", "--wait", "600")
    assert str(refused.exception).startswith('source "shop" of location')


def test_pause_with_owner_killed_while_request_is_pending_takes_its_lock(lake, tmp_path):
    owner = start_owner(lake, "shop")
    requests = tmp_path / "lake" / "shop" / "asks"

    def kill_at_request():
        for _ in range(6_000):
            if requests.is_dir() and any(requests.iterdir()):
                break
            SYSTEM_CLOCK.wait(threading.Event(), 10)
        owner.kill()
        owner.communicate()

    killer = threading.Thread(target=kill_at_request)
    killer.start()
    try:
        assert invoke("pause", lake, "shop", "--wait", "600").exit_code == 0
    finally:
        killer.join()
    assert is_paused(lake, "shop")
    assert not any(requests.iterdir())


def test_resync_without_running_owner_is_rejected_without_waiting(lake):
    refused = invoke("resync", lake, "shop", "--wait", "600")
    assert str(refused.exception).startswith('source "shop" of location')


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_pause_command_ended_by_signal_deletes_its_request(lake, tmp_path, number):
    requests = tmp_path / "lake" / "shop" / "asks"
    # The owner of the lock is alive and does not answer.
    with persist.open(f"{lake}/shop", writer="w"):
        # A process under nohup or in the background ignores these signals.
        # Its children inherit this.
        default_signals = ("env", "--default-signal=HUP,INT")
        process = subprocess.Popen(
            [*default_signals, sys.executable, "-m", "penstock.cli.main", "pause", lake, "shop"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            for _ in range(6_000):
                if requests.is_dir() and any(requests.iterdir()):
                    break
                SYSTEM_CLOCK.wait(threading.Event(), 10)
            os.kill(process.pid, number)
            assert process.wait(60) > 0
        finally:
            process.kill()
            process.wait()
    assert not any(requests.iterdir())
