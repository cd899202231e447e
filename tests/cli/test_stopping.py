"""A verb that runs on ends when it is told to, whichever thread the system tells."""

import subprocess
import sys

import pytest

SCRIPT = """
import signal, threading
from penstock.cli.stopping import stop_on_signals

stop = threading.Event()
stop_on_signals(stop)

def struck():
    signal.pthread_kill(threading.get_ident(), signal.{name})

threading.Timer(0.2, struck).start()
stop.wait()
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_that_another_thread_gets_is_heard(name: str) -> None:
    script = SCRIPT.format(name=name)
    ended = subprocess.run([sys.executable, "-c", script], timeout=30, check=False)
    assert ended.returncode == 0
