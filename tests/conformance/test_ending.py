"""A check that is told to end leaves no process behind, however far it has come."""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.clock import SYSTEM_CLOCK

HERE = Path(__file__).parent
NEVER_LISTENS = "sleep 600 & echo $! $$ > {pids}; wait"
HANGS = "{python} {plain} --listen $ADDRESS & echo $! $$ > {pids}; wait"


def started(folder: Path, script: str) -> "subprocess.Popen[bytes]":
    """`check` of a connector within a shell, of which the first acknowledge never comes."""
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
    verb = ["connector", "check", "--config", str(path), "--only", "first-acknowledge"]
    return subprocess.Popen(
        [sys.executable, "-m", "penstock.cli.main", *verb], stderr=subprocess.DEVNULL
    )


@pytest.mark.parametrize(
    ("script", "sign", "number"),
    [
        (NEVER_LISTENS, "pids", signal.SIGTERM),
        (HANGS, "plain.db", signal.SIGTERM),
        (HANGS, "plain.db", signal.SIGINT),
    ],
    ids=["SIGTERM before it listens", "SIGTERM amid a check", "SIGINT amid a check"],
)
def test_a_check_that_is_told_to_end_ends_the_connector(
    script: str, sign: str, number: signal.Signals, tmp_path: Path
) -> None:
    with started(tmp_path, script) as check:
        wait_for(lambda: (tmp_path / sign).exists() and (tmp_path / "pids").read_text().strip())
        check.send_signal(number)
        assert check.wait(60) == 128 + number
    for pid in (tmp_path / "pids").read_text().split():
        wait_for(lambda pid=pid: not alive(int(pid)))


def alive(pid: int) -> bool:
    """Whether there is such a process that still runs."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_for(happens: Callable[[], object]) -> None:
    for _ in range(1_200):
        if happens():
            return
        SYSTEM_CLOCK.wait(threading.Event(), 50)
    pytest.fail("it did not come to pass within a minute")
