"""Consistency of the connector tutorial with its example, which passes the suite."""

import json
import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from penstock import sdk
from penstock.testing.conformance import CHECKS, Config, Need, Outcome, load, run

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/tutorial/write-a-connector.md").read_text()
SOURCE = ROOT / "examples/write_a_connector.py"
FILE = ROOT / "examples/write_a_connector.yaml"

SLOW = {
    name
    for name, check in CHECKS.items()
    if Need.COMMAND in check.needs
    and name not in ("restart-after-started-commit-resumes", "zombie-staged-work-is-never-applied")
}
"""Checks that start processes; `penstock connector check` runs all."""


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


def test_tutorial_page_code_equals_the_example():
    parts = blocks("python part")
    for part in parts:
        assert part in SOURCE.read_text()
    assert lines("\n".join(parts)) == lines(SOURCE.read_text())


def test_tutorial_page_shows_the_conformance_file():
    assert blocks("yaml") == [FILE.read_text()]


def described(folder: Path, source: Path = SOURCE) -> Config:
    """Return the configuration of the suite, with tables in another folder."""
    moved = FILE.read_text().replace("/tmp/tables", str(folder))
    assert str(folder) in moved
    config = load_text(moved, folder)
    command = [sys.executable, str(source), *config.command[2:]]
    read = [sys.executable, "-S", "-E", *config.read[1:]]
    return config.model_copy(update={"command": tuple(command), "read": tuple(read)})


def load_text(text: str, folder: Path) -> Config:
    path = folder.with_suffix(".yaml")
    path.write_text(text)
    assert yaml.safe_load(text)["command"][1] == str(SOURCE.relative_to(ROOT))
    return load(path)


def test_tutorial_connector_passes_the_conformance_suite(tmp_path: Path):
    report = run(described(tmp_path / "tables"), only=sorted(CHECKS.keys() - SLOW))
    assert not report.failed, report.as_table()
    [counts] = re.findall(r"^    (\d+) passed, 0 failed, (\d+) skipped$", PAGE, re.MULTILINE)
    # Slow checks pass, or do not apply to the pattern.
    skipped = {result.check.name for result in report.results if result.outcome is Outcome.SKIPPED}
    skipped |= {name for name in SLOW if "idempotent-apply" not in CHECKS[name].patterns}
    assert (len(CHECKS) - len(skipped), len(skipped)) == (int(counts[0]), int(counts[1]))


APPLY = "            apply_once(self._endpoint.folder, name)\n"
STORE = "            changes.update(zip(keys, kept, strict=True))\n"
STAGED = "        self._committed = {self._range: name}\n"
WRITE_THROUGH = """\
            path = table_path(self._endpoint, batch.binding)
            write(path, {**read(path), **changes})
"""

BREAKS = {
    "staged-work-is-applied-before-first-acknowledged": (
        APPLY,
        f"            if self._changes:\n    {APPLY}",
    ),
    "zombie-staged-work-is-never-applied": (
        STAGED,
        f"{STAGED}        apply_once(self._endpoint.folder, name)\n",
    ),
    "cancelled-store-is-rolled-back": (STORE, f"{STORE}{WRITE_THROUGH}"),
}
"""Breakages of the page, by the check that reports them."""


@pytest.mark.parametrize("check", BREAKS)
def test_tutorial_breakage_is_reported_by_its_check(check: str, tmp_path: Path):
    right, wrong = BREAKS[check]
    source = SOURCE.read_text()
    assert source.count(right) == 1
    broken = tmp_path / "broken.py"
    broken.write_text(source.replace(right, wrong))
    config = described(tmp_path / "tables", broken)
    if Need.COMMAND in CHECKS[check].needs:
        report = run(config, only=[check])
    else:
        connector = runpy.run_path(str(broken))["JsonTables"]()
        with sdk.serve(connector, "127.0.0.1:0") as server:
            alone = config.model_copy(update={"command": ()})
            report = run(alone, server.address, only=[check])
    assert [result.check.name for result in report.failed] == [check], report.as_table()
    assert f"| `{check}`" in PAGE


@pytest.fixture
def serving() -> Iterator[str]:
    """Yield the address of the connector, served as on the page."""
    process = subprocess.Popen(
        [sys.executable, SOURCE, "127.0.0.1:0"], stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
        os.kill(process.pid, signal.SIGKILL)


def test_connector_spec_of_tutorial_connector_lists_its_options(serving: str):
    assert "penstock connector spec 127.0.0.1:9000" in PAGE
    process = subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", "connector", "spec", serving],
        capture_output=True,
        text=True,
        check=True,
    )
    spec = json.loads(process.stdout)
    assert list(spec["endpoint"]["properties"]) == ["folder"]
    assert list(spec["resource"]["properties"]) == ["table"]
