"""Consistency of the reference pages with protocol, connectors and conformance suite."""

import re
import tomllib
from importlib import import_module
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pydantic
import pytest
from pydantic_core import PydanticUndefined

import penstock
import penstock.materialize.errors
import penstock.protocol.errors
import penstock.sdk.errors
from penstock.connectors import BUILT_IN, built_in
from penstock.connectors.postgres import PostgresConnector
from penstock.connectors.sqlite.dialect import _TYPES as SQLITE_TYPES
from penstock.connectors.sqlite.dialect import SqliteDialect
from penstock.protocol._generated import materialize_pb2
from penstock.protocol.messages import START_FROM_ZERO, Kind
from penstock.protocol.transaction import REQUESTS, RULES
from penstock.sdk.sql import applied_spec, fence
from penstock.sdk.sql.connector import DELETED, SqlResource
from penstock.testing import conformance
from tests.test_docs import anchors

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference"
PROTOCOL = (REFERENCE / "protocol.md").read_text()
CONNECTORS = (REFERENCE / "connectors.md").read_text()


def section(page: str, heading: str) -> str:
    """Return the text below a heading, up to the next one."""
    match = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", page, re.MULTILINE | re.DOTALL)
    assert match is not None, heading
    return match[1]


def rows(text: str) -> list[list[str]]:
    """Return the cells of all table rows in a text, without headings."""
    cells: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith("|---"):
            cells.pop()
        elif line.startswith("|"):
            cells.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return cells


# The protocol.


def test_protocol_page_order_table_equals_rules():
    listed = {name: (after, given) for name, after, given in rows(section(PROTOCOL, "Order"))}
    assert list(listed) == [str(kind) for kind in RULES]
    for kind, rule in RULES.items():
        given = "any" if rule.given == REQUESTS else ", ".join(sorted(map(str, rule.given)))
        assert listed[str(kind)] == (", ".join(sorted(map(str, rule.after))), given), kind


def test_protocol_page_lists_every_method():
    service = materialize_pb2.DESCRIPTOR.services_by_name["Driver"]
    listed = [cells[0].strip("`") for cells in rows(section(PROTOCOL, "Methods"))]
    assert listed == [f"/{service.full_name}/{method.name}" for method in service.methods]


def test_protocol_page_has_the_start_checkpoint():
    assert f"`{START_FROM_ZERO.hex(' ')}`" in section(PROTOCOL, "Open")


@pytest.mark.parametrize("kind", sorted(REQUESTS, key=str), ids=str)
def test_protocol_page_has_a_section_for_every_request(kind: Kind):
    assert section(PROTOCOL, str(kind))


def test_protocol_page_statuses_map_to_raised_errors():
    from penstock.materialize.connector_client import _REFUSED, _UNREACHABLE

    for names, _, error in rows(section(PROTOCOL, "Statuses")):
        for name in re.findall(r"`(\w+)`", names):
            expected = {
                name in [status.name for status in _REFUSED]: "ConnectorRefused",
                name in [status.name for status in _UNREACHABLE]: "ConnectorUnreachable",
            }.get(True, "ConnectorFailed")
            assert error.partition(";")[0] == f"`{expected}`", name


# The conformance suite.


def test_protocol_page_lists_every_key_of_the_conformance_file():
    listed = {cells[0].strip("`"): cells[1] for cells in rows(section(PROTOCOL, "The file"))}
    fields = conformance.Config.model_fields
    assert list(listed) == list(fields)
    for name, field in fields.items():
        assert render_default(field) == listed[name].strip("`"), name


def render_default(field: pydantic.fields.FieldInfo) -> str:
    default = field.default
    if default is PydanticUndefined:
        return "required"
    if default is None or default in ("", ()):
        return "none"
    return str(default).lower().removesuffix(".0")


# The connectors.


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_documentation_url_of_a_connector_is_absolute_and_names_an_existing_section(name: str):
    url = urlsplit(built_in(name).documentation_url)
    assert (url.scheme, url.netloc) == ("file", "")
    page = Path(url2pathname(url.path))
    assert page.is_absolute()
    assert page.is_file()
    assert url.fragment in anchors(page)


def test_documentation_url_prefers_the_pages_of_the_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert wheel["targets"]["wheel"]["force-include"] == {"docs": "penstock/docs"}
    installed = tmp_path / "site packages" / "penstock"
    (installed / "docs").mkdir(parents=True)
    monkeypatch.setattr(penstock, "__file__", str(installed / "__init__.py"))
    assert penstock.documentation_url("a.md#b") == f"{(installed / 'docs').as_uri()}/a.md#b"


def test_connectors_page_lists_every_connector():
    listed = re.findall(r"^\| \[`([\w-]+)`\]\(#[\w-]+\) \|", CONNECTORS, re.MULTILINE)
    assert set(BUILT_IN) <= set(listed)
    for name in listed:
        package = "files" if name.endswith("-files") else name
        assert import_module(f"penstock.connectors.{package}")


def keys_of(model: type[pydantic.BaseModel]) -> dict[str, str]:
    """Return the configuration keys with their defaults in the notation of the page."""
    return {
        field.alias or name: "required"
        if field.is_required()
        else str(field.default).lower()
        if isinstance(field.default, bool)
        else f'"{field.default}"'
        if isinstance(field.default, str)
        else ""
        for name, field in model.model_fields.items()
    }


TABLES = {
    "Resource": SqlResource,
    "Endpoint of SQLite": built_in("sqlite").endpoint,
    "Endpoint of Postgres": PostgresConnector.endpoint,
}


@pytest.mark.parametrize("heading", TABLES)
def test_connectors_page_lists_every_key_of(heading: str):
    listed = {cells[0].strip("`"): cells[1] for cells in rows(section(CONNECTORS, heading))}
    known = keys_of(TABLES[heading])
    assert list(listed) == list(known)
    for name, default in known.items():
        assert not default or listed[name].strip("`") == default, name


def test_connectors_page_lists_every_key_of_postgres_and_file_resources():
    own = keys_of(PostgresConnector.resource).keys() - keys_of(SqlResource).keys()
    listed = rows(section(CONNECTORS, "Resource of Postgres"))
    assert {cells[0].strip("`") for cells in listed} == own
    files = {cells[0].strip("`") for cells in rows(section(CONNECTORS, "Files"))}
    for name in ("staged-files", "plain-files", "push-files"):
        own = {cells[0].strip("`") for cells in rows(section(CONNECTORS, name))}
        connector = built_in(name)
        assert files | own == {*keys_of(connector.endpoint), *keys_of(connector.resource)}, name


def test_connectors_page_lists_sqlite_column_types():
    listed = {cells[0]: cells[1] for cells in rows(section(CONNECTORS, "Values in SQLite"))}
    names = {"bytes": "string in base 64", "json": "object, array"}
    for kind, column in SQLITE_TYPES.items():
        assert listed[names.get(kind.value, kind.value)] == f"`{column}`"
    assert SqliteDialect().folded("A") == "a"


def test_connectors_page_lists_postgres_column_types():
    from penstock.connectors.postgres.dialect import _FORMATS, _TYPES

    text = section(CONNECTORS, "Values in Postgres")
    listed = {cells[0]: re.findall(r"`([A-Z ]+)`", cells[1])[0] for cells in rows(text)}
    names = {"bytes": "string in base 64", "json": "object, array, the whole document"}
    for kind, column in _TYPES.items():
        assert listed[names.get(kind.value, kind.value)] == column
    for name, column in _FORMATS.items():
        [shown] = [key for key in listed if f"`{name}`" in key]
        assert listed[shown] == column


def test_connectors_page_lists_tables_of_the_connector():
    listed = [cells[0].strip("`") for cells in rows(section(CONNECTORS, "Tables of the connector"))]
    assert listed == [fence.TABLE, applied_spec.TABLE]
    assert f"`{DELETED}`" in CONNECTORS
