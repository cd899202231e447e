"""`penstock init`: a pipeline's file, made from a database."""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.errors import Problem
    from penstock.sources.postgres.describing import Candidate, Described

__all__ = ["init"]

STDOUT: Final = Path("-")
KINDS: Final = ("postgresql", "postgres")


def init(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="postgresql://user:password@host:5432/database")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where to; - prints it.")
    ] = Path("penstock.yaml"),
) -> None:
    """Write a commented FILE from a database: its tables, and what it lacks to be followed.

    The database is only looked at. A password is not written, but asked for as a variable.
    """
    from penstock.sources.postgres.config import PostgresConfig
    from penstock.sources.postgres.connect import connect
    from penstock.sources.postgres.describing import look

    if url.partition("://")[0] not in KINDS:
        raise UsageError(
            "cannot make a file from this URL: it is not of a Postgres",
            detail="It is not shown, for it may hold a password.",
            hint="Write it like postgresql://user:password@host:5432/database.",
        )
    config = PostgresConfig.parse({"url": url})
    with connect(config.parameters) as connection:
        described = look(connection, config)
    source = _name(described.database)
    connection_lines, variables = _connection(config.parameters, source)
    text = "\n".join(_file(described, config.where, source, connection_lines)) + "\n"
    _write(text, output)
    _tell(described, output, variables)


def _file(
    described: "Described", where: str, source: str, connection: Sequence[str]
) -> Iterator[str]:
    yield "# A Penstock pipeline: what is followed, where it is kept, and where it goes."
    yield _comment(f"Made by penstock init from {where}; change it as you like.")
    yield "# docs/reference/pipeline-file.md says what each key takes; penstock schema, to editors."
    if described.problems:
        yield "#"
        yield "# Before it can start, the server lacks this:"
        for problem in described.problems:
            yield from _explained(problem, "# - ", "#   ")
    yield ""
    yield "location: file:./penstock-data   # the lake; or s3://bucket/prefix"
    yield "tick: 1s                         # how often times are sealed"
    yield "retain: 24h                      # how far back collections can be read"
    yield ""
    if any(not each.problems for each in described.tables):
        yield from _body(described, source, connection)
    else:
        # Without tables, all would be followed, and published, which not every table can bear.
        yield "# There is no table that can be followed as it is."
        yield from (f"# {line}".rstrip() for line in _body(described, source, connection))


def _body(described: "Described", source: str, connection: Sequence[str]) -> Iterator[str]:
    yield "sources:"
    yield f"  {source}:"
    yield "    postgres:"
    yield "      connection:"
    yield from (f"        {line}" for line in connection)
    missing = any(each.message == _NO_PUBLICATION for each in described.problems)
    made = "see above: it must be created" if missing else "created at the first start, if need be"
    yield f"      publication: penstock          # {made}"
    yield "      tables:"
    for each in described.tables:
        for problem in each.problems:
            yield from _explained(problem, "        # Left out: ", "        #   ")
        for column, why in each.omitted.items():
            yield _comment(f"column {column} is not replicated: {why}", "        # ")
        yield f"        {_mark(each)}- {_scalar(str(each.name))}"
    yield ""
    keyless = [each for each in described.tables if not each.keyed]
    if keyless:
        yield "# No primary key tells the rows of these apart; each row as a whole does."
        # A mapping of which all is commented out would be none.
        whole = "# " if all(each.problems for each in keyless) else ""
        yield f"{whole}collections:"
        for each in keyless:
            item = f"{_scalar(_collection(source, each))}: {{key: row}}"
            yield f"{whole}  {'' if whole else _mark(each)}{item}"
        yield ""
    yield "materializations:"
    yield f"  {'local' if source != 'local' else 'target'}:"
    yield "    connector: sqlite              # see: penstock connector list"
    yield f"    endpoint: {{path: ./{source}.db}}"
    yield "    bindings:"
    for each, table in zip(described.tables, _targets(described.tables), strict=True):
        collection = _scalar(_collection(source, each))
        item = f"{{collection: {collection}, resource: {{table: {_scalar(table)}}}}}"
        for conflict in _conflicts(each):
            yield _comment(conflict, "      # ")
        yield f"      {_mark(each)}- {item}"


def _mark(table: "Candidate") -> str:
    return "# " if table.problems else ""


def _targets(tables: Sequence["Candidate"]) -> list[str]:
    """What tables are called in SQLite, which tells names apart by more than case."""
    names = [each.name.name for each in tables]
    lower = [name.lower() for name in names]
    taken: set[str] = set()
    targets = []
    for each, name in zip(tables, names, strict=True):
        if lower.count(name.lower()) > 1 or name.lower().startswith(("sqlite_", "flow_")):
            name = f"{each.name.schema}_{name}"
        number, plain = 1, name
        while name.lower() in taken:
            number += 1
            name = f"{plain}_{number}"
        taken.add(name.lower())
        targets.append(name)
    return targets


def _conflicts(table: "Candidate") -> Iterator[str]:
    """Yield a line about each set of columns that SQLite cannot tell apart."""
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
    """The lines of a connection, and the variables in place of its secrets."""
    from penstock.sources.postgres.config import SECRETS

    lines, variables = [], []
    for name, value in parameters.items():
        if name in SECRETS:
            variables.append(re.sub("[^A-Z0-9_]", "_", f"{source}_{name}".upper()))
            lines.append(f"{name}: ${{{variables[-1]}}}")
        else:
            lines.append(f"{name}: {value if _NUMBER.fullmatch(value) else _scalar(value)}")
    return lines, variables


def _name(database: str) -> str:
    """What to call a source of this database."""
    name = re.sub(r"[^A-Za-z0-9_-]", "_", database)[:50]
    return name if re.match("[A-Za-z_]", name) else f"db_{name}"


_NO_PUBLICATION: Final = 'publication "penstock" does not exist'
_NUMBER: Final = re.compile("[1-9][0-9]{0,9}")


def _scalar(text: str) -> str:
    """`text` as YAML has it within a list or mapping on one line, and without variables in it."""
    from penstock.pipeline.yaml_text import escape

    style = None if text.isprintable() else '"'
    import yaml

    made = yaml.safe_dump(
        [escape(text)], default_flow_style=True, default_style=style, width=1 << 30
    )
    return made.strip()[1:-1]


def _explained(problem: "Problem", first: str, second: str) -> Iterator[str]:
    yield _comment(f"{problem.message}. {problem.detail}".rstrip(), first)
    yield _comment(problem.hint, second)


def _comment(text: str, start: str = "# ") -> str:
    """Names may hold what ends a line, or what YAML takes nowhere."""
    unfit = "\N{REPLACEMENT CHARACTER}"
    return start + "".join(each if each.isprintable() else unfit for each in text)


def _write(text: str, output: Path) -> None:
    if output == STDOUT:
        print(text, end="")
        return
    try:
        with output.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise UsageError(
            f'file "{output}" is there already, and is left as it is',
            hint="Name another with --output, or print it with --output -.",
        ) from error
    except OSError as error:
        raise UsageError(
            f'file "{output}" cannot be written',
            detail=f"{error.strerror}.",
            hint="Name another with --output.",
        ) from error


def _tell(described: "Described", output: Path, variables: Sequence[str]) -> None:
    printed = output == STDOUT
    stream = sys.stderr if printed else sys.stdout
    left_out = sum(bool(each.problems) for each in described.tables)
    told = f"{len(described.tables) - left_out} tables to follow"
    if left_out:
        told += f", {left_out} left out, with what to do about them"
    print(told if printed else f"wrote {output}: {told}", file=stream)
    for table in described.tables:
        for column, why in table.omitted.items():
            name = _comment(f"{table.name}.{column}", "")
            print(f"column {name} is not replicated: {why}", file=stream)
        for conflict in _conflicts(table):
            print(_comment(conflict, ""), file=stream)
    if left_out == len(described.tables):
        print("do what the file says, and make it anew", file=stream)
        return
    print("next:", file=stream)
    if described.problems:
        print("  do what stands at the top of the file: the server is not ready", file=stream)
    for name in variables:
        print(f"  export {name}=…   # as it is, without the % codes of a URL", file=stream)
    print(f"  penstock up {'FILE' if printed else output}", file=stream)
