"""Tables whose schema or name has special characters."""

from operator import itemgetter
from pathlib import Path
from typing import Any

from penstock.catalog.inspect import inspect_lake
from penstock.cli.status_table import render
from penstock.data.collection_name import compose_name
from penstock.persist import Settings
from penstock.servers.postgres import Database
from penstock.sources.postgres.names import identifier
from penstock.web import LakeView, serve
from tests.cli.test_commands import lines, penstock
from tests.ingest.pump import SOURCE, Pump
from tests.web.http_client import ask, query

NAMES = [
    ("weird", "dot.t"),
    ("weird.dot", "t"),
    ("public", "a/b"),
    ("public", "state/state"),
    ("per%cent", "what?#&=+"),
    ("public", 'quo"te'),
    ("public", '"quoted"'),
    ("public", "two words "),
    ("public", "it's \\ [bold]{x}"),
    ("public", "żółć\u00a0\u3000😀"),
    ("public", "line\nbreak\ttab\x1b[31m"),
    ("public", "n" * 63),
    ("public", "'\x01" * 31),
]
"""Schema and table."""


def test_tables_with_special_characters_in_names_are_read_and_listed(
    database: Database, tmp_path: Path
) -> None:
    for number, (schema, table) in enumerate(NAMES):
        named = f"{identifier(schema)}.{identifier(table)}"
        database.sql(f"CREATE SCHEMA IF NOT EXISTS {identifier(schema)}")
        database.sql(f"CREATE TABLE {named} (id int PRIMARY KEY)")
        database.sql(f"INSERT INTO {named} VALUES ({number})")
    database.sql("CREATE PUBLICATION penstock FOR ALL TABLES")
    with Pump(database, tmp_path) as pump:
        pump.settle()
        for number, (schema, table) in enumerate(NAMES):
            named = f"{identifier(schema)}.{identifier(table)}"
            database.sql(f"INSERT INTO {named} VALUES ({number + 100})")
        pump.settle()
        expected = {
            compose_name(SOURCE, *name): [{"id": number}, {"id": number + 100}]
            for number, name in enumerate(NAMES)
        }
        assert {*pump.collections()} == {*expected}
        _check_status(pump.location, {*expected})
        _check_page(pump.location, expected)
    # Only one name of each kind: each command takes a while to start.
    for name in ('shop.weird."dot.t"', 'shop."weird.dot".t', 'shop.public."a/b"'):
        assert _by_id(lines(penstock("read", pump.location, name))) == expected[name]
    escaped = 'shop.public.U&"line\\000Abreak\\0009tab\\001B[31m"'
    tail = penstock("tail", pump.location, escaped, "--as-of", "earliest", "--until", "latest")
    assert {line["id"] for line in lines(tail)} == {10, 110}


def _check_status(location: str, names: set[str]) -> None:
    found = inspect_lake(location, Settings(background=False, notify=""))
    listed = {each["name"] for where in found for each in where.collections}
    assert listed == {*names, f"{SOURCE}_remap"}
    printed = render(found)
    assert all(name in printed for name in names)
    assert "\x1b[31m" not in printed


def _check_page(location: str, expected: dict[str, list[dict[str, Any]]]) -> None:
    view = LakeView(location, Settings(background=False, notify=""))
    try:
        with serve(view, ":0", token=None) as served:
            state = ask(served.url, "/api/state").json
            assert {each["name"] for each in state["collections"]} == {
                *expected,
                f"{SOURCE}_remap",
            }
            metrics = ask(served.url, "/metrics").body.decode()
            for name, rows in expected.items():
                answer = ask(served.url, query("/api/rows", collection=name))
                assert answer.status == 200, answer.json
                assert len(answer.json["rows"]) == len(rows)
                assert ask(served.url, query("/api/changes", collection=name)).status == 200
                label = name.replace("\\", "\\\\").replace('"', '\\"')
                assert f'penstock_collection_bytes{{collection="{label}"' in metrics
    finally:
        view.close()


def _by_id(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=itemgetter("id"))
