"""Scripts of directives with their expected output.

A script is blocks separated by blank lines:

    # Why this case exists.
    append writer=a lower=0 upper=5
    k1 3 +1
    ----
    appended upper=[5]

The first line is a directive with `name=value` arguments, the lines up to
`----` are its input, and the remaining lines are its expected output. `pytest --rewrite`
replaces the expected output by the actual one; review that diff. A handler may skip a
directive by returning None: its block then stays unchanged.
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


def run_script(path: Path, execute: Callable[[Directive], str | None], *, rewrite: bool) -> None:
    """Execute every directive in `path`, in order, and compare the output of each."""
    blocks = [_execute_block(block, execute) for block in path.read_text().strip().split("\n\n")]
    actual = "\n\n".join(blocks) + "\n"
    if rewrite:
        path.write_text(actual)
    expected = path.read_text()
    diff = unified_diff(
        expected.splitlines(), actual.splitlines(), "expected", "printed", lineterm=""
    )
    assert actual == expected, "\n".join([f"{path} (run with --rewrite and read the diff)", *diff])


def _execute_block(block: str, execute: Callable[[Directive], str | None]) -> str:
    directive, bar, _ = block.partition("\n----")
    if not bar:
        return block  # A comment without a directive.
    lines = [line for line in directive.split("\n") if not line.startswith("#")]
    name, *words = lines[0].split()
    args = dict(word.split("=", 1) for word in words)
    printed = execute(Directive(name, args, tuple(lines[1:])))
    if printed is None:
        return block
    assert "\n\n" not in printed, f"{name} printed a blank line, which would end its block"
    return f"{directive}\n----\n{printed}".rstrip()
