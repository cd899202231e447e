"""The example source of the how-to page: every line exactly once, through restarts and kill -9."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import persist
from penstock.errors import DefiniteError
from penstock.failpoints import Action, Failpoint, armed
from penstock.ingest.loop import IngestLoop
from penstock.sources.registry import source_kind, source_kinds
from penstock.testing.clocks import ManualClock

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples/jsonl_source"
PAGE = (ROOT / "docs/how-to/write-a-source.md").read_text()
START_MS = 1_700_000_000_000


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that has the metadata of the installed example."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    site = tmp_path_factory.mktemp("site")
    metadata = site / "jsonl_source-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    [(group, points)] = project["entry-points"].items()
    lines = [f"{name} = {value}" for name, value in points.items()]
    (metadata / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
    return site


@pytest.fixture
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.syspath_prepend(str(EXAMPLE))
    source_kinds.cache_clear()
    yield
    source_kinds.cache_clear()


class Lake:
    """A folder of files and its lake, ingested until all lines are durable."""

    def __init__(self, path: Path) -> None:
        self.folder, self.url = path / "events", f"file:{path}/lake/events"
        self.folder.mkdir()
        self.clock = ManualClock(START_MS)

    def append(self, file: str, text: str) -> None:
        with (self.folder / file).open("a") as stream:
            stream.write(text)

    def ingest(self) -> None:
        self.clock.move_ms(1_000)
        kind = source_kind("jsonl")
        config = kind.section(folder=self.folder, columns={"id": "bigint", "name": "text"})
        source = kind.build("events", config, self.url, self.clock)
        settings = persist.Settings(background=False)
        with persist.open(self.url, writer="test", settings=settings) as client:
            loop = IngestLoop(
                "events", source, client, tick_ms=1_000, retain_ms=3_600_000, clock=self.clock
            )
            loop.run(threading.Event(), once=True)

    def rows(self, collection: str = "events") -> list[tuple[Any, ...]]:
        with persist.open(self.url, hold=False) as client:
            found = client.collection(collection)
            return sorted(
                tuple(update.data.values())
                for update in found.snapshot(found.upper - 1)
                for _ in range(update.diff)
            )


@pytest.fixture
def lake(installed: None, tmp_path: Path) -> Lake:
    return Lake(tmp_path)


def line(id: int) -> str:
    return json.dumps({"id": id, "name": f"n{id}"}) + "\n"


def test_lines_appended_between_starts_are_read_once(lake: Lake):
    lake.append("a.jsonl", line(1) + line(2))
    lake.ingest()
    lake.append("a.jsonl", line(3))
    lake.append("b.jsonl", line(4))
    lake.ingest()
    lake.ingest()
    second = len(line(1))
    assert lake.rows() == [
        ("a.jsonl", 0, 1, "n1"),
        ("a.jsonl", second, 2, "n2"),
        ("a.jsonl", 2 * second, 3, "n3"),
        ("b.jsonl", 0, 4, "n4"),
    ]


def test_incomplete_line_is_read_once_it_is_complete(lake: Lake):
    lake.append("a.jsonl", line(1) + line(2)[:5])
    lake.ingest()
    assert [row[2] for row in lake.rows()] == [1]
    lake.append("a.jsonl", line(2)[5:])
    lake.ingest()
    assert [row[2] for row in lake.rows()] == [1, 2]


def test_bad_line_is_dead_lettered(lake: Lake):
    lake.append("a.jsonl", line(1) + "nonsense\n" + '{"id": "x"}\n' + line(2))
    lake.ingest()
    assert [row[2] for row in lake.rows()] == [1, 2]
    assert [(row[1], row[3]) for row in lake.rows("events_errors")] == [
        (len(line(1)), b"nonsense"),
        (len(line(1) + "nonsense\n"), b'{"id": "x"}'),
    ]


@pytest.mark.parametrize("failpoint", [Failpoint.TICK_BEGIN, Failpoint.TICK_DONE])
def test_lines_of_failed_tick_are_read_once(lake: Lake, failpoint: Failpoint):
    lake.append("a.jsonl", line(1))
    lake.ingest()
    lake.append("a.jsonl", line(2))
    with armed(failpoint, Action.ERROR), pytest.raises(Exception, match=r"failpoint .* fired"):
        lake.ingest()
    lake.ingest()
    assert [row[2] for row in lake.rows()] == [1, 2]


def test_lines_in_blocks_are_read_once(lake: Lake, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jsonl_source.BLOCK_BYTES", 50)
    for id in range(40):
        lake.append(f"{id % 3}.jsonl", json.dumps({"id": id, "name": "n" * (id * 3)}) + "\n")
    lake.ingest()
    assert sorted(row[2] for row in lake.rows()) == [*range(40)]


def test_file_that_became_shorter_raises_definite_error(lake: Lake):
    lake.append("a.jsonl", line(1) + line(2))
    lake.ingest()
    (lake.folder / "a.jsonl").write_text(line(1))
    with pytest.raises(DefiniteError, match="became shorter"):
        lake.ingest()


@pytest.fixture
def penstock(site: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs a command in a folder with the pipeline file of the page."""
    (tmp_path / "pipeline.yaml").write_text((EXAMPLE / "pipeline.yaml").read_text())
    (tmp_path / "events").mkdir()
    python_path = os.pathsep.join([str(ROOT / "src"), str(site), str(EXAMPLE)])

    def penstock(*arguments: str, failpoints: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "penstock.cli.main", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": python_path, "PENSTOCK_FAILPOINTS": failpoints},
            capture_output=True,
            text=True,
            timeout=300,
        )

    return penstock


def test_up_killed_in_the_middle_reads_every_line_once(
    penstock: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
):
    events = tmp_path / "events/a.jsonl"
    events.write_text(line(1))
    up = ("up", "pipeline.yaml", "--once", "--http", "none")
    for failpoint in ("tick.begin=kill", "tick.done=kill"):
        killed = penstock(*up, failpoints=failpoint)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
    events.write_text(line(1) + line(2))
    finished = penstock(*up)
    assert finished.returncode == 0, finished.stderr
    read = penstock("read", "file:./lake", "events")
    assert [json.loads(row)["id"] for row in read.stdout.splitlines()] == [1, 2]
    progress = penstock("read", "file:./lake", "events_progress")
    assert json.loads(progress.stdout)["byte_offset"] == len(line(1) + line(2))


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_page_code_is_in_the_example():
    source = (EXAMPLE / "jsonl_source.py").read_text()
    parts = blocks("python part")
    assert parts
    assert [part for part in parts if part not in source] == []
    assert all(part in (EXAMPLE / "pyproject.toml").read_text() for part in blocks("toml"))
    assert blocks("yaml") == [(EXAMPLE / "pipeline.yaml").read_text()]


def test_example_is_short_and_uses_public_modules():
    source = (EXAMPLE / "jsonl_source.py").read_text()
    assert len(source.splitlines()) < 300
    modules = set(re.findall(r"^from (penstock[\w.]*) import", source, re.MULTILINE))
    assert modules <= {
        "penstock.clock",
        "penstock.data.remap_form",
        "penstock.errors",
        "penstock.progress",
        "penstock.sources.context",
        "penstock.sources.formats",
        "penstock.sources.registry",
        "penstock.sources.source",
    }
