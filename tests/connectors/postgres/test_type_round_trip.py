"""Round trip of every value of every type from Postgres to Postgres."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final, Self

import psycopg
import pyarrow as pa
import pytest

from penstock.connectors.postgres import connector
from penstock.connectors.postgres.session import PostgresSession, Server
from penstock.data.schema import LABEL
from penstock.materialize.row_encoder import build_row_spec
from penstock.protocol.specs import Projection
from penstock.servers.postgres import Database, PostgresServer
from penstock.sources.postgres.catalog_types import PgColumn, PgType
from penstock.sources.postgres.types import column_type
from tests.connectors.connector_client import (
    ConnectorClient,
    Row,
    TableBinding,
    collection,
    commit,
    loaded,
    projection,
)
from tests.fix_postgres import major
from tests.sources.postgres.types.torture import (
    EACH,
    SETUP,
    Case,
    create_table,
    insert_rows,
    known_to,
)

KINDS: Final[Mapping[str, tuple[str, Callable[[str], object]]]] = {
    "boolean": ("boolean", lambda text: text == "t"),
    "smallint": ("integer", int),
    "integer": ("integer", int),
    "bigint": ("integer", int),
    "double precision": ("number", float),
}
"""Types with a JSON type. All other types are sent as text."""


@dataclass(frozen=True)
class PrintedTable:
    """Table as printed by the server: type per column, texts by id."""

    types: dict[str, str]
    texts: dict[str, dict[int, tuple[str | None, str | None]]]
    """Output of the type, and the result of a cast to text, which may be user-defined."""

    @classmethod
    def of(cls, database: Database, table: str) -> Self:
        types = dict(
            database.sql(
                f"{PINNED} SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute "
                f"WHERE attrelid = '{table}'::regclass AND attnum > 0 ORDER BY attnum"
            )
        )
        printed = ", ".join(
            f'CASE WHEN "{name}" IS DISTINCT FROM NULL THEN concat("{name}") END, "{name}"::text'
            for name in types
        )
        texts: dict[str, dict[int, tuple[str | None, str | None]]] = {name: {} for name in types}
        for key, *pairs in database.sql(f"{PINNED} SELECT id, {printed} FROM {table} ORDER BY 1"):
            for name, pair in zip(types, zip(pairs[::2], pairs[1::2], strict=True), strict=True):
                texts[name][key] = pair
        return cls(types, texts)


PINNED = "SET search_path = ''; SET lc_monetary = 'C'; SET TimeZone = 'UTC';"
"""Session settings of a source."""


@dataclass(frozen=True)
class RoundTrip:
    """Table before and after the round trip, and the loaded documents."""

    before: PrintedTable
    after: PrintedTable
    documents: dict[int, dict[str, Any]]


@pytest.fixture(scope="module")
def round_trip(postgres_server: PostgresServer) -> Iterator[RoundTrip]:
    database = postgres_server.create_database("round_trip")
    cases = known_to(major(database))
    database.sql(SETUP)
    database.sql(create_table("public.torture", cases))
    database.sql(insert_rows("public.torture", cases))
    before = PrintedTable.of(database, "public.torture")
    things = collection(
        projection("id", "integer", must=True),
        *(field(case) for case in cases),
        schema={
            "properties": {name: {"x-postgres-type": kind} for name, kind in before.types.items()}
        },
    )
    rows = [
        Row((key,), tuple(value(case, before.texts[case.name][key][0]) for case in cases))
        for key in before.texts["id"]
    ]
    client = ConnectorClient(connector(), {"url": database.url()})
    table_binding = TableBinding(things, "round_trip", document=False)
    client.apply("v1", table_binding)
    with client.open("v1", table_binding) as (writer, [binding]):
        commit(writer, binding, rows[::2], batch=100)
        commit(writer, binding, [Row(row.key, row.values, exists=True) for row in rows], batch=100)
        documents = {
            document["id"]: document
            for document in loaded(writer, binding, [row.key for row in rows])
        }
    yield RoundTrip(before, PrintedTable.of(database, "public.round_trip"), documents)
    database.drop()


def field(case: Case) -> Projection:
    kind, _ = KINDS.get(case.type, ("string", str))
    return projection(case.name, kind)


def value(case: Case, text: str | None) -> object:
    _, read = KINDS.get(case.type, ("string", str))
    return None if text is None else read(text)


@pytest.mark.parametrize("case", EACH)
def test_values_and_types_round_trip_from_postgres_to_postgres(
    round_trip: RoundTrip, case: Case
) -> None:
    after: Mapping[int, object] = round_trip.after.texts[case.name]
    before: Mapping[int, object] = round_trip.before.texts[case.name]
    if case.type == "xml":
        # The output of xml omits the encoding of the declaration; a cast to text keeps it.
        after, before = (
            {key: pair[0] for key, pair in table.texts[case.name].items()}
            for table in (round_trip.after, round_trip.before)
        )
    assert after == before
    assert round_trip.after.types[case.name] == round_trip.before.types[case.name]


@pytest.mark.parametrize("case", EACH)
def test_loaded_documents_contain_values_as_sent(round_trip: RoundTrip, case: Case) -> None:
    for key, (text, _) in round_trip.before.texts[case.name].items():
        sent = value(case, text)
        if case.type == "double precision" and text in ("NaN", "Infinity", "-Infinity"):
            sent = text
        assert round_trip.documents[key].get(case.name) == sent


def test_endpoint_without_annotated_type_stores_text(
    round_trip: RoundTrip, database: Database
) -> None:
    annotated_types = {"mood": "public.mood", "price": "public.low_price", "n": "numeric(10,2)"}
    things = collection(
        projection("id", "integer", must=True),
        *(projection(name, "string") for name in annotated_types),
        schema={
            "properties": {
                name: {"x-postgres-type": kind} for name, kind in annotated_types.items()
            }
        },
    )
    client, table_binding = (
        ConnectorClient(connector(), {"url": database.url()}),
        TableBinding(things, document=False),
    )
    client.apply("v1", table_binding)
    with client.open("v1", table_binding) as (writer, [binding]):
        commit(writer, binding, [Row((1,), ("very happy", "1.50", "2.50"))])
    assert database.sql(
        "SELECT mood, price, n::text, pg_typeof(mood)::text, pg_typeof(n)::text FROM things"
    ) == [("very happy", "1.50", "2.50", "text", "numeric")]


@pytest.mark.parametrize("array", [False, True])
def test_annotation_of_every_source_type_names_that_type_without_modifier(
    database: Database, array: bool
) -> None:
    oids = [info.array_oid if array else info.oid for info in psycopg.postgres.types]
    known = database.sql(
        "SELECT t.oid, format_type(t.oid, NULL), format_type(t.oid, -1), "
        "e.oid, format_type(e.oid, NULL) FROM pg_type t "
        "LEFT JOIN pg_type e ON e.oid = t.typelem AND t.typcategory = 'A' "
        "WHERE t.oid = ANY(%s) AND t.typtype <> 'p' AND t.typcategory <> 'P'",
        [oids],
    )
    assert len(known) > 40
    with closing(PostgresSession(Server.parse(database.url(), {}), touch=False)) as session:
        for oid, name, unmodified, element_oid, element_name in known:
            element = PgType(element_oid, element_name, "b", "") if array else None
            kind = PgType(oid, name, "b", "A" if array else "", element=element)
            stored = column_type(PgColumn("c", 2, kind), text=False)
            column = pa.field("c", stored.arrow, metadata={LABEL: stored.label})
            schema = pa.schema([pa.field("id", pa.int64(), nullable=False), column])
            spec = build_row_spec("t", schema, ["id"])
            annotation = spec.schema()["properties"]["c"]["x-postgres-type"]
            resolved = session.endpoint_type(annotation)
            assert resolved is not None, name
            assert resolved.name == unmodified
