"""A resync of a table whose new form its collection cannot hold: a new collection at one time."""

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from penstock import persist
from penstock.clock import SYSTEM_CLOCK
from penstock.errors import IndeterminateError
from penstock.failpoints import Action, Failpoint, arm, disarm, hit
from penstock.ingest.loop import IngestLoop
from penstock.ingest.snapshot_loader import SnapshotLoader
from penstock.persist import CollectionErrored
from penstock.persist.requests import send_request
from penstock.persist.store import open_store
from penstock.servers.postgres import Database
from tests.ingest.equality import difference
from tests.ingest.pump import SOURCE, Pump, until
from tests.ingest.test_failpoints import slots

TABLES = """
CREATE TABLE changed (id int PRIMARY KEY, n int, other text);
INSERT INTO changed SELECT n, n, 'x' FROM generate_series(1, 300) n;
CREATE TABLE calm (id int PRIMARY KEY, v text);
INSERT INTO calm VALUES (1, 'a');
"""
CHANGES = {
    "type": "ALTER TABLE changed ALTER n TYPE text USING 'n' || n; "
    "INSERT INTO changed VALUES (1000, 'many', 'y')",
    "key": "ALTER TABLE changed DROP CONSTRAINT changed_pkey; "
    "ALTER TABLE changed ADD PRIMARY KEY (n); INSERT INTO changed VALUES (1, 1000, 'y')",
    "column dropped": "ALTER TABLE changed DROP n; INSERT INTO changed VALUES (1000, 'y')",
    "dropped and created": "DROP TABLE changed; CREATE TABLE changed (id text PRIMARY KEY); "
    "INSERT INTO changed VALUES ('first'); ALTER PUBLICATION penstock ADD TABLE changed",
}
NAME = f"{SOURCE}.public.changed"


@pytest.fixture(autouse=True)
def handled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # So requests are read also between a crash and the end of the process.
    monkeypatch.setattr("penstock.supervisor.request_queue.POLL_MS", 1)


@pytest.fixture
def pump(database: Database, tmp_path: Path) -> Iterator[Pump]:
    database.sql(TABLES)
    with Pump(database, tmp_path, tables=["public.changed", "public.calm"]) as pump:
        pump.settle()
        yield pump


def resync(pump: Pump, *tables: str) -> dict[str, Any]:
    blob = open_store(pump.storage, persist.Settings())
    answer = send_request(
        blob, "resync", tables, clock=SYSTEM_CLOCK, rng=random.Random(), patience_ms=60_000
    )
    blob.close()
    return dict(answer)


def check_equal(pump: Pump, database: Database) -> None:
    with pump.reader() as client:
        for table in ("public.changed", "public.calm"):
            collection = client.collection(f"{SOURCE}.{table}")
            as_of = collection.upper - 1
            assert not difference(collection, as_of, database, table, "true"), table


@pytest.mark.parametrize("change", CHANGES)
def test_resync_of_incompatible_table_moves_its_name_to_a_new_collection(
    pump: Pump, database: Database, change: str
) -> None:
    before = pump.settle()
    with pump.reader() as client:
        old = client.collection(NAME).state
    database.sql(CHANGES[change])
    failed = pump.settle()
    with pump.reader() as client:
        error = client.collection(NAME).state.errors[-1]
        assert "penstock resync" in error.error.hint
        assert error.error.hint.endswith("'public.changed'")
    database.sql("INSERT INTO calm VALUES (2, 'b')")
    pump.settle()
    answer = resync(pump, "public.changed")
    assert (answer["done"], answer["left"]) == (True, {}), answer
    pump.settle()
    check_equal(pump, database)
    with pump.reader() as client:
        new = client.collection(NAME)
        assert new.id != old.id
        assert [each.id for each in client.state.generations(NAME)] == [old.id, new.id]
        moved = new.state.begins
        assert before < error.lower <= failed < moved
        earlier = client.collection(NAME, as_of=before).snapshot(before).arrow()
        assert (earlier.num_rows, earlier.column_names[:3]) == (300, ["id", "n", "other"])
        for as_of in (error.lower, moved - 1):
            with pytest.raises(CollectionErrored) as caught:
                client.collection(NAME, as_of=as_of).snapshot(as_of)
            assert caught.value.until == moved
        calm = client.collection(f"{SOURCE}.public.calm")
        assert not calm.state.errors
        assert len(calm.snapshot(moved - 1)) == 2
    # The stream continues into the new collection, after a restart too.
    pump.stop()
    database.sql("DELETE FROM changed WHERE ctid = (SELECT min(ctid) FROM changed)")
    with pump:
        pump.settle()
        check_equal(pump, database)
        assert resync(pump, "public.changed")["mended"] == 0
        database.sql("ALTER TABLE changed RENAME id TO ident")
        pump.settle()
        assert resync(pump)["left"] == {}
        pump.settle()
        check_equal(pump, database)
    with pump.reader() as client:
        assert len(client.state.generations(NAME)) == 3
    assert len(slots(database)) == 1


@pytest.mark.parametrize("tables", [("public.changed",), ()], ids=["named", "all"])
def test_resync_requested_in_the_tick_of_the_change_is_carried_out(
    pump: Pump, database: Database, monkeypatch: pytest.MonkeyPatch, tables: tuple[str, ...]
) -> None:
    between_ticks = threading.Lock()
    tick = IngestLoop._tick

    def gated(self: IngestLoop, time: int, loader: SnapshotLoader) -> None:
        with between_ticks:
            tick(self, time, loader)

    monkeypatch.setattr(IngestLoop, "_tick", gated)
    pump.settle()
    blob = open_store(pump.storage, persist.Settings())
    with ThreadPoolExecutor(1) as pool, closing(blob):
        with between_ticks:
            database.sql(CHANGES["type"])
            answer = pool.submit(resync, pump, *tables)
            until(lambda: [*blob.list("asks/")], "the request")
        assert (answer.result()["done"], answer.result()["left"]) == (True, {})
    pump.settle()
    check_equal(pump, database)
    with pump.reader() as client:
        assert len(client.state.generations(NAME)) == 2


@pytest.mark.parametrize(
    "point",
    [
        Failpoint.REPLACEMENT_CREATED,
        Failpoint.REPLACEMENT_READ,
        Failpoint.TICK_BEGIN,
        Failpoint.TICK_DONE,
    ],
)
def test_crash_during_replacement_is_finished_or_repeated_after_restart(
    pump: Pump, database: Database, point: Failpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.sql(CHANGES["type"])
    pump.settle()

    def hit_and_arm(passed: Failpoint) -> None:
        if passed == Failpoint.REPLACEMENT_READ and point != passed:
            arm(point, Action.ERROR)
        hit(passed)

    if point in (Failpoint.TICK_BEGIN, Failpoint.TICK_DONE):
        monkeypatch.setattr("penstock.ingest.tick_transaction.hit", hit_and_arm)
    else:
        arm(point, Action.ERROR)
    answers: list[dict[str, Any]] = []
    asking = threading.Thread(target=lambda: answers.append(resync(pump, "public.changed")))
    asking.start()
    assert isinstance(pump.await_error(), IndeterminateError)
    disarm()
    monkeypatch.undo()
    with pump:
        asking.join()
        assert (answers[0]["done"], answers[0]["left"]) == (True, {}), answers
        pump.settle()
        check_equal(pump, database)
        pump.settle()
    with pump.reader() as client:
        assert len(client.state.generations(NAME)) == 2
        hidden = [each for each in client.collections(hidden=True) if "/pending/" in each]
        assert not hidden
    with persist.open(pump.storage, writer="pump") as client:
        client.compact()
        stored = {each.key for each in client.reader.machine.blob.list("batch/")}
        assert stored == client.state.linked()
    assert len(slots(database)) == 1


def test_replaced_collection_is_destroyed_when_retain_has_passed(
    pump: Pump, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.ingest.loop.COMPACT_EVERY_MS", 0)
    database.sql(CHANGES["type"])
    pump.settle()
    assert resync(pump, "public.changed")["left"] == {}
    pump.stop()
    text = pump.file.read_text()
    pump.file.write_text(text + "retain: 1ms\n")
    with pump:
        pump.settle()
        pump.settle()
        check_equal(pump, database)
    with pump.reader() as client:
        assert len(client.state.generations(NAME)) == 1
