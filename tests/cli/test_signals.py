"""A long-running command stops on a signal that any of its threads receives."""

import os
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

from penstock.cli.signals import FENCED
from penstock.deadlines import stop_timeout_s
from penstock.errors import UsageError

SCRIPT = """
import signal, threading
from penstock.cli.signals import stop_on_signals

stop = threading.Event()
stop_on_signals(stop)

def send_signal():
    signal.pthread_kill(threading.get_ident(), signal.{name})

threading.Timer(0.2, send_signal).start()
stop.wait()
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_stop_signal_delivered_to_other_thread_stops_process(name: str) -> None:
    script = SCRIPT.format(name=name)
    ended = subprocess.run([sys.executable, "-c", script], timeout=30, check=False)
    assert ended.returncode == 0


HANGING = """
import sys, threading
from penstock.cli.signals import stop_in_time, stop_on_signals

stop = threading.Event()
stop_on_signals(stop)
with stop_in_time(stop, lambda: ['Source "shop" has not ended.']):
    print("ready", flush=True)
    stop.wait()
    print("stopping", flush=True)
    threading.Event().wait()
"""


HANGING_FENCED = HANGING.replace(
    "has not ended.']", "has not ended.'], lambda: Fenced('was fenced', hint='Stop one.')"
).replace("import sys", "from penstock.errors import Fenced\nimport sys")


def hanging(program: str = HANGING, **environment: str) -> "subprocess.Popen[str]":
    """Start a process that never ends by itself, and wait until it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_hanging_process_exits_at_stop_deadline_and_names_the_task() -> None:
    with hanging(PENSTOCK_STOP_TIMEOUT="0.1") as process:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "error: could not stop within 0.1 s\n" in errors
    assert 'detail: Source "shop" has not ended.\n' in errors


def test_hanging_fenced_process_reports_only_fenced_error_and_exits_with_3() -> None:
    with hanging(HANGING_FENCED, PENSTOCK_STOP_TIMEOUT="0.1") as process:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == FENCED == 3
    assert errors == "error: was fenced\nhint: Stop one.\n"


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_second_stop_signal_ends_hanging_process(second: signal.Signals) -> None:
    with hanging(PENSTOCK_STOP_TIMEOUT="600") as process:
        assert process.stdout is not None
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "stopping\n"
        # Signals within a second of the first count as one: send several.
        while process.poll() is None:
            process.send_signal(second)
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
        assert process.stderr is not None
        assert "stopped at once by a second signal" in process.stderr.read()
    assert process.returncode == 128 + second


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf"])
def test_stop_timeout_that_is_not_positive_raises_usage_error(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_STOP_TIMEOUT", text)
    with pytest.raises(UsageError, match="PENSTOCK_STOP_TIMEOUT is invalid"):
        stop_timeout_s()


def test_version_command_ignores_invalid_stop_timeout() -> None:
    command = [sys.executable, "-m", "penstock.cli.main", "--version"]
    environment = {**os.environ, "PENSTOCK_STOP_TIMEOUT": "soon"}
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
