"""Run a script of directives and compare what each one prints.

A script is blocks separated by blank lines:

    # Why this case exists.
    append writer=a lower=0 upper=5
    k1 3 +1
    ----
    appended upper=[5]

The first line is a directive with `name=value` arguments, the lines up to
`----` are its input, and the rest is what it must print. `pytest --rewrite`
writes down what it did print; read that diff as carefully as code. Whoever obeys
may leave a directive out, and answer None: then it stays as it is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path

__all__ = ["Directive", "run_script"]


@dataclass(frozen=True, slots=True)
class Directive:
    """One block of a script, before its expected output."""

    name: str
    args: dict[str, str]
    input: tuple[str, ...]


def run_script(path: Path, obey: Callable[[Directive], str | None], *, rewrite: bool) -> None:
    """Obey every directive in `path`, in order, and check what each prints."""
    blocks = [_obeyed(block, obey) for block in path.read_text().strip().split("\n\n")]
    actual = "\n\n".join(blocks) + "\n"
    if rewrite:
        path.write_text(actual)
    expected = path.read_text()
    diff = unified_diff(expected.splitlines(), actual.splitlines(), "said", "printed", lineterm="")
    assert actual == expected, "\n".join([f"{path} (run with --rewrite and read the diff)", *diff])


def _obeyed(block: str, obey: Callable[[Directive], str | None]) -> str:
    said, bar, _ = block.partition("\n----")
    if not bar:
        return block  # A comment standing alone.
    lines = [line for line in said.split("\n") if not line.startswith("#")]
    name, *words = lines[0].split()
    args = dict(word.split("=", 1) for word in words)
    printed = obey(Directive(name, args, tuple(lines[1:])))
    if printed is None:
        return block
    assert "\n\n" not in printed, f"{name} printed a blank line, which would end its block"
    return f"{said}\n----\n{printed}".rstrip()
