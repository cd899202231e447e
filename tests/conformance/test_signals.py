"""Signals during `connector check`: no connector process survives the check."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from penstock.cli import connector
from penstock.clock import SYSTEM_CLOCK
from penstock.errors import UsageError
from penstock.testing.conformance import parse
from penstock.testing.conformance.process import Connectors, NotStarted

HERE = Path(__file__).parent
NEVER_LISTENS = "sleep 600 & echo $! $$ > {pids}; wait"
HANGS = "{python} {plain} --listen $ADDRESS & echo $! $$ > {pids}; wait"


def started(folder: Path, script: str, *before: str) -> "subprocess.Popen[bytes]":
    """Start `connector check` of a connector that never sends the first Acknowledged."""
    endpoint = {"path": str(folder / "plain.db"), "defect": "no-first-acknowledge"}
    names = {"python": sys.executable, "plain": HERE / "plain.py", "pids": folder / "pids"}
    config = {
        "endpoint": endpoint,
        "resource": {"table": "{name}"},
        "pattern": "remote-authoritative",
        "accepts_delete": True,
        "command": ["sh", "-c", script.format(**names)],
    }
    path = folder / "check.yaml"
    path.write_text(json.dumps(config))
    verb = [
        "connector",
        "check",
        "--config",
        str(path),
        "--only",
        "first-transaction-is-acknowledged",
    ]
    return subprocess.Popen(
        [*before, sys.executable, "-m", "penstock.cli.main", *verb],
        stderr=subprocess.DEVNULL,
        preexec_fn=default_signals,
    )


def default_signals() -> None:
    """Undo signals that the test run ignores, as under nohup or in the background."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.mark.parametrize(
    ("script", "sign", "number"),
    [
        (NEVER_LISTENS, "pids", signal.SIGTERM),
        (HANGS, "plain.db", signal.SIGTERM),
        (HANGS, "plain.db", signal.SIGINT),
    ],
    ids=["SIGTERM before it listens", "SIGTERM amid a check", "SIGINT amid a check"],
)
def test_check_on_signal_ends_the_connector_processes(
    script: str, sign: str, number: signal.Signals, tmp_path: Path
) -> None:
    with started(tmp_path, script) as check:
        wait_for(lambda: (tmp_path / sign).exists() and (tmp_path / "pids").read_text().strip())
        check.send_signal(number)
        assert check.wait(60) == 128 + number
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    wait_for(lambda: not any(map(alive, pids)))


def test_check_with_ignored_sighup_ends_on_sigterm_only(tmp_path: Path) -> None:
    ignoring = ("sh", "-c", 'trap "" HUP; exec "$@"', "sh")
    with started(tmp_path, NEVER_LISTENS, *ignoring) as check:
        wait_for(lambda: (tmp_path / "pids").exists() and (tmp_path / "pids").read_text().strip())
        check.send_signal(signal.SIGHUP)
        check.send_signal(signal.SIGTERM)
        assert check.wait(60) == 128 + signal.SIGTERM


def test_check_restores_signal_handlers(tmp_path: Path) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(each) for each in numbers]
    with pytest.raises(UsageError, match="could not read conformance file"):
        connector.check(config=tmp_path / "nothing.yaml")
    assert [signal.getsignal(each) for each in numbers] == before


def test_orphan_process_of_exited_wrapper_is_killed(tmp_path: Path) -> None:
    listen = (
        "import signal, socket, sys; "
        "kept = socket.create_server(('127.0.0.1', int(sys.argv[1]))); signal.pause()"
    )
    script = (
        f"[ -e {tmp_path}/end ] && exit 3; "
        f'{sys.executable} -S -E -c "{listen}" {{port}} & echo $! $$ > {tmp_path}/pids; '
        f"until [ -e {tmp_path}/end ]; do sleep 0.02; done"
    )
    config = parse(
        {
            "endpoint": {},
            "resource": {"table": "{name}"},
            "pattern": "remote-authoritative",
            "accepts_delete": True,
            "command": ["sh", "-c", script],
        }
    )
    connectors = Connectors(config, None, tmp_path)
    connectors.connection()
    left, wrapper = (int(each) for each in (tmp_path / "pids").read_text().split())
    (tmp_path / "end").touch()
    wait_for(lambda: not alive(wrapper))
    assert alive(left)
    try:
        for _ in range(2):
            with pytest.raises(NotStarted, match="ended with status 3"):
                connectors.connection()
        wait_for(lambda: not alive(left))
        connectors.close()
    finally:
        with suppress(ProcessLookupError):
            os.kill(left, signal.SIGKILL)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_for(condition: Callable[[], object]) -> None:
    for _ in range(1_200):
        if condition():
            return
        SYSTEM_CLOCK.wait(threading.Event(), 50)
    pytest.fail("timed out after a minute")
