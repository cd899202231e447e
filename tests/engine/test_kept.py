"""A session whose JVM is killed, and the one that takes its place."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.spark

KILLED = """
import os, signal, sys
from pyspark import SparkContext
from penstock.engine.kept.spark import KeptSession
from penstock.errors import TransientError

starts = []
kept = KeptSession("local[1]", starts=lambda: starts.append(1))
first = kept.get()
assert kept.get() is first
assert first.range(5).count() == 5
jvm = SparkContext._gateway.proc
os.kill(jvm.pid, signal.SIGKILL)
jvm.wait()
second = kept.get()
assert second is not first
assert second.range(7).count() == 7
assert len(starts) == 2
second.stop()
print("done")
"""


def test_a_killed_jvm_is_replaced(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", KILLED],
        cwd=tmp_path,
        env={**os.environ, "SPARK_LOCAL_IP": "127.0.0.1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr[-3_000:]
