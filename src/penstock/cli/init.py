"""`penstock init`: a pipeline file from the tables of a database."""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.errors import Problem
    from penstock.sources.postgres.discovery import Candidate, Discovery

__all__ = ["init"]

STDOUT: Final = Path("-")
KINDS: Final = ("postgresql", "postgres")


def init(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="postgresql://user:password@host:5432/database")
    ],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FILE", help="Write to this file; - prints it."),
    ] = Path("penstock.yaml"),
) -> None:
    """Write a commented pipeline file for the tables of a database.

    Comments list missing prerequisites. The database is not changed. The file refers to a password
    as an environment variable.
    """
    from penstock.pgclient import connect
    from penstock.sources.postgres.config import PostgresConfig
    from penstock.sources.postgres.discovery import discover

    if url.partition("://")[0] not in KINDS:
        raise UsageError(
            "URL is not a Postgres URL",
            detail="The URL is not printed, because it may contain a password.",
            hint="Use the form postgresql://user:password@host:5432/database.",
        )
    config = PostgresConfig.parse({"url": url})
    with connect(config.parameters) as connection:
        described = discover(connection, config)
    source = _name(described.database)
    connection_lines, variables = _connection(config.parameters, source)
    text = "\n".join(_file(described, config.where, source, connection_lines)) + "\n"
    _write(text, output)
    _print_result(described, output, variables)


def _file(
    described: "Discovery", where: str, source: str, connection: Sequence[str]
) -> Iterator[str]:
    yield "# Penstock pipeline: sources, the lake that stores them, and materializations."
    yield _comment(f"Written by penstock init from {where}; edit it as you like.")
    yield "# docs/reference/pipeline-file.md describes the keys; penstock schema prints a schema."
    if described.problems:
        yield "#"
        yield "# Prerequisites that the server does not meet yet:"
        for problem in described.problems:
            yield from _explained(problem, "# - ", "#   ")
    yield ""
    yield "location: file:./penstock-data   # the lake; or s3://bucket/prefix"
    yield "tick: 1s                         # interval between times"
    yield "retain: 24h                      # history that stays readable"
    yield ""
    if any(not table.problems for table in described.tables):
        yield from _body(described, source, connection)
    else:
        # Without a list of tables, all tables would be published, and some cannot be.
        yield "# No table meets the prerequisites."
        yield from (f"# {line}".rstrip() for line in _body(described, source, connection))


def _body(described: "Discovery", source: str, connection: Sequence[str]) -> Iterator[str]:
    yield "sources:"
    yield f"  {source}:"
    yield "    postgres:"
    yield "      connection:"
    yield from (f"        {line}" for line in connection)
    missing = any(problem.message == _NO_PUBLICATION for problem in described.problems)
    note = "see above: it must be created" if missing else "created at the first start if missing"
    yield f"      publication: penstock          # {note}"
    yield "      tables:"
    for table in described.tables:
        for problem in table.problems:
            yield from _explained(problem, "        # Left out: ", "        #   ")
        for column, reason in table.omitted.items():
            yield _comment(f"column {column} is not replicated: {reason}", "        # ")
        yield f"        {_mark(table)}- {_scalar(str(table.name))}"
    yield ""
    keyless = [table for table in described.tables if not table.keyed]
    if keyless:
        yield "# These tables have no primary key: the whole row is the key."
        # A mapping with only comments would be null.
        mark = "# " if all(table.problems for table in keyless) else ""
        yield f"{mark}collections:"
        for table in keyless:
            item = f"{_scalar(_collection(source, table))}: {{key: row}}"
            yield f"{mark}  {'' if mark else _mark(table)}{item}"
        yield ""
    yield "materializations:"
    yield f"  {'local' if source != 'local' else 'target'}:"
    yield "    connector: sqlite              # see: penstock connector list"
    yield f"    endpoint: {{path: ./{source}.db}}"
    yield "    bindings:"
    for table, name in zip(described.tables, _resource_names(described.tables), strict=True):
        collection = _scalar(_collection(source, table))
        item = f"{{collection: {collection}, resource: {{table: {_scalar(name)}}}}}"
        for conflict in _conflicts(table):
            yield _comment(conflict, "      # ")
        yield f"      {_mark(table)}- {item}"


def _mark(table: "Candidate") -> str:
    return "# " if table.problems else ""


def _resource_names(tables: Sequence["Candidate"]) -> list[str]:
    """Return the table names in SQLite, which ignores case."""
    names = [table.name.name for table in tables]
    lower = [name.lower() for name in names]
    used: set[str] = set()
    resources = []
    for table, name in zip(tables, names, strict=True):
        if lower.count(name.lower()) > 1 or name.lower().startswith(("sqlite_", "flow_")):
            name = f"{table.name.schema}_{name}"
        number, prefix = 1, name
        while name.lower() in used:
            number += 1
            name = f"{prefix}_{number}"
        used.add(name.lower())
        resources.append(name)
    return resources


def _conflicts(table: "Candidate") -> Iterator[str]:
    """Yield a line for each set of columns whose names are equal in SQLite."""
    by_name: dict[str, list[str]] = {}
    for column in table.columns:
        by_name.setdefault(column.encode().lower().decode(), []).append(column)
    for columns in by_name.values():
        if len(columns) > 1:
            yield (
                f"columns {', '.join(columns)} of {table.name} differ only in case: "
                "SQLite gets the first of them that is selected"
            )


def _collection(source: str, table: "Candidate") -> str:
    from penstock.data.collection_name import compose_name

    return compose_name(source, table.name.schema, table.name.name)


def _connection(parameters: Mapping[str, str], source: str) -> tuple[list[str], list[str]]:
    """Return the lines of a connection, and the variables that replace its secrets."""
    from penstock.pgclient import SECRETS

    lines, variables = [], []
    for name, value in parameters.items():
        if name in SECRETS:
            variables.append(re.sub("[^A-Z0-9_]", "_", f"{source}_{name}".upper()))
            lines.append(f"{name}: ${{{variables[-1]}}}")
        else:
            lines.append(f"{name}: {value if _NUMBER.fullmatch(value) else _scalar(value)}")
    return lines, variables


def _name(database: str) -> str:
    """Return a name for a source of this database."""
    name = re.sub(r"[^A-Za-z0-9_-]", "_", database)[:50]
    return name if re.match("[A-Za-z_]", name) else f"db_{name}"


_NO_PUBLICATION: Final = 'publication "penstock" does not exist'
_NUMBER: Final = re.compile("[1-9][0-9]{0,9}")


def _scalar(text: str) -> str:
    """Return `text` as a YAML scalar for a flow collection, with variables escaped."""
    from penstock.pipeline import escape

    style = None if text.isprintable() else '"'
    import yaml

    dumped = yaml.safe_dump(
        [escape(text)], default_flow_style=True, default_style=style, width=1 << 30
    )
    return dumped.strip()[1:-1]


def _explained(problem: "Problem", first: str, second: str) -> Iterator[str]:
    yield _comment(f"{problem.message}. {problem.detail}".rstrip(), first)
    yield _comment(problem.hint, second)


def _comment(text: str, start: str = "# ") -> str:
    """Return a comment line. Characters that end a line or are invalid in YAML are replaced."""
    replacement = "\N{REPLACEMENT CHARACTER}"
    return start + "".join(char if char.isprintable() else replacement for char in text)


def _write(text: str, output: Path) -> None:
    if output == STDOUT:
        print(text, end="")
        return
    try:
        with output.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise UsageError(
            f'file "{output}" already exists',
            hint="Use another name with --output, or print the file with --output -.",
        ) from error
    except OSError as error:
        raise UsageError(
            f'could not write file "{output}"',
            detail=f"{error.strerror}.",
            hint="Use another name with --output.",
        ) from error


def _print_result(described: "Discovery", output: Path, variables: Sequence[str]) -> None:
    printed = output == STDOUT
    stream = sys.stderr if printed else sys.stdout
    left_out = sum(bool(table.problems) for table in described.tables)
    summary = f"{len(described.tables) - left_out} tables to replicate"
    if left_out:
        summary += f", {left_out} left out; the file lists the reasons"
    print(summary if printed else f"wrote {output}: {summary}", file=stream)
    for table in described.tables:
        for column, reason in table.omitted.items():
            name = _comment(f"{table.name}.{column}", "")
            print(f"column {name} is not replicated: {reason}", file=stream)
        for conflict in _conflicts(table):
            print(_comment(conflict, ""), file=stream)
    if left_out == len(described.tables):
        print("run the statements in the file, then run init again", file=stream)
        return
    print("next:", file=stream)
    if described.problems:
        print(
            "  meet the prerequisites at the top of the file: the server is not ready", file=stream
        )
    for name in variables:
        print(f"  export {name}=…   # verbatim, without URL encoding", file=stream)
    print(f"  penstock up {'FILE' if printed else output}", file=stream)
