"""Restart of the shared session after its JVM is killed."""

import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from penstock.engine.shared_session import spark as shared_session
from penstock.errors import TransientError
from tests.fix_spark import home_of_links

pytestmark = pytest.mark.spark

KILLED = """
import os, signal, threading
from py4j.protocol import Py4JError
from pyspark import SparkContext
from penstock.cli.log_format import log_to_stderr
from penstock.engine.shared_session.spark import SharedSession
from penstock.errors import TransientError

log_to_stderr()
starts = []
kept = SharedSession("local[1]", starts=lambda: starts.append(1))
first = kept.get()
assert kept.get() is first
assert first.range(5).count() == 5
added = first.sparkContext.accumulator(0)
first.sparkContext.parallelize([1, 2], 1).foreach(added.add)
assert added.value == 3

# A call is under way when the JVM is killed. SUBTLE: unread bytes make the kernel reset the
# connection instead of closing it, and only a reset is logged with a traceback.
client = SparkContext._gateway._gateway_client
files = first._jvm.java.nio.file.Files
os.mkfifo("pipe")
pipe = first._jvm.java.io.File(os.path.abspath("pipe")).toPath()

def read_pipe():
    pipe.getFileName()  # Opens the connection of this thread.
    connections.append(client.get_thread_connection())
    try:
        files.readAllBytes(pipe)
    except Py4JError:
        failed.append(1)

connections, failed = [], []
call = threading.Thread(target=read_pipe)
call.start()
with open("pipe", "w"):  # Returns when the JVM has opened its end.
    connections[0].socket.sendall(b"unread")
    jvm = SparkContext._gateway.proc
    os.kill(jvm.pid, signal.SIGKILL)
    jvm.wait()
call.join()
assert failed
second = kept.get()
assert second is not first
assert second.range(7).count() == 7
assert len(starts) == 2
second.stop()
print("done")
"""


def test_killed_jvm_is_replaced(tmp_path: Path) -> None:
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
    assert "Traceback" not in ended.stderr
    assert "Exception while sending command" not in ended.stderr
    assert ended.stderr.count("JVM of Spark ended") == 1


JARS = """
import sys, threading, zipfile
from pathlib import Path
from penstock.engine.shared_session.spark import SharedSession

ours = Path("our own.jar")
kept = SharedSession("local-cluster[1,1,1024]", jars=lambda: [ours])
spark = kept.get()

def seen(_):
    from pyspark import SparkFiles
    return sorted(path.name for path in Path(SparkFiles.getRootDirectory()).glob("*.jar"))

def on_driver():
    loader = spark._jvm.java.lang.Thread.currentThread().getContextClassLoader()
    found.append([loader.getResource(name) is not None for name in ("ours", "theirs", "other")])

found = []
on_driver()
another = threading.Thread(target=on_driver)
another.start()
another.join()
(tasks,) = spark.sparkContext.parallelize([1], 1).map(seen).collect()
spark.stop()
print(found, tasks)
"""


def test_jars_are_available_to_driver_and_tasks_with_configured_jars(
    tmp_path: Path,
) -> None:
    for name, holds in (("our own.jar", "ours"), ("their.jar", "theirs")):
        with zipfile.ZipFile(tmp_path / name, "w") as jar:
            jar.writestr(holds, "")
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "spark-defaults.conf").write_text(f"spark.jars  {tmp_path}/their.jar\n")
    ended = subprocess.run(
        [sys.executable, "-c", JARS],
        cwd=tmp_path,
        env={
            **os.environ,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_CONF_DIR": str(tmp_path / "conf"),
            "SPARK_HOME": str(home_of_links(tmp_path)),
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    there = [True, True, False]
    said = f"{[there, there]} ['our own.jar', 'their.jar']\n"
    assert (ended.returncode, ended.stdout) == (0, said), ended.stderr[-3_000:]


def test_get_of_session_that_still_starts_ends_at_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    stop, ready = threading.Event(), threading.Event()

    def start(**_options: object) -> None:
        stop.set()
        ready.wait(60)

    monkeypatch.setattr(shared_session, "session", start)
    with pytest.raises(TransientError, match="stopped before Spark was ready"):
        shared_session.SharedSession("local[1]", stop=stop).get()
    ready.set()
