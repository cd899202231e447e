"""Regressions of large transactions: added columns, shards without work."""

import random

import pyarrow as pa
import pytest
from tests.materialize.lake import KEYED, SCHEMA, TU, Endpoint, Table, materializing, once, row

from penstock.engine.storage_access.spark import find_native_root
from penstock.errors import IndeterminateError, TransientError
from penstock.failpoints import Action, Failpoint, armed
from penstock.materialize.spark import SparkRunner


@pytest.fixture
def lake(tmp_path):
    return f"file:{tmp_path / 'lake'}"


@pytest.fixture
def table(lake):
    table = Table(f"{lake}/shop", random.Random(5))
    table.change()
    yield table
    table.client.close()


class Tries:
    def __init__(self, inner):
        self.inner, self.n, self.last = inner, 0, None

    def run(self, plans, commits):
        self.n += 1
        if self.n > 3:
            raise IndeterminateError(
                f"given up after {self.last} {getattr(self.last, 'detail', '')}"
            )
        try:
            self.inner.run(plans, commits)
        except TransientError as error:
            self.last = error
            raise


def large(spark):
    return Tries(SparkRunner(spark, lambda url: find_native_root(spark, url), large_bytes=1))


def test_large_transaction_with_column_added_after_its_upper_succeeds(spark, lake, table, tmp_path):
    u = table.client.create_or_load("shop.u", **KEYED)
    u.compare_and_append([(row(1), 0, 1)], 0, 20)
    endpoint = Endpoint("sqlite", tmp_path)
    with materializing(lake, endpoint, tmp_path, bindings=TU) as m:
        once(m)
        table.change()
        u.compare_and_append([(row(2), 20, 1)], 20, 40)
        with armed(Failpoint.PLAN_DONE, Action.ERROR), pytest.raises(IndeterminateError):
            once(m)
    table.collection.alter(pa.schema([*SCHEMA, ("more", pa.string())]))
    c = table.client.collection("shop.t")
    c.compare_and_append([({**row(77), "more": "x"}, 40, 1)], 40, 60)
    u.compare_and_append([], 40, 60)
    with materializing(lake, endpoint, tmp_path, bindings=TU, jobs=large(spark)) as m:
        once(m)
    assert 77 in [r["id"] for r in endpoint.rows()]


def test_large_transaction_with_one_shard_already_committed_succeeds(
    spark, lake, table, tmp_path, monkeypatch
):
    from penstock.materialize import shard

    endpoint = Endpoint("sqlite", tmp_path)
    with materializing(lake, endpoint, tmp_path, shards=2) as m:
        once(m)
        table.change()
        real = shard.TransactionInput.store

        def store(self, session):
            if self._key_range.begin:
                raise IndeterminateError("killed")
            return real(self, session)

        monkeypatch.setattr(shard.TransactionInput, "store", store)
        with pytest.raises(IndeterminateError):
            once(m)
        monkeypatch.undo()
    with materializing(lake, endpoint, tmp_path, shards=2, jobs=large(spark)) as m:
        once(m)
    assert endpoint.rows() == table.contents()


def test_row_keys_computed_by_spark_equal_row_keys_in_process(spark, lake, tmp_path):
    from penstock import persist

    client = persist.open(f"{lake}/shop", writer="upstream")
    cols = pa.schema([("a", pa.float64()), ("b", pa.binary()), ("d", pa.decimal128(10, 2))])
    from decimal import Decimal

    c = client.create_or_load("shop.t", schema=cols)
    rows = [
        {"a": a, "b": b, "d": d}
        for a in (0.0, -0.0, float("nan"), None)
        for b in (b"", None)
        for d in (Decimal("1.00"), None)
    ]
    c.compare_and_append([(r, 0, 1) for r in rows], 0, 5)
    found = {}
    import sqlite3

    for n, jobs in enumerate((None, large(spark))):
        folder = tmp_path / str(n)
        folder.mkdir()
        with materializing(
            lake,
            Endpoint("sqlite", folder),
            folder,
            jobs=jobs,
            name=f"m{n}",
            collections={"shop.t": {"key": "row"}},
        ) as m:
            once(m)
        db = sqlite3.connect(folder / "t.db")
        found[n] = sorted(db.execute("SELECT mz_row, mz_count FROM t").fetchall())
    client.close()
    assert found[0] == found[1]
