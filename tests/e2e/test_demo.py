"""`penstock demo --kafka` as a process: a database and a topic, in SQLite as of one time."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.e2e.process import Up, alive, descendants, lines, penstock, until
from tests.fix_kafka import make_broker


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a folder with a short path that the server's user, who is not root, can enter."""
    with tempfile.TemporaryDirectory(prefix="penstock-demo-") as made:
        Path(made).chmod(0o711)
        yield Path(made)


@pytest.mark.spark
def test_demo_with_kafka_ends_equal_and_leaves_no_process(folder: Path) -> None:
    make_broker().close()
    own = folder / "own"
    words = ("demo", "--kafka", "--for", "2", "--http", "none", "--folder", str(own))
    with Up(folder, *words) as up:
        until(lambda: not up.running or "SQLite follows" in up.output(), "the first rows")
        family = descendants(up.process.pid)
        assert up.wait() == 0
        *_, equal, last = up.output().splitlines()
    (compared,) = lines(last)
    assert compared["equal"] is True
    assert compared["clicks"] > 0
    assert compared["aborted"] > 0
    assert f"{compared['clicks']:,} committed clicks in the topic" in equal
    pipeline = yaml.safe_load((own / "pipeline.yaml").read_text())
    (bindings,) = (each["bindings"] for each in pipeline["materializations"].values())
    assert {each["collection"] for each in bindings} > {"clicks", "shop.public.customers"}
    until(lambda: not [pid for pid in family if alive(pid)], f"the end of {family}")


@pytest.fixture
def no_jars(folder: Path) -> dict[str, str]:
    """Return an environment without jars, whose repository does not answer."""
    jars = str(folder / "jars")
    repository = "http://127.0.0.1:9"
    where = {"PENSTOCK_JARS": jars, "DEFAULT_ARTIFACT_REPOSITORY": repository}
    return {**where, "HOME": str(folder)}


def test_clicks_without_jars_prints_one_line(folder: Path, no_jars: dict[str, str]) -> None:
    (folder / "jars").mkdir()
    ended = subprocess.run(
        [sys.executable, "-m", "penstock.demo.clicks"],
        env={**os.environ, **no_jars},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    assert line.startswith('the demo runs without Kafka: could not resolve jar "')


def test_demo_without_jars_lists_files_and_folder(folder: Path, no_jars: dict[str, str]) -> None:
    ended = penstock(folder, "demo", "--kafka", environment=no_jars)
    assert ended.returncode == 1
    assert 'could not resolve jar "' in ended.stderr
    assert f'into folder "{folder / "jars"}"' in ended.stderr
    assert "Traceback" not in ended.stderr
