"""The first tutorial, executed: a server, the command line, SQLite, kill -9."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.pipeline import load

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/tutorial/postgres-to-sqlite.md").read_text()
FOLDER = "/tmp/penstock-tutorial"
EXAMPLE = ROOT / "examples/shop/pipeline.yaml"


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a folder with a short path that the server's user, who is not root, can enter."""
    with tempfile.TemporaryDirectory(prefix="penstock-tutorial-") as path:
        Path(path).chmod(0o711)
        yield Path(path)


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.timeout(1_800)  # Two Spark sessions, and a dozen commands.
def test_tutorial_commands_print_the_output_of_the_page(folder: Path):
    script = "".join(blocks("sh run"))
    assert FOLDER in script
    script = script.replace(FOLDER, str(folder / "own"))
    bin_folder = str(Path(sys.executable).parent)
    assert shutil.which("penstock", path=bin_folder) is not None
    typed = subprocess.Popen(
        ["bash", "-eu", "-c", script],
        cwd=folder,
        env={**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        printed, errors = typed.communicate()
    finally:
        if typed.poll() is None:
            os.killpg(typed.pid, signal.SIGKILL)
    assert typed.returncode == 0, printed + errors
    remaining = printed
    for expected in blocks("text"):
        assert expected in remaining, f"{expected}is not in:\n{remaining}\n{errors}"
        remaining = remaining.partition(expected)[2]
    assert not (folder / "own").exists()


def test_example_pipeline_file_loads():
    names = re.findall(r"\$\{(\w+)\}", EXAMPLE.read_text())
    pipeline = load(EXAMPLE, dict.fromkeys(names, "x"))
    assert set(pipeline.sources) == {"shop"}
    assert set(pipeline.materializations) == {"desk"}
