"""Replication of a database: collections equal the tables at every tick and at the end."""

from pathlib import Path

import pytest

from penstock.servers.postgres import Database
from tests.ingest.checker import check
from tests.ingest.pump import Pump, until
from tests.ingest.workload import SCHEMA, TABLES, Carrier, check_coins


@pytest.fixture
def shop(database: Database) -> Database:
    """Return a database with a publication of all its tables."""
    database.sql("CREATE PUBLICATION penstock FOR ALL TABLES")
    return database


@pytest.mark.parametrize(
    "identity",
    ["DEFAULT", "FULL", "USING INDEX item_code"],
)
def test_snapshot_and_stream_equal_table_for_every_replica_identity(
    shop: Database, tmp_path: Path, identity: str
) -> None:
    shop.sql(
        f"""
        CREATE TABLE item (id int PRIMARY KEY, code text NOT NULL, note text, big text);
        CREATE UNIQUE INDEX item_code ON item (code);
        ALTER TABLE item REPLICA IDENTITY {identity};
        ALTER TABLE item ALTER big SET STORAGE EXTERNAL;
        INSERT INTO item SELECT g, 'c' || g, 'n', repeat('x', 5000) || g
        FROM generate_series(1, 200) g;
        """
    )
    with Pump(shop, tmp_path) as pump:
        shop.sql("INSERT INTO item VALUES (1000, 'new', NULL, NULL)")
        pump.settle()
        shop.sql("UPDATE item SET note = 'changed' WHERE id % 3 = 0")
        shop.sql("UPDATE item SET id = id + 5000, note = 'moved' WHERE id % 5 = 0")
        shop.sql("UPDATE item SET code = code || '!' WHERE id % 7 = 0")
        pump.settle()
        shop.sql("DELETE FROM item WHERE id % 4 = 0")
        shop.sql(
            """
            BEGIN;
            INSERT INTO item VALUES (1, 'one', 'again', repeat('y', 5000)) ON CONFLICT DO NOTHING;
            UPDATE item SET note = 'a' WHERE id = 1;
            UPDATE item SET id = -1, code = 'minus' WHERE id = 1;
            UPDATE item SET note = 'b' WHERE id = -1;
            DELETE FROM item WHERE id = -1;
            INSERT INTO item VALUES (1, 'uno', 'c', 'small');
            UPDATE item SET note = 'd' WHERE id = 1;
            COMMIT;
            """
        )
        pump.settle()
        check(pump, shop, ["public.item"])
    check(pump, shop, ["public.item"])


def test_rows_of_one_transaction_share_a_time_across_tables(shop: Database, tmp_path: Path) -> None:
    shop.sql(SCHEMA.replace("CREATE PUBLICATION penstock", "CREATE PUBLICATION other"))
    with Pump(shop, tmp_path) as pump, Carrier(shop.url(), pause_ms=1) as carrier:
        for _ in range(4):
            pump.settle()
        carrier.stop()
        pump.settle()
    found = check(pump, shop, TABLES, check_coins)
    assert len(found["public.moved"].changes) > 3


def test_stream_with_truncate_savepoints_and_messages_equals_tables(
    shop: Database, tmp_path: Path
) -> None:
    shop.sql(
        """
        CREATE TABLE a (id int PRIMARY KEY, v text);
        CREATE TABLE b (id int PRIMARY KEY REFERENCES a, v text);
        CREATE TABLE empty (id int PRIMARY KEY);
        INSERT INTO a SELECT g, 'v' FROM generate_series(1, 50) g;
        INSERT INTO b SELECT g, 'v' FROM generate_series(1, 50) g;
        """
    )
    with Pump(shop, tmp_path) as pump:
        pump.settle()
        shop.sql(
            """
            BEGIN;
            INSERT INTO a VALUES (100, 'stays');
            SAVEPOINT one;
            INSERT INTO a VALUES (101, 'goes');
            UPDATE b SET v = 'goes' WHERE id < 10;
            ROLLBACK TO one;
            INSERT INTO a VALUES (102, 'stays');
            RELEASE one;
            SELECT pg_logical_emit_message(true, 'other', 'in a transaction');
            SELECT pg_logical_emit_message(false, 'other', 'outside of one');
            COMMIT;
            BEGIN; INSERT INTO a VALUES (103, 'goes'); ROLLBACK;
            """
        )
        pump.settle()
        check(pump, shop, ["public.a", "public.b", "public.empty"])
        shop.sql(
            """
            BEGIN;
            UPDATE b SET v = 'before';
            TRUNCATE a CASCADE;
            INSERT INTO a VALUES (1, 'after');
            UPDATE a SET v = 'twice' WHERE id = 1;
            COMMIT;
            INSERT INTO b VALUES (1, 'b');
            """
        )
        pump.settle()
    check(pump, shop, ["public.a", "public.b", "public.empty"])


def test_idle_source_advances_upper_and_confirmed_flush_lsn(shop: Database, tmp_path: Path) -> None:
    shop.sql("CREATE TABLE item (id int PRIMARY KEY); INSERT INTO item VALUES (1)")
    shop.sql("CREATE DATABASE " + (other := f"{shop.name}_other"))
    try:
        with Pump(shop, tmp_path) as pump:
            pump.settle()
            before = slot(shop)
            # No tracked table changes; the server writes WAL of another database.
            shop.server.sql("CREATE TABLE t AS SELECT generate_series(1, 5000)", database=other)
            shop.server.sql("CHECKPOINT")
            upper = pump.settle()
            until(lambda: slot(shop)["confirmed"] > before["confirmed"], "confirmed_flush to move")
            shop.server.sql("CHECKPOINT")
            until(lambda: slot(shop)["restart"] > before["restart"], "restart_lsn to move")
            assert pump.settle() > upper
        found = check(pump, shop, ["public.item"])
        assert len(found["public.item"].changes) == 1
    finally:
        shop.server.sql(f"DROP DATABASE {other}")


def slot(database: Database) -> dict[str, int]:
    """Return the positions of the replication slot."""
    [(confirmed, restart)] = database.sql(
        "SELECT confirmed_flush_lsn - '0/0', restart_lsn - '0/0' FROM pg_replication_slots"
        " WHERE database = current_database() AND NOT temporary"
    )
    return {"confirmed": int(confirmed), "restart": int(restart)}


@pytest.mark.parametrize(
    ("members", "tables"),
    [
        pytest.param("low, high", ["public.low", "public.high"], id="leaves by name"),
        pytest.param(
            "part", ["public.low", "public.high"], marks=pytest.mark.postgres(13), id="leaves"
        ),
        pytest.param(
            "part WITH (publish_via_partition_root = true)",
            ["public.part"],
            marks=pytest.mark.postgres(13),
            id="root",
        ),
    ],
)
def test_partitioned_tables_are_tracked_as_leaves_or_root(
    database: Database, tmp_path: Path, members: str, tables: list[str]
) -> None:
    database.sql(
        f"""
        CREATE TABLE part (id int, at int, v text, PRIMARY KEY (id, at)) PARTITION BY RANGE (at);
        CREATE TABLE low PARTITION OF part FOR VALUES FROM (0) TO (100);
        CREATE TABLE high (v text, at int NOT NULL, id int NOT NULL, PRIMARY KEY (id, at));
        ALTER TABLE part ATTACH PARTITION high FOR VALUES FROM (100) TO (200);
        CREATE PUBLICATION penstock FOR TABLE {members};
        INSERT INTO part SELECT g, g, 'v' FROM generate_series(0, 199) g;
        """
    )
    with Pump(database, tmp_path) as pump:
        pump.settle()
        database.sql("UPDATE part SET at = at + 100, v = 'moved' WHERE at BETWEEN 10 AND 20")
        database.sql("UPDATE part SET v = 'stays' WHERE id > 150")
        database.sql("DELETE FROM part WHERE id % 9 = 0")
        pump.settle()
        assert pump.collections() == sorted(f"shop.{table}" for table in tables)
    check(pump, database, tables)


def test_generated_excluded_and_text_columns_with_quoted_names_equal_table(
    database: Database, tmp_path: Path
) -> None:
    database.sql(
        """
        CREATE SCHEMA "My Schema";
        CREATE TABLE "My Schema"."Odd Ta""ble" (
          "Key" int PRIMARY KEY, "a b" text, twice int GENERATED ALWAYS AS ("Key" * 2) STORED,
          secret text, amount numeric(5, 2), "ü" interval);
        CREATE TABLE keyless (a int, b text);
        ALTER TABLE keyless REPLICA IDENTITY FULL;
        INSERT INTO "My Schema"."Odd Ta""ble" ("Key", "a b", secret, amount, "ü")
        SELECT g, 'a', 's', g / 7.0, '1 day 2 hours'
        FROM generate_series(1, 30) g;
        INSERT INTO keyless SELECT g % 3, 'same' FROM generate_series(1, 30) g;
        CREATE PUBLICATION penstock FOR ALL TABLES;
        """
    )
    odd = 'My Schema."Odd Ta""ble"'
    tables = [
        {"name": '"My Schema"."Odd Ta""ble"', "exclude": ["secret"], "text": ["amount"]},
        "public.keyless",
    ]
    with Pump(database, tmp_path, tables=tables) as pump:
        pump.settle()
        database.sql(
            """
            UPDATE "My Schema"."Odd Ta""ble" SET secret = 'other', amount = 'NaN' WHERE "Key" < 9;
            UPDATE "My Schema"."Odd Ta""ble" SET "Key" = -"Key", "ü" = '-3 mons 04:05:06'
            WHERE "Key" > 20;
            DELETE FROM keyless WHERE ctid IN (SELECT ctid FROM keyless WHERE a = 1 LIMIT 4);
            UPDATE keyless SET b = 'other' WHERE ctid = (SELECT min(ctid) FROM keyless);
            INSERT INTO keyless VALUES (NULL, NULL);
            DELETE FROM keyless WHERE a IS NULL;
            INSERT INTO keyless VALUES (NULL, NULL), (NULL, NULL);
            """
        )
        pump.settle()
    found = check(pump, database, ["public.keyless", odd])
    assert found[odd].columns == ("Key", "a b", "amount", "ü")


def test_restart_resumes_stream_without_second_snapshot(database: Database, tmp_path: Path) -> None:
    database.sql(
        """
        CREATE TABLE item (id int PRIMARY KEY, v text);
        INSERT INTO item SELECT g, 'v' FROM generate_series(1, 100) g;
        CREATE PUBLICATION penstock FOR ALL TABLES;
        """
    )
    role = f"{database.name}_follower"
    database.sql(f"CREATE ROLE {role} LOGIN REPLICATION; GRANT SELECT ON item TO {role}")
    try:
        pump = Pump(database, tmp_path, url=database.url(user=role))
        with pump:
            pump.settle()
        first = pump.state()
        # A second snapshot would fail from here on.
        database.sql(f"REVOKE SELECT ON item FROM {role}")
        database.sql("UPDATE item SET v = 'away' WHERE id < 50; DELETE FROM item WHERE id = 7")
        for _ in range(2):
            with pump:
                database.sql("UPDATE item SET v = v || '!' WHERE id = 1")
                pump.settle()
        check(pump, database, ["public.item"])
        assert pump.state()["slot"] == first["slot"]
    finally:
        database.sql(f"DROP OWNED BY {role}; DROP ROLE {role}")


def test_table_added_to_file_is_tracked_after_restart(shop: Database, tmp_path: Path) -> None:
    for name in ("early", "late"):
        shop.sql(f"CREATE TABLE {name} (id int PRIMARY KEY); INSERT INTO {name} VALUES (1), (2)")
    with Pump(shop, tmp_path, tables=["public.early"]) as pump:
        shop.sql("INSERT INTO late VALUES (3)")
        pump.settle()
        check(pump, shop, ["public.early"])
    with Pump(shop, tmp_path, tables=["public.early", "public.late"]) as pump:
        shop.sql("INSERT INTO late VALUES (4); INSERT INTO early VALUES (3)")
        pump.settle()
        until(lambda: len(pump.collections()) == 2, "the late table to be seen")
        pump.settle()
    for name in ("public.early", "public.late"):
        check(pump, shop, [name])
