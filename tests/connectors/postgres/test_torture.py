"""Round trip of every value of every type from Postgres to Postgres."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import pytest

from penstock.connectors.postgres import connector
from penstock.protocol.specs import Projection
from penstock.servers.postgres import Database, PostgresServer
from tests.connectors.stream_client import (
    Driven,
    Row,
    Wanted,
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

KINDS = {
    "boolean": ("boolean", lambda text: text == "t"),
    "smallint": ("integer", int),
    "integer": ("integer", int),
    "bigint": ("integer", int),
    "double precision": ("number", float),
}
"""Types with a JSON type. All other types are sent as text."""


@dataclass(frozen=True)
class Shown:
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
        texts: dict[str, dict] = {name: {} for name in types}
        for key, *pairs in database.sql(f"{PINNED} SELECT id, {printed} FROM {table} ORDER BY 1"):
            for name, pair in zip(types, zip(pairs[::2], pairs[1::2], strict=True), strict=True):
                texts[name][key] = pair
        return cls(types, texts)


PINNED = "SET search_path = ''; SET lc_monetary = 'C'; SET TimeZone = 'UTC';"
"""Session settings of a source."""


@dataclass(frozen=True)
class Carried:
    """Table before and after the round trip, and the loaded documents."""

    before: Shown
    after: Shown
    documents: dict[int, dict]


@pytest.fixture(scope="module")
def carried(postgres_server: PostgresServer) -> Iterator[Carried]:
    database = postgres_server.create_database("carried")
    cases = known_to(major(database))
    database.sql(SETUP)
    database.sql(create_table("public.torture", cases))
    database.sql(insert_rows("public.torture", cases))
    before = Shown.of(database, "public.torture")
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
    driven = Driven(connector(), {"url": database.url()})
    wanted = Wanted(things, "carried", document=False)
    driven.apply("v1", wanted)
    with driven.open("v1", wanted) as (writer, [binding]):
        commit(writer, binding, rows[::2], batch=100)
        commit(writer, binding, [Row(row.key, row.values, exists=True) for row in rows], batch=100)
        documents = {each["id"]: each for each in loaded(writer, binding, [it.key for it in rows])}
    yield Carried(before, Shown.of(database, "public.carried"), documents)
    database.drop()


def field(case: Case) -> Projection:
    kind, _ = KINDS.get(case.type, ("string", str))
    return projection(case.name, kind)


def value(case: Case, text: str | None) -> object:
    _, read = KINDS.get(case.type, ("string", str))
    return None if text is None else read(text)


@pytest.mark.parametrize("case", EACH)
def test_values_and_types_round_trip_from_postgres_to_postgres(
    carried: Carried, case: Case
) -> None:
    after, before = carried.after.texts[case.name], carried.before.texts[case.name]
    if case.type == "xml":
        # The output of xml omits the encoding of the declaration; a cast to text keeps it.
        after, before = ({key: it[0] for key, it in each.items()} for each in (after, before))
    assert after == before
    assert carried.after.types[case.name] == carried.before.types[case.name]


@pytest.mark.parametrize("case", EACH)
def test_loaded_documents_contain_values_as_sent(carried: Carried, case: Case) -> None:
    for key, (text, _) in carried.before.texts[case.name].items():
        sent = value(case, text)
        if case.type == "double precision" and text in ("NaN", "Infinity", "-Infinity"):
            sent = text
        assert carried.documents[key].get(case.name) == sent


def test_endpoint_without_annotated_type_stores_text(carried: Carried, database: Database) -> None:
    said = {"mood": "public.mood", "price": "public.low_price", "n": "numeric(10,2)"}
    things = collection(
        projection("id", "integer", must=True),
        *(projection(name, "string") for name in said),
        schema={"properties": {name: {"x-postgres-type": kind} for name, kind in said.items()}},
    )
    driven, wanted = Driven(connector(), {"url": database.url()}), Wanted(things, document=False)
    driven.apply("v1", wanted)
    with driven.open("v1", wanted) as (writer, [binding]):
        commit(writer, binding, [Row((1,), ("very happy", "1.50", "2.50"))])
    assert database.sql(
        "SELECT mood, price, n::text, pg_typeof(mood)::text, pg_typeof(n)::text FROM things"
    ) == [("very happy", "1.50", "2.50", "text", "numeric")]
