"""`penstock demo --kafka` as a person runs it: a database and a topic, in SQLite as of one time."""

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
    """Where a server's user can get to, who is not root, by a path that is not too long."""
    with tempfile.TemporaryDirectory(prefix="penstock-demo-") as made:
        Path(made).chmod(0o711)
        yield Path(made)


@pytest.mark.spark
def test_a_shop_and_a_topic_end_equal_and_nothing_runs_on(folder: Path) -> None:
    make_broker().close()
    own = folder / "own"
    words = ("demo", "--kafka", "--for", "2", "--http", "none", "--folder", str(own))
    with Up(folder, *words) as up:
        until(lambda: not up.running or "SQLite follows" in up.said(), "the first rows")
        family = descendants(up.process.pid)
        assert up.wait() == 0
        *_, equal, last = up.said().splitlines()
    (compared,) = lines(last)
    assert compared["equal"] is True
    assert compared["clicks"] > 0
    assert compared["aborted"] > 0
    assert f"and {compared['clicks']:,} clicks in the topic" in equal
    pipeline = yaml.safe_load((own / "pipeline.yaml").read_text())
    (bindings,) = (each["bindings"] for each in pipeline["materializations"].values())
    assert {each["collection"] for each in bindings} > {"clicks", "shop.public.customers"}
    until(lambda: not [pid for pid in family if alive(pid)], f"the end of {family}")


@pytest.fixture
def nowhere(folder: Path) -> dict[str, str]:
    """No jar is here, and the repository that may have them does not answer."""
    jars = str(folder / "jars")
    repository = "http://127.0.0.1:9"
    where = {"PENSTOCK_JARS": jars, "DEFAULT_ARTIFACT_REPOSITORY": repository}
    return {**where, "HOME": str(folder)}


def test_without_jars_there_is_no_option_and_one_line_why(
    folder: Path, nowhere: dict[str, str]
) -> None:
    (folder / "jars").mkdir()
    ended = subprocess.run(
        [sys.executable, "-m", "penstock.demo.clicks"],
        env={**os.environ, **nowhere},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout == ""
    (said,) = ended.stderr.splitlines()
    assert said.startswith('without Kafka: jar "')


def test_without_jars_it_says_which_file_belongs_where(
    folder: Path, nowhere: dict[str, str]
) -> None:
    ended = penstock(folder, "demo", "--kafka", environment=nowhere)
    assert ended.returncode == 1
    assert "is not here and could not be fetched" in ended.stderr
    assert f'hint: Put into folder "{folder / "jars"}" these files' in ended.stderr
    assert "Traceback" not in ended.stderr
