"""The demo, with transactions in local threads instead of Spark tasks.

The demo runs once. Each test then damages a copy of its output in one way, and the comparison
must report the damage.
"""

import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import psycopg
import pyarrow as pa
import pytest

from penstock import persist
from penstock.cli.demo import conclude
from penstock.clock import SYSTEM_CLOCK
from penstock.demo import run as demo
from penstock.demo.clicks import TOPIC, ClickCounts, ClickTraffic, open_topic
from penstock.demo.comparison import Compared, Places, compare
from penstock.demo.shop import TABLES, ChangeCounts
from penstock.errors import UsageError
from penstock.ingest.tasks import tasks_of as sources
from penstock.materialize.runner import LocalRunner
from penstock.materialize.tasks import tasks_of as materializations
from penstock.persist.lake import find_collection
from penstock.pipeline import load
from penstock.servers.kafka import KafkaBroker
from penstock.servers.postgres import PostgresServer, find_binaries
from penstock.supervisor import Supervisor
from tests.sources.kafka.clients import Record, consume

SOME = ChangeCounts(transactions=9, inserts=9, updates=9, deletes=9)


def up(
    file: Path,
    *,
    stop: threading.Event,
    on_start: Callable[[Supervisor], None],
    say: Callable[[str], None],
) -> None:
    """Run the pipeline as the engine does, without Spark."""
    pipeline = load(file)
    tasks = [*sources(pipeline, jobs=None), *materializations(pipeline, jobs=LocalRunner())]
    supervisor = Supervisor(tasks, stop)
    on_start(supervisor)
    supervisor.run(once=False)


@dataclass(frozen=True)
class Ran:
    compared: Compared
    lines: list[str]
    places: Places


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Yield a folder that the Postgres user, who is not root, can enter."""
    with tempfile.TemporaryDirectory(prefix="penstock-demo-") as folder:
        Path(folder).chmod(0o711)
        yield Path(folder)


@pytest.fixture(scope="module")
def ran(folder: Path) -> Iterator[Ran]:
    """Run a demo, stop it some seconds after its first row, and start its server again."""
    own, lines, stop = folder / "own", list[str](), threading.Event()

    def say(line: str) -> None:
        lines.append(line)
        if "SQLite follows" in line:
            threading.Timer(3, stop.set).start()

    demo.prepare(own)
    compared = demo.run_demo(own, up=up, stop=stop, say=say, rate=100, rng=random.Random(7))
    with PostgresServer(own / "postgres", binaries="wheel", tcp=False) as server:
        places = Places(server.url(database="shop"), f"file:{own}/lake", own / "shop.db")
        yield Ran(compared, lines, places)


def test_demo_run_ends_with_equal_and_nontrivial_comparison(ran: Ran) -> None:
    assert ran.compared.differences == ()
    assert ran.compared.trivial == ""
    assert ran.compared.rows > 3_000
    assert ran.compared.looks > 1
    assert ran.compared.first_row_s > 0


def test_demo_run_prints_paths_of_pipeline_lake_and_database(ran: Ran) -> None:
    (file,) = (line.split()[5].rstrip(";") for line in ran.lines if "the pipeline is" in line)
    assert Path(file).exists()
    assert sum(ran.places.lake in line for line in ran.lines) == 2
    assert sum(str(ran.places.sqlite) in line for line in ran.lines) == 1


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        (
            "DELETE FROM customers WHERE id = 1",
            "customers: SQLite is missing id=1, name=customer 1",
        ),
        (
            "UPDATE products SET stock = stock - 1 WHERE id = 2",
            "the books of SQLite do not balance",
        ),
        ("UPDATE customers SET address = 'old' WHERE id = 3", "customers: SQLite has, and Postgr"),
        (
            "UPDATE customers SET address = '' WHERE address IS NULL",
            "customers: SQLite is missing id=",
        ),
        (
            "UPDATE order_lines SET amount = '0.01' WHERE rowid = (SELECT min(rowid) FROM orders)",
            "1 orders whose total is not the sum of their lines",
        ),
        ("DELETE FROM order_lines", "order_lines: SQLite is missing"),
    ],
    ids=["lost row", "lost change of stock", "lost update", "null", "wrong amount", "lost table"],
)
def test_comparison_with_damaged_sqlite_reports_difference(
    ran: Ran, tmp_path: Path, statement: str, expected: str
) -> None:
    damaged = replace(ran.places, sqlite=tmp_path / "shop.db")
    shutil.copy(ran.places.sqlite, damaged.sqlite)
    with closing(sqlite3.connect(damaged.sqlite)) as target, target:
        assert target.execute(statement).rowcount > 0
    compared = compare(damaged, ran.compared.as_of, changes=SOME)
    assert not compared.equal
    assert any(expected in difference for difference in compared.differences), compared.differences
    assert not any("collection is missing" in difference for difference in compared.differences)


def test_comparison_with_outdated_collection_reports_missing_rows(ran: Ran) -> None:
    sinces = []
    for table in TABLES:
        client, collection = find_collection(
            ran.places.lake, ran.places.collection(table), hold=False, settings=persist.Settings()
        )
        with client:
            sinces.append(collection.since)
    compared = compare(ran.places, max(sinces), changes=SOME)
    assert any("the collection is missing" in difference for difference in compared.differences)
    assert not any("SQLite" in difference for difference in compared.differences)


def test_comparison_with_torn_read_is_not_equal(ran: Ran) -> None:
    compared = compare(
        ran.places, ran.compared.as_of, changes=SOME, torn="1 lines without an order"
    )
    assert not compared.equal
    assert replace(compared, differences=()).equal, "there is no other difference"


@dataclass(frozen=True)
class Clicked:
    sent: ClickCounts
    seen: list[Record]
    aborted: list[Record]


@pytest.fixture(scope="module")
def clicked(kafka: KafkaBroker) -> Iterator[Clicked]:
    """Produce a topic of clicks, some of them in aborted transactions."""
    open_topic(kafka)
    traffic = ClickTraffic(kafka.bootstrap, random.Random(7), rate=1_000)
    traffic.start()
    never = threading.Event()
    try:
        while traffic.counts.clicks < 30 or traffic.counts.aborted < 10:
            traffic.check()
            SYSTEM_CLOCK.wait(never, 20)
    finally:
        traffic.end()
    traffic.check()
    seen = consume(kafka, TOPIC)
    sent = consume(kafka, TOPIC, committed=False)
    yield Clicked(traffic.counts, seen, [record for record in sent if record not in seen])
    kafka.delete_topic(TOPIC)


def arranged(
    ran: Ran, kafka: KafkaBroker, folder: Path, stored: list[Record], written: list[Record]
) -> Places:
    """Copy the output of the demo, and add these clicks to its collection and SQLite."""
    lake, sqlite = folder / "lake", folder / "shop.db"
    shutil.copytree(ran.places.lake.removeprefix("file:"), lake)
    shutil.copy(ran.places.sqlite, sqlite)
    columns = {"customer": "int32", "page": "string", "product": "int32"}
    columns |= {"_partition": "int32", "_offset": "int64"}
    schema = pa.schema([(name, pa.type_for_alias(kind)) for name, kind in columns.items()])
    with persist.open(f"file:{lake}/clicks", writer="us") as client:
        collection = client.create_or_load(TOPIC, schema=schema)
        rows = pa.Table.from_pylist([to_row(record) for record in stored], schema)
        time = ran.compared.as_of
        collection.compare_and_append(rows, 0, time + 1, time=time)
    with closing(sqlite3.connect(sqlite)) as target, target:
        target.execute(f"CREATE TABLE clicks ({', '.join(columns)})")
        values = [tuple(to_row(record).values()) for record in written]
        target.executemany("INSERT INTO clicks VALUES (?, ?, ?, ?, ?)", values)
    return replace(ran.places, lake=f"file:{lake}", sqlite=sqlite, brokers=kafka.bootstrap)


def to_row(record: Record) -> dict[str, object]:
    place = {"_partition": record.partition, "_offset": record.offset}
    return json.loads(record.value or b"") | place


def test_comparison_of_clicks_counts_committed_and_aborted_records(
    ran: Ran, kafka: KafkaBroker, clicked: Clicked, tmp_path: Path
) -> None:
    places = arranged(ran, kafka, tmp_path, clicked.seen, clicked.seen)
    compared = compare(places, ran.compared.as_of, changes=SOME, clicks_sent=clicked.sent)
    assert compared.differences == ()
    assert compared.clicks == clicked.sent.clicks == len(clicked.seen)
    assert compared.aborted == clicked.sent.aborted == len(clicked.aborted)


@pytest.mark.parametrize("place", ["the collection", "SQLite"])
@pytest.mark.parametrize("verb", ["is missing", "has, and the topic does not have,"])
def test_comparison_with_missing_or_extra_click_reports_difference(
    ran: Ran, kafka: KafkaBroker, clicked: Clicked, tmp_path: Path, place: str, verb: str
) -> None:
    wrong = clicked.seen[1:] if verb == "is missing" else [*clicked.seen, clicked.aborted[0]]
    stored = wrong if place == "the collection" else clicked.seen
    written = wrong if place == "SQLite" else clicked.seen
    places = arranged(ran, kafka, tmp_path, stored, written)
    compared = compare(places, ran.compared.as_of, changes=SOME, clicks_sent=clicked.sent)
    (difference,) = compared.differences
    assert difference.startswith(f"clicks: {place} {verb} customer=")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"rows": 999}, "only 999 rows"),
        ({"updates": 0}, "no row was updated"),
        ({"deletes": 0}, "no row was deleted"),
        ({"aborted": 0}, "7 clicks were committed and 0 aborted"),
        (
            {"differences": ("orders: SQLite is missing id=7",)},
            "different: orders: SQLite is missing id=7",
        ),
    ],
    ids=["few rows", "no update", "no delete", "no abort", "unequal"],
)
def test_conclude_with_trivial_or_unequal_comparison_returns_1_with_reason(
    change: dict[str, object], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    good = Compared(1, 1_000, 1, 1, 1, 1, 2.5, 1, (), clicks=7, aborted=2)
    assert conclude(good) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["equal"] is True
    assert conclude(replace(good, **change)) == 1  # type: ignore[arg-type]
    lines = capsys.readouterr().out.splitlines()
    assert expected in "\n".join(lines[:-1])
    assert json.loads(lines[-1])["equal"] is ("differences" not in change)


def test_prepare_demo_in_nonempty_folder_raises_usage_error(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(UsageError, match="is not empty"):
        demo.prepare(tmp_path)


SERVER = """
import sys
from pathlib import Path
from penstock.servers.postgres import PostgresServer
server = PostgresServer(Path(sys.argv[1]), binaries=Path(sys.argv[2]), tcp=False)
server.start()
print(server.pid, flush=True)
sys.stdin.read()
"""


def test_postgres_server_without_tcp_listens_only_on_private_socket(folder: Path) -> None:
    own = folder / "quiet"
    own.mkdir(mode=0o755)
    with PostgresServer(own, binaries="wheel", tcp=False) as server:
        assert server.sql("SHOW listen_addresses") == [("",)]
        (socket,) = own.glob(".s.PGSQL.[0-9]*[0-9]")
        assert socket.stat().st_mode & 0o077 == 0
        with pytest.raises(UsageError, match="its socket only"):
            server.url(host="tcp")
        password = server.password
    with (
        PostgresServer(own, binaries="wheel") as server,
        psycopg.connect(server.url(host="tcp")) as connection,
    ):
        assert connection.execute("SELECT 1").fetchall() == [(1,)]
        assert (
            server.password
            == password
            != PostgresServer(folder / "other", binaries="wheel").password
        )


def test_postgres_server_ends_when_its_parent_is_killed(folder: Path, tmp_path: Path) -> None:
    # Other users cannot enter this folder, as with a virtual environment below /root.
    (tmp_path / "bin").symlink_to(find_binaries("wheel"))
    started = subprocess.Popen(
        [sys.executable, "-c", SERVER, folder / "postgres", tmp_path / "bin"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with started:
        assert started.stdout is not None
        pid = int(started.stdout.readline())
        owner = Path(f"/proc/{pid}").stat().st_uid
        assert owner != 0, "it never runs as root"
        os.kill(started.pid, signal.SIGKILL)
    never = threading.Event()
    for _ in range(500):
        if not Path(f"/proc/{pid}").exists():
            return
        SYSTEM_CLOCK.wait(never, 20)
    os.kill(pid, signal.SIGQUIT)
    pytest.fail("the server still runs")
