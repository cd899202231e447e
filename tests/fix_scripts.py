"""Scripts of several steps in tests/scripts/, run by `datadriven`.

A test calls the fixture `script` with a path and a function that executes directives:

    @pytest.mark.parametrize("path", stories("persist"), ids=lambda path: path.stem)
    def test_script(path, script):
        script(path, Shop().obey)
"""

from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from tests.datadriven import Directive, run_script

__all__ = ["Script", "stories"]

Script = Callable[[Path, Callable[[Directive], str | None]], None]

SCRIPTS: Final = Path(__file__).parent / "scripts"


def stories(package: str) -> list[Path]:
    """Return the scripts of one package, sorted by name; at least one."""
    paths = sorted((SCRIPTS / package).glob("*.txt"))
    assert paths, f"no scripts in {SCRIPTS / package}"
    return paths


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite",
        action="store_true",
        help="Replace the expected output of scripts by the actual output.",
    )


@pytest.fixture
def script(request: pytest.FixtureRequest) -> Script:
    """Return a function that runs one script, or with `--rewrite` rewrites its output."""
    rewrite = bool(request.config.getoption("--rewrite"))

    def run(path: Path, execute: Callable[[Directive], str | None]) -> None:
        run_script(path, execute, rewrite=rewrite)

    return run
