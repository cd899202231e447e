"""Run of the demo, from the start of the servers to the comparison."""

import json
import os
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.demo.clicks import (
    COLUMNS,
    PARTITIONS,
    TOPIC,
    ClickTraffic,
    background_broker,
    end_offsets,
    missing_jars_note,
    open_topic,
)
from penstock.demo.comparison import Compared, Places, books_in_sqlite, compare, position, time_at
from penstock.demo.kernel_cache import compile_in_background
from penstock.demo.repeated_action import RepeatedAction
from penstock.demo.shop import TABLES, ChangeCounts, Traffic, describe_imbalance, open_shop
from penstock.errors import UsageError
from penstock.servers import PostgresServer
from penstock.supervisor import Supervisor
from penstock.supervisor.status import MaterializationStatus, State, TaskStatus

__all__ = ["Up", "pipeline_text", "prepare", "run_demo"]

SOURCE: Final = "shop"
TARGET: Final = "local"
POLL_MS: Final = 250
PRINT_EVERY_MS: Final = 5_000
FIRST_ROW_MS: Final = 300_000
"""Time limit for the first row. It rarely takes more than a minute, but machines differ."""

DRAIN_MS: Final = 120_000
STOP_S: Final = 60

_COMPILES: Final = "; the first run compiles its hot loops, which takes about half a minute"

_FILE: Final = """\
# Pipeline of `penstock demo`.
location: {lake}
tick: 250ms
sources:
  shop:
    postgres:
      url: {url}
      tables: [{tables}]
{clicks}materializations:
  local:
    connector: sqlite
    endpoint: {{path: {sqlite}}}
    bindings:
{bindings}
"""

_CLICKS: Final = """\
  clicks:
    kafka:
      brokers: {brokers}
      topic: clicks
      format: {{json: {{columns: {{{columns}}}}}}}
"""


class Up(Protocol):
    """Function that runs the pipeline of a file until `stop` is set."""

    def __call__(
        self,
        file: Path,
        *,
        stop: threading.Event,
        on_start: Callable[[Supervisor], None],
        say: Callable[[str], None],
    ) -> None:
        """Run the pipeline; `on_start` receives the supervisor, `say` prints progress."""
        ...


def prepare(folder: Path) -> None:
    """Create the folder of a demo, accessible to its Postgres server.

    Raises:
        UsageError: the folder is not empty.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise UsageError(
            f'folder "{folder}" of the demo is not empty',
            hint="Use another folder, or omit --folder to use a temporary folder.",
        )
    if os.geteuid() == 0:
        folder.chmod(0o711)  # The server does not run as root, and needs search permission.


def run_demo(
    folder: Path,
    *,
    up: Up,
    stop: threading.Event,
    say: Callable[[str], None],
    for_seconds: float | None = None,
    kafka: bool = False,
    rate: float = 50,
    rng: random.Random | None = None,
    began_ms: int | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> Compared:
    """Start the demo in an empty folder, replicate until `stop` is set, and compare.

    With `kafka` the demo also has a topic of clicks. `for_seconds` counts from the first row in the
    target. The time to that row counts from `began_ms`, a `boot_ms` of the clock; the default is
    now. All processes have ended when this returns; the files in the folder stay.

    Raises:
        PenstockError: a part could not start, or did not reach its end.
    """
    folder = folder.resolve()
    progress = _Progress(say, clock, clock.boot_ms() if began_ms is None else began_ms)
    progress.say(
        f"starting Postgres and Kafka{missing_jars_note()} …" if kafka else "starting Postgres …"
    )
    with (
        compile_in_background(kafka=kafka),
        background_broker(folder / "kafka") if kafka else nullcontext() as broker,
        # The data need not survive a power cut.
        PostgresServer(
            folder / "postgres", binaries="wheel", settings={"fsync": "off"}, tcp=False
        ) as server,
    ):
        server.sql("CREATE DATABASE shop")
        places = Places(
            server.url(database="shop"),
            f"file:{folder}/lake",
            folder / "shop.db",
            brokers=None if broker is None else broker.bootstrap,
        )
        rows = open_shop(places.postgres)
        progress.say(f"created the shop: {rows:,} rows in {len(TABLES)} tables")
        if broker is not None:
            open_topic(broker)
            progress.say(f"created the topic of its clicks, with {PARTITIONS} partitions")
        file = folder / "pipeline.yaml"
        file.write_text(pipeline_text(places))
        progress.say(f"the pipeline is {file}; commands to try in another terminal:")
        for command in _sample_commands(places):
            say(f"          {command}")
        rng = rng or random.Random()
        traffic, clicks = Traffic(places.postgres, rng, rate, clock), None
        upstream: list[RepeatedAction] = [traffic]
        if places.brokers is not None:
            click_rng = random.Random(rng.getrandbits(64))
            clicks = ClickTraffic(places.brokers, click_rng, rate / 5, clock)
            upstream.append(clicks)
        pipeline = _PipelineThread(up, file, progress)
        demo = _Demo(places, traffic, clicks, pipeline, progress, stop, clock)
        try:
            for action in upstream:
                action.start()
            pipeline.start()
            first_row_s = demo.wait_for_first_row(rows)
            before = traffic.counts
            demo.follow(for_seconds)
            for action in upstream:
                action.stop()
            as_of = demo.drain()
        finally:
            for action in upstream:
                action.end()
            pipeline.stop()
        pipeline.raise_error()
        topic = ", the topic" if clicks else ""
        progress.say(f"comparing Postgres{topic}, collections and SQLite …")
        return compare(
            places,
            as_of,
            changes=traffic.counts - before,
            clicks_sent=None if clicks is None else clicks.counts,
            first_row_s=first_row_s,
            looks=demo.looks,
            torn=demo.torn,
        )


@dataclass(slots=True)
class _Progress:
    """Progress lines with the time since the start."""

    out: Callable[[str], None]
    clock: Clock
    began_ms: int
    printed_ms: int = 0

    @property
    def seconds(self) -> float:
        return round((self.clock.boot_ms() - self.began_ms) / 1_000, 1)

    def say(self, line: str) -> None:
        self.printed_ms = self.clock.boot_ms()
        self.out(f"{self.seconds:6.1f} s  {line}")

    def say_if_due(self, line: Callable[[], str]) -> None:
        if self.clock.boot_ms() - self.printed_ms >= PRINT_EVERY_MS:
            self.say(line())


@dataclass(slots=True)
class _Demo:
    """Waits and checks of the running demo, with progress lines."""

    places: Places
    traffic: Traffic
    clicks: ClickTraffic | None
    pipeline: "_PipelineThread"
    progress: _Progress
    stop: threading.Event
    clock: Clock
    looks: int = 0
    torn: str = ""

    def wait_for_first_row(self, seeded: int) -> float:
        """Return the seconds from the start until the first row is in SQLite."""
        goal = "the first row in SQLite"
        self.progress.say("starting the pipeline …")
        deadline_ms = self.clock.boot_ms() + FIRST_ROW_MS
        while not self._check_books():
            if self.clock.wait(self.stop, POLL_MS):
                raise UsageError(
                    f"demo was stopped before {goal}",
                    hint="Run it until the first row is delivered.",
                )
            self._check(deadline_ms, goal)
            self.progress.say_if_due(lambda: _describe_snapshot(self.pipeline.status(), seeded))
        seconds = self.progress.seconds
        self.progress.say(f"the first rows are in SQLite, {seconds} s after the start")
        return seconds

    def follow(self, for_seconds: float | None) -> None:
        """Check the books until the user stops the demo, or for this long."""
        before, began_ms = self.traffic.counts, self.clock.boot_ms()
        duration = "until Ctrl-C" if for_seconds is None else f"for {for_seconds:g} s"
        self.progress.say(
            f"SQLite follows the shop, {self.traffic.rate:g} transactions per second, {duration}"
        )
        while for_seconds is None or self.clock.boot_ms() - began_ms < for_seconds * 1_000:
            if self.clock.wait(self.stop, POLL_MS):
                return
            self._check()
            self._check_books()
            self.progress.say_if_due(lambda: self._describe_changes(before))

    def drain(self) -> int:
        """Wait until SQLite has all upstream changes; return the time of that state."""
        goal = "SQLite to receive all changes"
        lsn = position(self.places.postgres)
        offsets = None if self.places.brokers is None else end_offsets(self.places.brokers)
        self.progress.say(f"the shop is closed; waiting for {goal} …")
        deadline_ms = self.clock.boot_ms() + DRAIN_MS
        never = threading.Event()
        as_of = None
        while as_of is None or self._target().upper <= as_of:
            self._check(deadline_ms, goal)
            as_of = as_of or time_at(self.places, lsn, offsets)
            self.clock.wait(never, POLL_MS)
            self.progress.say_if_due(lambda: f"still waiting for {goal} …")
        return as_of

    def _describe_changes(self, before: ChangeCounts) -> str:
        counts = self.traffic.counts - before
        lag = _lag_text(self._target())
        clicks = f"; {self.clicks.counts.clicks:,} clicks" if self.clicks else ""
        return (
            f"{counts.transactions:,} transactions: {counts.inserts:,} inserts,"
            f" {counts.updates:,} updates, {counts.deletes:,} deletes{clicks};"
            f" {lag}"
        )

    def _target(self) -> MaterializationStatus:
        """Return the status of the materialization."""
        target = self.pipeline.status().get(TARGET)
        return MaterializationStatus() if target is None else target.materialization

    def _check_books(self) -> bool:
        """Return whether SQLite has rows; if so, check that their books balance."""
        books = books_in_sqlite(self.places.sqlite)
        if books is None:
            return False
        self.looks += 1
        self.torn = self.torn or describe_imbalance(books)
        return True

    def _check(self, deadline_ms: int | None = None, goal: str = "") -> None:
        """Raise the error of a part that has ended, or of an exceeded time limit."""
        self.traffic.check()
        if self.clicks is not None:
            self.clicks.check()
        self.pipeline.check()
        if deadline_ms is not None and self.clock.boot_ms() > deadline_ms:
            waits = [
                f"{name} waits for {status.waits_for}."
                for name, status in self.pipeline.status().items()
                if status.waits_for
            ]
            raise UsageError(
                f"demo timed out waiting for {goal}",
                detail=" ".join(waits),
                hint="Read the log above. On a busy machine, try again later.",
            )


class _PipelineThread:
    """Pipeline that runs in a thread, with its status and error."""

    def __init__(self, up: Up, file: Path, progress: _Progress) -> None:
        self._up = up
        self._file = file
        self._progress = progress
        self._stop = threading.Event()
        self._supervisor: Supervisor | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="pipeline", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Request the end of the pipeline and wait for it."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(STOP_S)

    def status(self) -> Mapping[str, TaskStatus]:
        return {} if self._supervisor is None else self._supervisor.status()

    def raise_error(self) -> None:
        """Raise the error that ended the pipeline, if there is one."""
        if self._error is not None:
            raise self._error
        if self._stop.is_set() and self._thread.is_alive():
            raise UsageError(f"pipeline of the demo did not stop within {STOP_S} s")

    def check(self) -> None:
        """Raise the error that ended the pipeline or one of its tasks."""
        self.raise_error()
        if not self._thread.is_alive():
            raise UsageError("pipeline of the demo ended unexpectedly")
        for name, status in self.status().items():
            if status.state == State.STOPPED and (error := status.error) is not None:
                raise UsageError(
                    f'"{name}" has stopped: {error.message}', detail=error.detail, hint=error.hint
                )

    def _run(self) -> None:
        try:
            self._up(self._file, stop=self._stop, on_start=self._watch, say=self._progress.say)
        except BaseException as error:  # noqa: BLE001 - thread boundary: `check` raises it
            self._error = error

    def _watch(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor


def pipeline_text(places: Places) -> str:
    """Return the pipeline file from a shop, and optionally a topic, to SQLite."""
    tables = {places.collection(table): table for table in TABLES}
    clicks = ""
    if places.brokers is not None:
        tables[TOPIC] = TOPIC
        columns = ", ".join(f"{name}: {type_name}" for name, type_name in COLUMNS.items())
        clicks = _CLICKS.format(brokers=json.dumps(places.brokers), columns=columns)
    bindings = [
        f"      - {{collection: {collection}, resource: {{table: {table}}}}}"
        for collection, table in tables.items()
    ]
    return _FILE.format(
        lake=json.dumps(places.lake),
        url=json.dumps(places.postgres),
        sqlite=json.dumps(str(places.sqlite)),
        tables=", ".join(f"public.{table}" for table in TABLES),
        clicks=clicks,
        bindings="\n".join(bindings),
    )


def _sample_commands(places: Places) -> Sequence[str]:
    """Return commands that the user can try while the demo runs."""
    by_status = "SELECT status, count(*) FROM orders GROUP BY status"
    by_customer = (
        "SELECT name, address, count(*) FROM clicks JOIN customers ON id = customer"
        " GROUP BY id ORDER BY 3 DESC LIMIT 5"
    )
    return (
        f"penstock status {places.lake}",
        f"penstock tail {places.lake} {places.collection('orders')} --no-snapshot",
        f"sqlite3 {places.sqlite} '{by_customer if places.brokers else by_status}'",
    )


def _lag_text(status: MaterializationStatus) -> str:
    """Return the lag of SQLite as a clause. A restarted materialization does not know it yet."""
    lag_ms = status.lag_ms
    if lag_ms is None:
        return "the lag of SQLite is unknown"
    return f"SQLite is {lag_ms / 1_000:.1f} s behind the collections"


def _describe_snapshot(status: Mapping[str, TaskStatus], seeded: int) -> str:
    """Return a progress line on the initial snapshot, before the first row is in SQLite."""
    for name, task in status.items():
        if task.error is not None:
            return f"{name} failed and restarts: {task.error.message}"
    tables = status[SOURCE].source.tables if SOURCE in status else ()
    if not tables:
        return f"waiting for the source to inspect Postgres{_COMPILES} …"
    loaded = sum(table.rows for table in tables)
    if any(table.phase != "live" for table in tables):
        return f"initial snapshot: {min(loaded, seeded):,} of {seeded:,} rows"
    if TOPIC in status and status[TOPIC].phase != "following":
        return f"the initial snapshot is in collections; Spark reads the first clicks{_COMPILES} …"
    target = status.get(TARGET)
    waits = f"Spark and its first transaction{_COMPILES}"
    if target is not None and target.phase != "storing":
        waits = target.waits_for or waits
    return f"the initial snapshot is in collections; SQLite waits for {waits} …"
