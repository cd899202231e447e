"""Lookups of old rows in several requests give the same result as one request."""

from pathlib import Path

import pyarrow as pa
import pytest

from penstock.ingest.tick_transaction import TickTransaction
from penstock.servers.postgres import Database
from tests.ingest.checker import check
from tests.ingest.pump import Pump
from tests.ingest.workload import SCHEMA, TABLES, Carrier, check_coins


@pytest.fixture
def key_counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list of key counts, one per lookup."""
    key_counts: list[int] = []
    lookup = TickTransaction.lookup

    def watched(tick: TickTransaction, collection: str, keys: pa.Table) -> pa.Table:
        key_counts.append(keys.num_rows)
        return lookup(tick, collection, keys)

    monkeypatch.setattr(TickTransaction, "lookup", watched)
    return key_counts


def test_workload_with_small_lookups_equals_tables(
    database: Database, tmp_path: Path, key_counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.sources.postgres.tick_reader.FOUND_BYTES", 12_000)
    monkeypatch.setattr("penstock.sources.postgres.tick_reader.FIRST_LOOKUP", 3)
    database.sql(SCHEMA)
    with Pump(database, tmp_path) as pump, Carrier(database.url(), pause_ms=100) as carrier:
        for _ in range(3):
            pump.settle()
        carrier.stop()
        pump.settle()
        check(pump, database, TABLES, check_coins)
    assert key_counts


def test_changes_of_one_key_split_over_several_lookups_equal_table(
    database: Database, tmp_path: Path, key_counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.sources.postgres.tick_reader.FIRST_LOOKUP", 2)
    monkeypatch.setattr("penstock.sources.postgres.tick_reader.FOUND_BYTES", 2_000)
    database.sql(
        "CREATE TABLE t (id int PRIMARY KEY, n int, v text); "
        "ALTER TABLE t ALTER v SET STORAGE EXTERNAL; "
        "INSERT INTO t SELECT g, 0, repeat('x', 5000) FROM generate_series(1, 9) g; "
        "CREATE PUBLICATION penstock FOR TABLE t"
    )
    with Pump(database, tmp_path) as pump:
        pump.settle()
        database.sql(
            "BEGIN; UPDATE t SET n = n + 1; UPDATE t SET n = n + 1; DELETE FROM t WHERE id < 4; "
            "INSERT INTO t VALUES (2, 7, 'again'); UPDATE t SET n = 8 WHERE id = 2; COMMIT"
        )
        pump.settle()
        check(pump, database, ["public.t"])
        assert len(key_counts) > 9
        database.sql("BEGIN; UPDATE t SET id = id + 100; UPDATE t SET id = id - 99; COMMIT")
        pump.settle()
        check(pump, database, ["public.t"])


def test_lookup_of_many_small_rows_uses_two_requests(
    database: Database, tmp_path: Path, key_counts: list[int]
) -> None:
    database.sql(
        "CREATE TABLE t (id int PRIMARY KEY, n int); CREATE PUBLICATION penstock FOR TABLE t; "
        "INSERT INTO t SELECT g, g FROM generate_series(1, 30000) g"
    )
    with Pump(database, tmp_path) as pump:
        pump.settle()
        database.sql("DELETE FROM t WHERE id % 30 > 0")
        pump.settle()
        check(pump, database, ["public.t"])
    assert key_counts == [1_000, 28_000]
