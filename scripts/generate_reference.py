"""Write the tables of the reference pages that are generated from code.

    python scripts/generate_reference.py [--check]

A page marks the place of a table:

    <!-- generated: settings -->
    …
    <!-- end -->

With `--check`, nothing is written, and the exit status is 1 if a page differs.
"""

import argparse
import ast
import difflib
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from typer.main import get_command

from penstock.cli.main import app
from penstock.failpoints import Failpoint
from penstock.persist import Settings
from penstock.web.metrics import METRICS

ROOT: Final = Path(__file__).parents[1]
BLOCK: Final = re.compile(r"<!-- generated: ([\w -]+) -->\n.*?<!-- end -->", re.DOTALL)


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the generated tables of the pages.")
    parser.add_argument("--check", action="store_true", help="Write nothing; fail on differences.")
    is_check = parser.parse_args().check
    differs = False
    count = 0
    for page in sorted((ROOT / "docs").rglob("*.md")):
        stored = page.read_text()
        current, blocks = BLOCK.subn(generated_block, stored)
        count += blocks
        if current != stored:
            differs = True
            if is_check:
                sys.stdout.writelines(difference(page, stored, current))
            else:
                page.write_text(current)
    if not count:
        raise SystemExit("no page has a generated table")
    if differs and is_check:
        sys.stderr.write("error: pages differ from the code\nhint: Run: make reference\n")
    return int(differs and is_check)


def generated_block(match: re.Match[str]) -> str:
    name, _, argument = match[1].partition(" ")
    if name not in TABLES:
        raise SystemExit(f'no table "{name}"; there are {", ".join(TABLES)}')
    return f"<!-- generated: {match[1]} -->\n{TABLES[name](argument)}\n<!-- end -->"


def difference(page: Path, stored: str, current: str) -> Iterable[str]:
    name = str(page.relative_to(ROOT))
    return difflib.unified_diff(
        stored.splitlines(keepends=True), current.splitlines(keepends=True), name, name
    )


def settings(_: str) -> str:
    """Return the fields of `Settings`, with their docstrings."""
    docs = field_docs(Settings)
    rows = [
        (f"`{name}`", f"`{default_of(parameter)}`", docs[name])
        for name, parameter in inspect.signature(Settings).parameters.items()
    ]
    return table(("Setting", "Default", "Meaning"), rows)


def default_of(parameter: inspect.Parameter) -> str:
    value = parameter.default
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:_}"
    if value is None or isinstance(value, bool | str):
        return repr(value).replace("'", '"')
    return "the system's"


def metrics(_: str) -> str:
    """Return all metrics with their labels and help texts."""
    rows = [
        (f"`{metric.name}`", ", ".join(f"`{label}`" for label in metric.labels), metric.help)
        for metric in METRICS
    ]
    return table(("Metric", "Labels", "Meaning"), rows)


def failpoints(_: str) -> str:
    """Return all failpoints with their docstrings."""
    docs = field_docs(Failpoint)
    return table(
        ("Failpoint", "Position"), [(f"`{point}`", docs[point.name]) for point in Failpoint]
    )


def cli(path: str) -> str:
    """Return usage and options of a command, such as `connector check`."""
    command: Any = get_command(app)
    for name in path.split():
        command = command.commands[name]
    parameters = [item for item in command.params if not getattr(item, "hidden", False)]
    usage = " ".join([f"penstock {path}", *map(usage_of, parameters)])
    rows = [(f"`{names_of(parameter)}`", parameter.help or "") for parameter in parameters]
    options = "\n\n" + table(("Argument", "Meaning"), rows) if rows else ""
    lines = textwrap.wrap(usage, 110, break_long_words=False, break_on_hyphens=False)
    return "\n        ".join(["    " + lines[0], *lines[1:]]) + options


def usage_of(parameter: Any) -> str:
    name = names_of(parameter).replace(", --no-", "/--no-")
    name = re.sub(r", -\w\b", "", name)
    dots = "…" if parameter.nargs == -1 or getattr(parameter, "multiple", False) else ""
    return f"{name}{dots}" if parameter.required else f"[{name}]{dots}"


def names_of(parameter: Any) -> str:
    metavar = parameter.metavar or parameter.name.upper()
    if parameter.param_type_name == "argument":
        return str(metavar)
    names = ", ".join([*parameter.opts, *parameter.secondary_opts])
    return names if parameter.is_flag else f"{names} {metavar}"


def field_docs(kind: type) -> dict[str, str]:
    """Return the docstring below each field of a class, on one line."""
    (body,) = [
        node.body
        for node in ast.parse(inspect.getsource(inspect.getmodule(kind))).body
        if isinstance(node, ast.ClassDef) and node.name == kind.__name__
    ]
    docs = {}
    for field, doc in pairwise(body):
        match field, doc:
            case (
                (ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)])),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                docs[name] = " ".join(text.split())
    return docs


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines).replace(" --- ", "---")


TABLES: Final[dict[str, Callable[[str], str]]] = {
    "settings": settings,
    "metrics": metrics,
    "failpoints": failpoints,
    "cli": cli,
}


if __name__ == "__main__":
    sys.exit(main())
