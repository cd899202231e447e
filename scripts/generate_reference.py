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
import dataclasses
import difflib
import inspect
import re
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import grpc_tools
import psycopg.postgres
import pyarrow as pa
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorSet
from grpc_tools import protoc
from pyspark.sql.pandas.types import (  # noqa: TID251 - Runs without a session.
    from_arrow_schema,
)
from typer.main import get_command

from penstock.cli.main import app
from penstock.connectors.postgres.dialect import PostgresDialect
from penstock.connectors.sqlite.dialect import SqliteDialect
from penstock.data.schema import LABEL
from penstock.data.spark_types import to_spark_schema
from penstock.errors import PenstockError
from penstock.failpoints import Failpoint
from penstock.materialize.row_encoder import build_row_spec
from penstock.persist import Settings
from penstock.protocol._generated import flow_pb2, materialize_pb2
from penstock.sdk.bindings import projected
from penstock.sources.postgres.catalog_types import PgColumn, PgType
from penstock.sources.postgres.types import column_type
from penstock.testing.conformance import CHECKS
from penstock.web.metrics import METRICS

ROOT: Final = Path(__file__).parents[1]
BLOCK: Final = re.compile(r"<!-- generated: ([\w .-]+) -->\n.*?<!-- end -->", re.DOTALL)

ERROR_TREES: Final = (
    "penstock.errors",
    "penstock.persist.errors",
    "penstock.materialize.errors",
    "penstock.protocol.errors",
    "penstock.sdk.errors",
    "penstock.sources.postgres.errors",
    "penstock.sources.kafka.errors",
)
"""Modules whose docstring draws a part of the error tree."""

TREE_LINE: Final = re.compile(r" {4}((?:[│ ] {3})*)(?:[├└]── )?(\w+)(?: +[^→]*→ (.*))?")

NUMERIC_OID: Final = 1700

INTERNAL_MEMBERS: Final = frozenset(
    {"penstock.persist.Client.committer", "penstock.persist.Client.share_staged"}
)
"""Members for other packages of this project."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the generated tables of the pages.")
    parser.add_argument("--check", action="store_true", help="Write nothing; fail on differences.")
    is_check = parser.parse_args().check
    differs = False
    rendered: set[str] = set()
    for page in sorted((ROOT / "docs").rglob("*.md")):
        stored = page.read_text()
        current = BLOCK.sub(generated_block, stored)
        rendered.update(match[1] for match in BLOCK.finditer(stored))
        if current != stored:
            differs = True
            if is_check:
                sys.stdout.writelines(difference(page, stored, current))
            else:
                page.write_text(current)
    check_complete(rendered)
    if differs and is_check:
        sys.stderr.write("error: pages differ from the code\nhint: Run: make reference\n")
    return int(differs and is_check)


def check_complete(rendered: Iterable[str]) -> None:
    """Exit if a table, a command or a message of the wire is on no page."""
    words = [block.split() for block in rendered]
    messages = {name for table_name, *names in words if table_name == "protocol" for name in names}
    expected = {f"cli {path}" for path in cli_commands()} | TABLES.keys() - {"cli"}
    missing = expected - {*rendered} - {table_name for table_name, *_ in words}
    missing |= wire_messages() - messages
    if missing:
        raise SystemExit(f"no page has a generated block for: {', '.join(sorted(missing))}")


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
    """Return usage of a command, such as `connector check`, and the options that are its own."""
    parameters = parameters_of(cli_commands()[path])
    usage = " ".join([f"penstock {path}", *map(usage_of, parameters)])
    shared = shared_rows()
    rows = [row for row in map(parameter_row, parameters) if row not in shared]
    options = "\n\n" + table(("Argument", "Meaning"), rows) if rows else ""
    lines = textwrap.wrap(usage, 110, break_long_words=False, break_on_hyphens=False)
    return "\n        ".join(["    " + lines[0], *lines[1:]]) + options


def shared_arguments(_: str) -> str:
    """Return the arguments and options of at least three commands."""
    return table(("Argument", "Meaning"), shared_rows())


@cache
def shared_rows() -> Sequence[tuple[str, str]]:
    rows = [
        parameter_row(parameter)
        for command in cli_commands().values()
        for parameter in parameters_of(command)
    ]
    return sorted({row for row in rows if rows.count(row) > 2}, key=rows.index)


@cache
def cli_commands() -> Mapping[str, Any]:
    """Return each command as typed; the commands of a group after its name."""
    program: Any = get_command(app)
    commands = {}
    for name in program.list_commands(None):
        command = program.get_command(None, name)
        inner = getattr(command, "commands", {})
        commands |= {f"{name} {part}": inner[part] for part in inner} or {name: command}
    return commands


def parameters_of(command: Any) -> Sequence[Any]:
    return [item for item in command.params if not getattr(item, "hidden", False)]


def parameter_row(parameter: Any) -> tuple[str, str]:
    return f"`{names_of(parameter)}`", parameter.help or ""


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


def api(name: str) -> str:
    """Return the public functions and classes of a module, except errors, without types."""
    module = import_module(name)
    public = {name: getattr(module, name) for name in module.__all__}
    rows = [
        (f"`{call_of(kind, name)}`", summary_of(kind))
        for name, kind in public.items()
        if callable(kind) and (not inspect.isclass(kind) or not issubclass(kind, Exception))
    ]
    return table(("Name", "Meaning"), rows)


def members(path: str) -> str:
    """Return the methods and properties of a class, without types."""
    module, _, name = path.rpartition(".")
    kind = getattr(import_module(module), name)
    rows = [
        (
            f"`{member}`" if isinstance(value, property) else f"`{call_of(value, member)}`",
            summary_of(value),
        )
        for member, value in vars(kind).items()
        if not member.startswith("_") and path + "." + member not in INTERNAL_MEMBERS
        if isinstance(value, property) or inspect.isfunction(value)
    ]
    return table(("Member", "Meaning"), rows)


def call_of(kind: Any, name: str) -> str:
    """Return a signature without types; of a class the fields, if it has any."""
    fields = [field.name for field in dataclasses.fields(kind)] if is_plain(kind) else []
    if fields:
        return f"{name}({', '.join(fields)})"
    if inspect.isclass(kind):
        return name
    given = inspect.signature(kind)
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in given.parameters.values()
        if parameter.name not in ("self", "clock")  # The clock is for tests.
    ]
    bare = str(given.replace(parameters=parameters, return_annotation=given.empty))
    return name + re.sub(r"<(\w+\.\w+): .*?>", r"\1", bare)  # The default may be an enum value.


def is_plain(kind: Any) -> bool:
    """Return whether a class is a dataclass without a page of its own, as `Settings` has."""
    return dataclasses.is_dataclass(kind) and kind is not Settings


def summary_of(value: Any) -> str:
    text = (inspect.getdoc(value) or "").partition("\n\n")[0]
    return " ".join(text.split())


def errors(modules: str) -> str:
    """Return the public errors of these modules, with docstrings and actions from the trees."""
    actions = error_actions()
    rows = []
    for module in map(import_module, modules.split()):
        for kind in public_errors(module):
            action = next((actions[base] for base in kind.__mro__ if base in actions), "")
            base = "" if kind is PenstockError else f"`{kind.__bases__[0].__name__}`"
            text = " ".join((kind.__doc__ or "").split())
            rows.append((f"`{kind.__name__}`", kind.sqlstate, base, text, sentence(action)))
    return table(("Error", "SQLSTATE", "Base", "Meaning", "Action"), rows)


@cache
def error_actions() -> Mapping[type, str]:
    """Return the action of each class in the trees, which must agree with the class hierarchy."""
    actions = {}
    for module in map(import_module, ERROR_TREES):
        ancestors: list[type] = []
        for line in (module.__doc__ or "").splitlines():
            if not (match := TREE_LINE.fullmatch(line)):
                continue
            kind = getattr(module, match[2])
            depth = len(match[1]) // 4 + ("── " in line)
            ancestors[depth:] = [kind]
            if depth and ancestors[depth - 1] not in kind.__bases__:
                raise SystemExit(f"tree of {module.__name__}: wrong base of {kind.__name__}")
            if match[3]:
                actions[kind] = match[3]
        for kind in public_errors(module):
            if kind not in actions and not any(issubclass(other, kind) for other in actions):
                raise SystemExit(f"tree of {module.__name__} has no action for {kind.__name__}")
    return actions


def types(_: str) -> str:
    """Return the Postgres types with their Arrow, Spark and endpoint types, by equal mapping."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for column, name in example_columns():
        stored = column_type(column, text=False)
        field = pa.field("c", stored.arrow, metadata={LABEL: stored.label})
        schema = pa.schema([pa.field("id", pa.int64(), nullable=False), field])
        _, endpoint_field, _ = projected(build_row_spec("t", schema, ["id"]), {})
        [spark] = from_arrow_schema(to_spark_schema(pa.schema([field])), prefer_timestamp_ntz=True)
        mapping = (
            f"`{stored.arrow}`",
            f"`{spark.dataType.simpleString()}`",
            f"`{SqliteDialect().column_type(endpoint_field)}`",
            f"`{PostgresDialect().column_type(endpoint_field)}`",
        )
        groups.setdefault(mapping, []).append(f"`{name}`")
    rows = [(", ".join(names), *mapping) for mapping, names in groups.items()]
    head = ("Postgres", "Arrow", "Spark", "SQLite endpoint", "Postgres endpoint without the type")
    return table(head, rows)


def example_columns() -> Iterator[tuple[PgColumn, str]]:
    """Yield a column of each type that psycopg knows, and of types with special rules."""
    numeric = PgType(NUMERIC_OID, "numeric", "b", "N")
    integer = PgType(23, "integer", "b", "N")
    for info in psycopg.postgres.types:
        yield PgColumn("c", 2, PgType(info.oid, info.regtype, "b", "")), info.regtype
    yield PgColumn("c", 2, numeric, typmod=(10 << 16 | 2) + 4), "numeric(10,2)"
    yield PgColumn("c", 2, PgType(1007, "integer[]", "b", "A", element=integer)), "integer[]"


def protocol(names: str) -> str:
    """Return the fields of these messages, with the comments of the .proto files."""
    return "\n\n".join(map(message_table, names.split()))


def message_table(name: str) -> str:
    message = find_message(name)
    comments = proto_comments()
    caption = f"`{name}`" + (f": {text}" if (text := comments.get(message.full_name)) else "")
    if isinstance(message, EnumDescriptor):
        values = [
            (
                f"`{value.name}`",
                str(value.number),
                comments.get(f"{message.full_name}.{value.name}", ""),
            )
            for value in message.values
        ]
        return f"{caption}\n\n" + table(("Value", "Number", "Meaning"), values)
    if not message.fields:
        return f"{caption}: no fields."
    rows = [
        (
            f"`{field.name}`",
            str(field.number),
            f"`{proto_type(field)}`",
            comments.get(field.full_name, ""),
        )
        for field in message.fields
    ]
    return f"{caption}\n\n" + table(("Field", "Number", "Type", "Meaning"), rows)


def wire_messages() -> set[str]:
    """Return the names of the messages of materialize.proto, except those of a library."""

    def within(message: Descriptor) -> Iterator[str]:
        if not message.GetOptions().map_entry:
            yield message.full_name.removeprefix("materialize.")
            for inner in message.nested_types:
                yield from within(inner)

    top = materialize_pb2.DESCRIPTOR.message_types_by_name
    return {name for message in top.values() if message.name != "Extra" for name in within(message)}


def find_message(name: str) -> Descriptor | EnumDescriptor:
    module = flow_pb2 if name.startswith("flow.") else materialize_pb2
    first, *inner = name.removeprefix("flow.").split(".")
    message = module.DESCRIPTOR.message_types_by_name[first]
    for part in inner:
        message = {**message.nested_types_by_name, **message.enum_types_by_name}[part]
    return message


def proto_type(field: FieldDescriptor) -> str:
    """Return the type of a field as a .proto file spells it."""
    if field.message_type and field.message_type.GetOptions().map_entry:
        key, value = (proto_type(field.message_type.fields_by_name[n]) for n in ("key", "value"))
        return f"map<{key}, {value}>"
    other = field.message_type or field.enum_type
    name = other.full_name.removeprefix("materialize.") if other else SCALARS[field.type]
    return f"repeated {name}" if field.is_repeated else name


@cache
def proto_comments() -> Mapping[str, str]:
    """Return the comments of messages, fields and enum values, by full name."""
    with tempfile.NamedTemporaryFile() as file:
        folder = ROOT / "proto"
        well_known = Path(grpc_tools.__file__).parent / "_proto"
        options = [f"-I{folder}", f"-I{well_known}", "--include_source_info"]
        options += [f"--descriptor_set_out={file.name}"]
        sources = [str(source) for source in sorted(folder.glob("*.proto"))]
        if protoc.main(["protoc", *options, *sources]):
            raise SystemExit("protoc failed")
        files = FileDescriptorSet.FromString(file.read()).file
    comments = {}
    for source in files:
        for location in source.source_code_info.location:
            if location.leading_comments:
                node, path = source, [source.package]
                for name, index in zip(*[iter(location.path)] * 2, strict=False):
                    node = getattr(node, node.DESCRIPTOR.fields_by_number[name].name)[index]
                    path.append(node.name)
                comments[".".join(path)] = " ".join(location.leading_comments.split())
    return comments


def checks(_: str) -> str:
    """Return the names of the conformance checks, by the section that has their rule."""
    sections: dict[str, list[str]] = {}
    for check in CHECKS.values():
        sections.setdefault(check.source.removeprefix("protocol, "), []).append(f"`{check.name}`")
    rows = [(f"[{name}](#{name.lower()})", ", ".join(names)) for name, names in sections.items()]
    return table(("Section", "Checks"), rows)


def public_errors(module: ModuleType) -> Sequence[type[PenstockError]]:
    """Return the error classes that a module exports, in the order of their definition."""
    public = [getattr(module, name) for name in module.__all__]
    kinds = [v for v in public if isinstance(v, type) and issubclass(v, PenstockError)]
    return sorted(kinds, key=lambda kind: inspect.getsourcelines(kind)[1])


def sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}." if text else ""


SCALARS: Final = {
    number: name.removeprefix("TYPE_").lower() for name, number in FieldDescriptorProto.Type.items()
}
"""Names of the scalar types of protobuf."""


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
    "shared-arguments": shared_arguments,
    "api": api,
    "members": members,
    "errors": errors,
    "types": types,
    "protocol": protocol,
    "checks": checks,
}


if __name__ == "__main__":
    sys.exit(main())
