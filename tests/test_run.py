"""The test run that repeats failed tests marked `timing`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

FAILS_FIRST = """
import pathlib, pytest
HERE = pathlib.Path(__file__).parent

def fails_first(name):
    count = len(list(HERE.glob(f"{name}-*")))
    (HERE / f"{name}-{count}").touch()
    assert count, "the first attempt fails"

@pytest.mark.timing(reason="fails at its first attempt")
def test_late(): fails_first("late")
"""

FAILS_ALWAYS = """
import pytest

@pytest.mark.timing(reason="fails always")
def test_never(): assert False
"""

UNMARKED = """
def test_defect(): fails_first("defect")
"""

NO_REASON = """
@pytest.mark.timing
def test_marked_without_reason(): pass
"""


@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize(
    ("module", "status", "flaky"),
    [
        (FAILS_FIRST, 0, True),
        (FAILS_FIRST + UNMARKED, 1, False),
        (FAILS_ALWAYS, 1, False),
        (FAILS_FIRST + NO_REASON, 1, False),
    ],
    ids=["passes-alone", "with-unmarked-failure", "fails-alone", "without-reason"],
)
def test_run_accepts_a_failure_only_if_it_is_marked_and_passes_alone(
    tmp_path: Path, module: str, status: int, flaky: bool, workers: str
) -> None:
    (tmp_path / "test_case.py").write_text(module)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = timing(reason)\n")
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["tests.fix_timing"]\n')
    run = subprocess.run(
        [sys.executable, "-m", "tests.run", "-p", "no:cacheprovider", "-n", workers],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == status, run.stdout + run.stderr
    assert ("FLAKY test_case.py::test_late" in run.stdout) is flaky


WRITES_BYTECODE = """
import sys

def test_bytecode_is_written(): assert not sys.dont_write_bytecode
"""


def test_run_writes_bytecode_although_the_environment_forbids_it(tmp_path: Path) -> None:
    (tmp_path / "test_case.py").write_text(WRITES_BYTECODE)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    run = subprocess.run(
        [sys.executable, "-m", "tests.run", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
