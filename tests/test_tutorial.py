"""The first tutorial, typed as it stands: a server, the command line, SQLite, kill -9."""

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
    """Where a server's user can get to, who is not root, by a path that is not too long."""
    with tempfile.TemporaryDirectory(prefix="penstock-tutorial-") as made:
        Path(made).chmod(0o711)
        yield Path(made)


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.timeout(1_800)  # Two sessions of Spark, and a dozen commands.
def test_the_tutorial_is_typed_and_prints_what_it_shows(folder: Path):
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
        printed, said = typed.communicate()
    finally:
        if typed.poll() is None:
            os.killpg(typed.pid, signal.SIGKILL)
    assert typed.returncode == 0, printed + said
    rest = printed
    for shown in blocks("text"):
        assert shown in rest, f"{shown}is not in what follows:\n{rest}\n{said}"
        rest = rest.partition(shown)[2]
    assert not (folder / "own").exists()


def test_the_folder_to_copy_from_can_be_loaded():
    names = re.findall(r"\$\{(\w+)\}", EXAMPLE.read_text())
    pipeline = load(EXAMPLE, dict.fromkeys(names, "x"))
    assert set(pipeline.sources) == {"shop"}
    assert set(pipeline.materializations) == {"desk"}
