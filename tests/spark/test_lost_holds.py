"""Lost holds, and a since that advances before the hold is taken.

The tests simulate a suspended driver: its hold is not renewed, and the clock of the
writer advances past the lease.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.persist.shop import by_hand

import penstock.spark as ps
from penstock import persist
from penstock.datasource.batch_plan import find_contents, plan_contents
from penstock.datasource.options import BatchOptions
from penstock.datasource.read_task import rows_of
from penstock.durable import open_blob
from penstock.engine.dataframe_lifetime import spark as dataframe_lifetime
from penstock.errors import Corruption, UsageError
from penstock.persist import HoldLost, SinceError
from penstock.persist.holds import LeasedClaims, list_holds
from penstock.persist.scan_holds import ScanHolds
from penstock.testing.clocks import ManualClock

SCHEMA = pa.schema([("k", pa.string()), ("n", pa.int64())])
LEASE_MS = 200


class Shop:
    """Collection whose only row changes at every time, and its writer."""

    def __init__(self, url: str, client: persist.Client, clock: ManualClock) -> None:
        self.url = url
        self.client = client
        self.clock = clock
        self.table = client.create_or_load("rows", schema=SCHEMA, key_columns=["k"])
        self.write(6)

    def write(self, times: int) -> None:
        for time in range(self.table.upper, self.table.upper + times):
            gone = [({"k": "a", "n": time - 1}, time, -1)] if time else []
            self.table.write([({"k": "a", "n": time}, time, 1), *gone]).result()
            self.table.seal(time + 1).result()

    def compact(self, since: int) -> None:
        self.table.allow_compaction(since).result()
        self.client.compact()
        self.client.compact()

    def outlive_leases(self, since: int) -> None:
        self.compact(since)
        self.clock.move_ms(LEASE_MS + 1)
        self.compact(since)
        assert self.table.since == since

    def held(self) -> list[dict[int, int]]:
        return [hold.sinces for _, hold in list_holds(open_blob(self.url)).values()]


@contextmanager
def opened(url: str) -> Iterator[Shop]:
    clock = ManualClock()
    settings = by_hand(clock=clock, inline_bytes=0, fan_in=2)
    with persist.open(url, writer="w", settings=settings) as client:
        yield Shop(url, client, clock)


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    with opened(f"file:{tmp_path / 'lake'}") as shop:
        yield shop


@pytest.fixture
def asleep(monkeypatch: pytest.MonkeyPatch) -> ScanHolds:
    """Return scan holds that are not renewed."""
    readings = ScanHolds(by_hand(lease_ms=LEASE_MS))
    monkeypatch.setattr(ps, "READINGS", readings)
    return readings


def rows(frame: Any) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in frame.collect()]


# DataFrames.


def test_frame_with_lost_hold_raises_and_next_read_is_held(spark, shop, asleep):
    frame = ps.read(spark, shop.url, "rows", 4)
    shop.outlive_leases(5)
    with pytest.raises(UsageError, match="was compacted away while it was being read") as raised:
        frame.collect()
    assert "The reading lost its hold" in raised.value.detail
    assert raised.value.hint == "Read again."
    # The old frame still exists; the new frame has its own hold.
    again = ps.read(spark, shop.url, "rows", 5)
    assert asleep.statistics() == {shop.url: 2}
    shop.write(3)
    shop.compact(8)
    assert shop.table.since == 5
    assert rows(again) == [("a", 5)]
    del frame, again, raised
    for _ in range(20):
        gc.collect()
        spark._jvm.System.gc()
        dataframe_lifetime._WATCH.check()
        if not asleep.statistics():
            break
    assert (asleep.statistics(), shop.held()) == ({}, [])


def test_missing_file_of_held_frame_raises_corruption(spark, shop, asleep):
    frame = ps.read(spark, shop.url, "rows", 4)
    files = [Path(each.removeprefix("file:")) for each in frame.inputFiles()]
    shop.compact(4)
    linked = {Path(shop.url.removeprefix("file:")) / key for key in shop.client.state.linked()}
    # These files were merged, and only the hold of this frame retains them.
    kept = {Path("/", str(file).lstrip("/")) for file in files} - linked
    assert kept
    for file in kept:
        file.unlink()
    with pytest.raises(Corruption, match="is damaged"):
        frame.collect()


def test_read_as_of_earliest_follows_since_that_advances_before_the_hold(
    spark, shop, asleep, monkeypatch
):
    def moving(since: int) -> None:
        """Advance since just after the next read has found the collection."""
        real, done = ps._find, []

        def find(*asked: Any, **options: Any) -> Any:
            found = real(*asked, **options)
            if not done:
                done.append(shop.compact(since))
            return found

        monkeypatch.setattr(ps, "_find", find)

    moving(2)
    frame = ps.read(spark, shop.url, "rows", "earliest")
    assert rows(frame) == [("a", 2)]
    shop.outlive_leases(2)
    moving(3)
    changes = ps.changes(spark, shop.url, "rows", "earliest", "latest")
    assert sorted({row["mz_timestamp"] for row in changes.collect()}) == [4, 5]
    shop.outlive_leases(3)
    moving(4)
    with pytest.raises(SinceError, match="as of 3"):
        ps.read(spark, shop.url, "rows", 3)


# Scan holds without Spark.


def begin(readings: ScanHolds, shop: Shop, since: int) -> Any:
    return readings.begin(shop.url, shop.table.id, "rows", since, hold=True)


def claims_of(reading: Any) -> LeasedClaims:
    claims = reading.client.reader.claims
    assert isinstance(claims, LeasedClaims)
    return claims


def test_new_scan_after_lost_hold_gets_a_new_client(shop, asleep):
    lost, other = begin(asleep, shop, 4), begin(asleep, shop, 4)
    assert lost.client is other.client
    shop.outlive_leases(5)
    fresh = begin(asleep, shop, 5)
    assert fresh.client is not lost.client
    assert begin(asleep, shop, 5).client is fresh.client
    claims_of(fresh).renew()
    with pytest.raises(HoldLost):
        claims_of(lost).renew()
    assert asleep.statistics() == {shop.url: 4}
    lost.release()
    lost.release()
    assert not lost.client.reader.closed.is_set()
    other.release()
    assert lost.client.reader.closed.is_set()
    assert asleep.statistics() == {shop.url: 2}
    assert shop.held() == [{shop.table.id: 5}]


def test_scan_below_since_raises_since_error_and_leaves_no_hold(shop, asleep):
    lost = begin(asleep, shop, 4)
    shop.outlive_leases(5)
    with pytest.raises(SinceError):
        begin(asleep, shop, 4)
    assert asleep.statistics() == {shop.url: 1}
    lost.release()
    assert (asleep.statistics(), shop.held()) == ({}, [])


# format("penstock").


def planned(shop: Shop, since: int, **changed: Any) -> tuple[Any, BatchOptions]:
    options = BatchOptions(location=shop.url, collection="rows", **changed)
    found = find_contents(options)
    shop.compact(since)
    return found, options


def test_plan_as_of_earliest_follows_since_that_advances_before_the_hold(shop):
    contents, options = planned(shop, 3, as_of="earliest")
    assert contents.as_of == 0
    for _ in range(2):
        tasks = plan_contents(contents, options)
        given = [row for task in tasks for some in rows_of(task) for row in some.to_pylist()]
        assert given == [{"k": "a", "n": 3}]
        shop.compact(5)
        assert shop.table.since == 3
    with pytest.raises(SinceError):
        plan_contents(*planned(shop, 3, as_of="2"))


def test_plan_with_fixed_time_or_without_hold_raises_after_since_advances(shop):
    plans = [
        planned(shop, 0, as_of="0"),
        planned(shop, 0, as_of="earliest", hold=False),
        planned(shop, 0, as_of="latest"),
    ]
    shop.write(2)
    shop.compact(7)
    for each in plans:
        with pytest.raises(SinceError):
            plan_contents(*each)
