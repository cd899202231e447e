"""Every value of every type, copied and streamed, changed and deleted, as the server prints it."""

import re
from pathlib import Path

import pytest

from penstock.servers.postgres import Database
from tests.fix_postgres import major
from tests.ingest.checker import check, differing
from tests.ingest.pump import SOURCE, Pump, until
from tests.sources.postgres.types.torture import SETUP, create_table, insert_rows, known_to

# NaN in a numeric with digits is refused by name, and has tests of its own.


IN_BINARY = re.compile(
    r"boolean|smallint|integer|bigint|oid|xid|cid|real|double precision"
    r"|numeric\((5|1,0|1,1|10,2|18,18|19,1|38,\d+)\)|bytea|uuid|json|date|timestamp[^\[]*"
    r"|text|name|char|bpchar|varchar|character varying\(\d+\)|character\(\d+\)"
    r"|public\.(mood|shouted|positive|very_positive|price|low_price|code|feeling|moment)"
)
"""Types that a stream of nothing else carries in their binary form."""


@pytest.mark.parametrize("identity", ["DEFAULT", "FULL"])
@pytest.mark.parametrize(
    "binary", [False, pytest.param(True, marks=pytest.mark.postgres(14))], ids=["text", "binary"]
)
def test_every_value_by_every_way(
    database: Database, tmp_path: Path, identity: str, binary: bool
) -> None:
    cases = known_to(major(database))
    if binary:
        cases = [case for case in cases if IN_BINARY.fullmatch(case.type)]
        assert len(cases) > 30
    database.sql(SETUP)
    for table in ("public.copied", "public.streamed"):
        database.sql(create_table(table, cases))
        database.sql(f"ALTER TABLE {table} REPLICA IDENTITY {identity}")
    tables = ["public.copied", "public.streamed"]
    database.sql("CREATE PUBLICATION penstock FOR TABLE copied, streamed")
    database.sql(insert_rows("public.copied", cases))
    with Pump(database, tmp_path) as pump:
        pump.settle()
        assert ("binary 'true'" in stream_command(database)) is binary
        database.sql(insert_rows("public.streamed", cases))
        pump.settle()
        found = check(pump, database, tables)
        rows = sum(found["public.copied"].changes[found["public.copied"].since].values())
        assert rows == len(database.sql("SELECT FROM copied")) > 10
        # Each row, from the snapshot or the stream, is deleted and inserted again: by a change
        # of its key, by an update without a change, or by a delete and an insert.
        database.sql("UPDATE copied SET id = -id - 1 WHERE id % 2 = 0")
        database.sql("UPDATE streamed SET id = -id - 1 WHERE id % 2 = 0")
        database.sql("UPDATE copied SET id = id WHERE id > 0")
        database.sql(
            "BEGIN; CREATE TEMPORARY TABLE aside ON COMMIT DROP AS TABLE streamed;"
            "DELETE FROM streamed WHERE id > 0;"
            "INSERT INTO streamed SELECT * FROM aside WHERE id > 0; COMMIT"
        )
        pump.settle()
        check(pump, database, tables)
        database.sql("DELETE FROM copied WHERE id % 3 = 0; DELETE FROM streamed WHERE id % 3 = 1")
        pump.settle()
        check(pump, database, tables)
        database.sql("DELETE FROM copied; DELETE FROM streamed")
        pump.settle()
        found = check(pump, database, tables)
        assert sum(sum(each.values()) for each in found["public.copied"].changes.values()) == 0


@pytest.mark.postgres(14)
def test_a_table_that_joins_with_another_type_makes_the_stream_one_of_text(
    database: Database, tmp_path: Path
) -> None:
    database.sql("CREATE TABLE plain (id integer PRIMARY KEY, at timestamptz)")
    database.sql("CREATE TABLE odd (id integer PRIMARY KEY, span interval)")
    database.sql("CREATE PUBLICATION penstock FOR TABLE plain")
    database.sql("INSERT INTO plain VALUES (1, 'infinity')")
    with Pump(database, tmp_path) as pump:
        pump.settle()
        assert "binary 'true'" in stream_command(database)
        database.sql("ALTER PUBLICATION penstock ADD TABLE odd")
        database.sql("INSERT INTO odd VALUES (1, '1 month 2 days'); INSERT INTO plain VALUES (2)")
        pump.settle()
        database.sql("UPDATE plain SET at = 'epoch'; DELETE FROM plain WHERE id = 1")
        database.sql("INSERT INTO odd VALUES (2, '-3 seconds'); DELETE FROM odd WHERE id = 1")
        until(lambda: f"{SOURCE}.public.odd" in pump.collections(), "odd to be seen")
        pump.settle()
        assert not differing(pump, database, ["public.plain", "public.odd"])
        assert "binary" not in stream_command(database)


@pytest.mark.postgres(14)
def test_a_column_that_is_added_with_another_type_makes_the_stream_one_of_text(
    database: Database, tmp_path: Path
) -> None:
    database.sql("CREATE TABLE plain (id integer PRIMARY KEY, at timestamptz)")
    database.sql("CREATE PUBLICATION penstock FOR TABLE plain")
    database.sql("INSERT INTO plain VALUES (1, 'epoch')")
    with Pump(database, tmp_path) as pump:
        pump.settle()
        assert "binary 'true'" in stream_command(database)
        database.sql("ALTER TABLE plain ADD span interval; UPDATE plain SET span = '1 day'")
        database.sql("INSERT INTO plain VALUES (2, 'epoch', '1 month')")
        time = pump.settle()
        with pump.reader() as client:
            found = client.collection(f"{SOURCE}.public.plain").snapshot(time)
            assert {each.data["id"]: each.data["span"] for each in found} == {
                1: "1 day",
                2: "1 mon",
            }
        assert "binary" not in stream_command(database)


@pytest.mark.postgres(14)
def test_a_column_that_is_kept_as_text_may_change_its_type(
    database: Database, tmp_path: Path
) -> None:
    database.sql("CREATE TABLE odd (id integer PRIMARY KEY, which uuid)")
    database.sql("CREATE PUBLICATION penstock FOR TABLE odd")
    database.sql("INSERT INTO odd VALUES (1, '00000000-0000-0000-0000-000000000001')")
    tables = [{"name": "public.odd", "text": ["which"]}]
    with Pump(database, tmp_path, tables=tables) as pump:
        pump.settle()
        assert "binary" not in stream_command(database)
        database.sql("ALTER TABLE odd ALTER which TYPE text")
        database.sql("INSERT INTO odd VALUES (2, 'not a uuid'); DELETE FROM odd WHERE id = 1")
        pump.settle()
        assert not differing(pump, database, ["public.odd"])


def stream_command(database: Database) -> str:
    """Return the replication command of the source."""
    [[command]] = database.sql(
        "SELECT query FROM pg_stat_activity WHERE backend_type = 'walsender' "
        "AND query LIKE 'START_REPLICATION%' AND datname = current_database()"
    )
    return str(command)
