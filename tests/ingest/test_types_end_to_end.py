"""Every value of every type, copied and streamed, changed and deleted, as the server prints it."""

from pathlib import Path

import pytest

from penstock.testing.postgres import Database
from tests.fix_postgres import major
from tests.ingest.checker import check
from tests.ingest.pump import Pump
from tests.sources.postgres.types.torture import SETUP, create_table, insert_rows, known_to

# NaN in a numeric with digits is refused by name, and has tests of its own.


@pytest.mark.parametrize("identity", ["DEFAULT", "FULL"])
def test_every_value_by_every_way(database: Database, tmp_path: Path, identity: str) -> None:
    cases = known_to(major(database))
    database.sql(SETUP)
    for table in ("public.copied", "public.streamed"):
        database.sql(create_table(table, cases))
        database.sql(f"ALTER TABLE {table} REPLICA IDENTITY {identity}")
    tables = ["public.copied", "public.streamed"]
    database.sql("CREATE PUBLICATION penstock FOR TABLE copied, streamed")
    database.sql(insert_rows("public.copied", cases))
    with Pump(database, tmp_path) as pump:
        pump.settle()
        database.sql(insert_rows("public.streamed", cases))
        pump.settle()
        found = check(pump, database, tables)
        rows = sum(found["public.copied"].changes[found["public.copied"].since].values())
        assert rows == len(database.sql("SELECT FROM copied")) > 50
        # Each row is taken back, as it was copied or streamed, and comes again with another key:
        # one by a change of its key, one by a change of nothing, one whole.
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
