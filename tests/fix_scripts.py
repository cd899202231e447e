"""Scripts: stories of several steps, told in tests/scripts/ and run by `datadriven`.

A test takes `script` and hands it the story and whoever obeys its directives:

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


def stories(room: str) -> list[Path]:
    """The scripts of one room, in order of name; at least one."""
    found = sorted((SCRIPTS / room).glob("*.txt"))
    assert found, f"no scripts in {SCRIPTS / room}"
    return found


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite",
        action="store_true",
        help="write what scripts printed into them instead of comparing; read the diff",
    )


@pytest.fixture
def script(request: pytest.FixtureRequest) -> Script:
    """Run one script, or with `--rewrite` write down what it printed."""
    rewrite = bool(request.config.getoption("--rewrite"))

    def run(path: Path, obey: Callable[[Directive], str | None]) -> None:
        run_script(path, obey, rewrite=rewrite)

    return run
