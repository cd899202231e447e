"""Script tests of documents that are materialized, in tests/scripts/materialize.

schema of=C key=/a,/b    a JSON schema, in YAML, for collection C in later directives
materialize [delta=yes] [delete=ignore] [read=all]
                         a fixture: lines `["C", document]`, and `{"commit": true}` at the end of
                         a transaction; read=all reads it in one transaction, after the last line
columns of=C names=a,b   the values of these SQLite columns, after the last materialize

A fixture is materialized into a new SQLite file and into staged files, each from its own
collection. The output has the documents of both endpoints after each commit, in the same
grammar. Documents are in order of keys; delta updates are in the order of their Stores. A
transaction without a commit prints its error.
"""

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml

from penstock import persist
from penstock.connectors.files.__main__ import documents
from penstock.data import DIFF, TIME
from penstock.data.packed.elements import pack_row
from penstock.errors import PenstockError
from penstock.materialize.loop import MaterializationLoop
from penstock.persist import AppendTo
from penstock.reduce import decode, encode
from tests.datadriven import Directive
from tests.fix_scripts import Script, stories
from tests.materialize.lake import Endpoint, materializing, once
from tests.protocol.vectors import cases

COLUMNS = pa.schema([pa.field("seq", pa.int64(), nullable=False), pa.field("doc", pa.string())])
UPDATES = pa.schema([*COLUMNS, (TIME, pa.int64()), (DIFF, pa.int64())])
CONNECTORS = ("sqlite", "staged-files")
COMMIT = {"commit": True}
LARGEST = 16 << 20

Line = tuple[str, Any]
"""A collection and a document."""


class Upstream:
    """The collections of a fixture, with ordered documents."""

    def __init__(self, lake: str, names: list[str]) -> None:
        self._client = persist.open(f"{lake}/shop", writer="upstream")
        self._collections = {
            name: self._client.create_or_load(name, schema=COLUMNS) for name in names
        }
        self._seq = 0

    def commit(self, lines: list[Line]) -> None:
        """Append documents, all at one time."""
        numbered = list(enumerate(lines, self._seq))
        self._seq += len(lines)
        parts = []
        for name, collection in self._collections.items():
            upper = collection.upper
            rows = [
                {"seq": seq, "doc": encode(document).decode(), TIME: upper, DIFF: 1}
                for seq, (of, document) in numbered
                if of == name
            ]
            updates = pa.Table.from_pylist(rows, schema=UPDATES)
            parts.append(AppendTo(collection, updates, upper, upper + 1))
        self._client.append_all(parts)

    def close(self) -> None:
        self._client.close()


def transactions(lines: tuple[str, ...]) -> Iterator[list[Line]]:
    """Yield the transactions of a fixture. A leading commit ends an empty transaction."""
    under_way: list[Line] = []
    for line in lines:
        said = decode(line, what="line of a fixture")
        if said == COMMIT:
            yield under_way
            under_way = []
        else:
            name, document = said
            under_way.append((name, document))
    assert not under_way, "the last transaction has no commit"


@dataclass(frozen=True, slots=True)
class Described:
    """A collection section of a pipeline file."""

    key: tuple[str, ...]
    schema: Any

    @property
    def section(self) -> Mapping[str, Any]:
        return {"key": self.key, "schema": self.schema, "document": "doc", "order": ["seq"]}

    def key_of(self, document: Any) -> list[Any]:
        return [document[each[1:]] for each in self.key]


class Stage:
    """Interpreter of the directives of a script."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._collections: dict[str, Described] = {}
        self._stories = 0

    def obey(self, directive: Directive) -> str:
        return "\n".join(getattr(self, f"_{directive.name}")(directive))

    def _schema(self, directive: Directive) -> list[str]:
        schema = yaml.safe_load("\n".join(directive.input))
        key = tuple(directive.args["key"].split(","))
        self._collections[directive.args["of"]] = Described(key, schema)
        return ["read"]

    def _materialize(self, directive: Directive) -> list[str]:
        self._stories += 1
        told = {connector: self._run_on(connector, directive) for connector in CONNECTORS}
        if told["sqlite"] == told["staged-files"]:
            return told["sqlite"]
        return [line for name, lines in told.items() for line in (f"{name}:", *lines)]

    def _columns(self, directive: Directive) -> list[str]:
        names, of = directive.args["names"], directive.args["of"]
        with closing(sqlite3.connect(self._place("sqlite") / "t.db")) as database:
            rows = database.execute(f'SELECT {names} FROM "{of}"').fetchall()
        return sorted(json.dumps(row) for row in rows)

    def _run_on(self, connector: str, directive: Directive) -> list[str]:
        place = self._place(connector)
        place.mkdir()
        return list(self._play(Endpoint(connector, place), directive))

    def _play(self, endpoint: Endpoint, directive: Directive) -> Iterator[str]:
        lake = f"file:{endpoint.folder / 'lake'}"
        steps = list(transactions(directive.input))
        used = [name for name in self._collections if any(of == name for s in steps for of, _ in s)]
        delta = directive.args.get("delta") == "yes"
        upstream = Upstream(lake, used)
        resource = "table" if endpoint.connector == "sqlite" else "name"
        bindings = [
            {
                "collection": name,
                "resource": {resource: name},
                "delta_updates": delta,
                "delete": directive.args.get("delete", "hard"),
            }
            for name in used
        ]
        try:
            with materializing(
                lake,
                endpoint,
                endpoint.folder,
                bindings=bindings,
                collections={name: self._collections[name].section for name in used},
            ) as materialization:
                for at, step in enumerate(steps, 1):
                    upstream.commit(step)
                    if directive.args.get("read") == "all" and at < len(steps):
                        continue
                    refusal = refused(materialization)
                    for name in used:
                        yield from self._held(endpoint, name, delta=delta)
                    yield from refusal or [json.dumps(COMMIT)]
        finally:
            upstream.close()

    def _held(self, endpoint: Endpoint, name: str, *, delta: bool) -> list[str]:
        found = list(held(endpoint, name))
        if not delta:
            found.sort(key=self._collections[name].key_of)
        return [f'["{name}", {encode(each).decode()}]' for each in found]

    def _place(self, connector: str) -> Path:
        return self._folder / f"{self._stories}-{connector}"


def held(endpoint: Endpoint, name: str) -> Iterator[Any]:
    """Yield the documents of a resource, in stored order."""
    if endpoint.connector == "sqlite":
        with closing(sqlite3.connect(endpoint.folder / "t.db")) as database:
            found = database.execute(f'SELECT flow_document FROM "{name}" ORDER BY rowid')
            yield from (decode(row[0], what="document") for row in found.fetchall())
    else:
        yield from documents(endpoint.folder / "files" / name)


def refused(materialization: MaterializationLoop) -> list[str]:
    """Bring the endpoint to the upper of its collections. Return the lines of an error, if any."""
    try:
        once(materialization)
    except PenstockError as error:
        return [f"{type(error).__name__}: {error}", f"detail: {error.detail}"]
    return []


@pytest.mark.parametrize("path", stories("materialize"), ids=lambda path: path.stem)
def test_materialize_script_matches_expected_output(
    path: Path, script: Script, tmp_path: Path
) -> None:
    script(path, Stage(tmp_path).obey)


def played(folder: Path, key: list[str], schema: Any, *steps: list[Any], delta: bool) -> list[Any]:
    """Return the documents of both endpoints after the last transaction."""
    stage = Stage(folder)
    text = (json.dumps(schema),)
    assert stage.obey(Directive("schema", {"of": "c", "key": ",".join(key)}, text)) == "read"
    lines = [
        json.dumps(line) for step in steps for line in (*(["c", each] for each in step), COMMIT)
    ]
    how = {"delta": "yes"} if delta else {}
    told = stage.obey(Directive("materialize", how, tuple(lines))).splitlines()
    assert told.count(json.dumps(COMMIT)) == len(steps), "both hold the same"
    *_, last = transactions(tuple(told))
    return [document for _, document in last]


VECTORS = {case["id"]: case for case in cases("materialize_fixture", "preview_fixture_format")}


def test_materialize_fixture_vectors_are_all_tested() -> None:
    assert VECTORS.keys() == {"integ-02", "integ-05", "integ-07", "integ-09"}


def test_repeated_keys_with_delta_updates_are_stored_as_separate_rows(tmp_path: Path) -> None:
    given, expected = VECTORS["integ-02"]["input"], VECTORS["integ-02"]["expect"]
    assert given["delta_updates"]
    rows = played(tmp_path, given["key"], given["schema"], *given["transactions"], delta=True)
    assert [[row["id"], row["int"], row["str"]] for row in rows] == expected["rows_id_int_str"]


def test_compound_keys_with_similar_parts_are_distinct_rows(tmp_path: Path) -> None:
    given, expected = VECTORS["integ-05"]["input"], VECTORS["integ-05"]["expect"]
    names = [pointer[1:] for pointer in given["key"]]
    schema = {
        "type": "object",
        "properties": {name: {"type": "string"} for name in names},
        "required": names,
    }
    step = [dict(zip(names, each, strict=True)) for each in given["docs"]]
    rows = played(tmp_path, given["key"], schema, step, step, delta=False)
    assert len(rows) == expected["distinct_rows"]
    assert [pack_row(each).hex() for each in given["docs"]] == expected["packed_hex"]


def test_unsigned_64_bit_integer_is_stored_exactly(tmp_path: Path) -> None:
    given, expected = VECTORS["integ-07"]["input"], VECTORS["integ-07"]["expect"]
    whole = {"type": "integer"}
    schema = {
        "type": "object",
        "properties": {"id": whole, "unsigned_bigint": {**whole, **given["schema_hint"]}},
        "required": ["id"],
    }
    rows = played(tmp_path, ["/id"], schema, [given["doc"]], delta=False)
    assert rows == [given["doc"]]
    assert rows[0]["unsigned_bigint"] == expected["column_value"]


def test_fixture_transactions_with_leading_commit_start_with_empty_transaction() -> None:
    name, commit = VECTORS["integ-09"]["input"]["lines"]
    document = name.replace("{doc}", '{"id": 1}')
    found = list(transactions((commit, document, document, commit, document, commit)))
    assert [len(each) for each in found] == [0, 2, 1]


@pytest.mark.parametrize("connector", CONNECTORS)
def test_document_of_16_mib_is_stored_and_loaded_by_next_transaction(
    tmp_path: Path, connector: str
) -> None:
    lake, endpoint = f"file:{tmp_path / 'lake'}", Endpoint(connector, tmp_path)
    schema = {
        "type": "object",
        "properties": {
            "id": {"type": "integer"},
            "n": {"type": "integer", "reduce": {"strategy": "sum"}},
        },
        "required": ["id"],
        "reduce": {"strategy": "merge"},
    }
    large = {"id": 1, "n": 1, "text": ""}
    large["text"] = "x" * (LARGEST - len(encode(large)))
    assert len(encode(large)) == LARGEST
    upstream = Upstream(lake, ["t"])
    with materializing(
        lake,
        endpoint,
        tmp_path,
        collection="t",
        collections={"t": Described(("/id",), schema).section},
    ) as materialization:
        upstream.commit([("t", large)])
        once(materialization)
        assert list(held(endpoint, "t")) == [large]
        upstream.commit([("t", {"id": 1, "n": 2})])
        once(materialization)
    assert list(held(endpoint, "t")) == [{**large, "n": 3}]
    upstream.close()
