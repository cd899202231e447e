"""Run of the demo, from the start of the servers to the comparison."""

import json
import os
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.demo.clicks import (
    COLUMNS,
    PARTITIONS,
    TOPIC,
    Clicking,
    broker_beside,
    ends,
    jars_to_fetch,
    open_topic,
)
from penstock.demo.comparison import Compared, Places, books_in_sqlite, compare, position, time_at
from penstock.demo.compiling import compiled_beside
from penstock.demo.postgres import LocalPostgres
from penstock.demo.shop import TABLES, Made, Traffic, open_shop, what_is_wrong
from penstock.demo.steady import Steady
from penstock.errors import UsageError
from penstock.pipeline.supervisor import Supervisor

__all__ = ["Up", "pipeline_text", "prepare", "run"]

SOURCE: Final = "shop"
TARGET: Final = "local"
LOOK_MS: Final = 250
SAY_MS: Final = 5_000
FIRST_ROW_MS: Final = 300_000
"""Time limit for the first row. It rarely takes more than a minute, but machines differ."""

DRAIN_MS: Final = 120_000
STOP_S: Final = 60

_COMPILES: Final = "; the very first run compiles its hot loops, about half a minute in all"

_FILE: Final = """\
# What `penstock demo` runs. A file of your own looks just like it.
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
        told: Callable[[Supervisor], None],
        say: Callable[[str], None],
    ) -> None:
        """Run it; `told` receives the supervisor, and `say` prints progress."""
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
            hint="Name another one, or none for a temporary one.",
        )
    if os.geteuid() == 0:
        folder.chmod(0o711)  # The server does not run as root, and needs search permission.


def run(
    folder: Path,
    *,
    up: Up,
    stop: threading.Event,
    say: Callable[[str], None],
    for_seconds: float | None = None,
    kafka: bool = False,
    rate: float = 50,
    chance: random.Random | None = None,
    began_ms: int | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> Compared:
    """Start the demo in an empty folder, follow until `stop` is set, and compare.

    With `kafka` the demo also has a topic of clicks. `for_seconds` counts from the first row in the
    target. The time to that row counts from `began_ms`, a `boot_ms` of the clock; the default is
    now. All processes have ended when this returns; the files in the folder stay.

    Raises:
        PenstockError: a part could not start, or did not reach its end.
    """
    folder = folder.resolve()
    told = _Told(say, clock, clock.boot_ms() if began_ms is None else began_ms)
    told.say(f"Postgres and Kafka start{jars_to_fetch()} …" if kafka else "Postgres starts …")
    with (
        compiled_beside(kafka=kafka),
        broker_beside(folder / "kafka") if kafka else nullcontext() as broker,
        # The data need not survive a power cut.
        LocalPostgres(folder / "postgres", settings={"fsync": "off"}) as server,
    ):
        server.sql("CREATE DATABASE shop")
        places = Places(
            server.url(database="shop"),
            f"file:{folder}/lake",
            folder / "shop.db",
            brokers=None if broker is None else broker.bootstrap,
        )
        rows = open_shop(places.postgres)
        told.say(f"a shop is open: {rows:,} rows in {len(TABLES)} tables")
        if broker is not None:
            open_topic(broker)
            told.say(f"a topic is there for clicks on it, with {PARTITIONS} partitions")
        file = folder / "pipeline.yaml"
        file.write_text(pipeline_text(places))
        told.say(f"the pipeline is {file}; to look at it, in another terminal:")
        for command in _to_try(places):
            say(f"          {command}")
        chance = chance or random.Random()
        traffic, clicking = Traffic(places.postgres, chance, rate, clock), None
        upstream: list[Steady] = [traffic]
        if places.brokers is not None:
            own = random.Random(chance.getrandbits(64))
            clicking = Clicking(places.brokers, own, rate / 5, clock)
            upstream.append(clicking)
        pipeline = _Carried(up, file, told)
        demo = _Demo(places, traffic, clicking, pipeline, told, stop, clock)
        try:
            for each in upstream:
                each.start()
            pipeline.start()
            first_row_s = demo.wait_for_first_row(rows)
            before = traffic.made
            demo.follow(for_seconds)
            for each in upstream:
                each.stop()
            as_of = demo.drain()
        finally:
            for each in upstream:
                each.end()
            pipeline.stop()
        pipeline.raise_error()
        topic = ", the topic" if clicking else ""
        told.say(f"Postgres{topic}, collections and SQLite are compared …")
        return compare(
            places,
            as_of,
            made=traffic.made - before,
            sent=None if clicking is None else clicking.sent,
            first_row_s=first_row_s,
            looks=demo.looks,
            torn=demo.torn,
        )


@dataclass(slots=True)
class _Told:
    """Progress lines with the time since the start."""

    out: Callable[[str], None]
    clock: Clock
    began_ms: int
    said_ms: int = 0

    @property
    def seconds(self) -> float:
        return round((self.clock.boot_ms() - self.began_ms) / 1_000, 1)

    def say(self, line: str) -> None:
        self.said_ms = self.clock.boot_ms()
        self.out(f"{self.seconds:6.1f} s  {line}")

    def say_at_times(self, line: Callable[[], str]) -> None:
        if self.clock.boot_ms() - self.said_ms >= SAY_MS:
            self.say(line())


@dataclass(slots=True)
class _Demo:
    """Waits and checks of the running demo, with progress lines."""

    places: Places
    traffic: Traffic
    clicking: Clicking | None
    pipeline: "_Carried"
    told: _Told
    asked: threading.Event
    clock: Clock
    looks: int = 0
    torn: str = ""

    def wait_for_first_row(self, seeded: int) -> float:
        """Return the seconds from the start until the first row is in SQLite."""
        what = "the first row in SQLite"
        self.told.say("the pipeline starts …")
        until = self.clock.boot_ms() + FIRST_ROW_MS
        while not self._look():
            if self.clock.wait(self.asked, LOOK_MS):
                raise UsageError(f"demo was stopped before {what}", hint="Let it run on.")
            self._check(until, what)
            self.told.say_at_times(lambda: _copying(self.pipeline.status(), seeded))
        seconds = self.told.seconds
        self.told.say(f"the first rows are in SQLite, {seconds} s after the start")
        return seconds

    def follow(self, for_seconds: float | None) -> None:
        """Follow until the user stops the demo, or for this long."""
        before, began_ms = self.traffic.made, self.clock.boot_ms()
        ends = "Ctrl-C ends it" if for_seconds is None else f"for {for_seconds:g} s"
        self.told.say(
            f"SQLite follows the shop, {self.traffic.rate:g} transactions a second; {ends}"
        )
        while for_seconds is None or self.clock.boot_ms() - began_ms < for_seconds * 1_000:
            if self.clock.wait(self.asked, LOOK_MS):
                return
            self._check()
            self._look()
            self.told.say_at_times(lambda: self._following(before))

    def drain(self) -> int:
        """Wait until SQLite has all upstream changes; return the time of that state."""
        what = "SQLite to have all of it"
        lsn = position(self.places.postgres)
        offsets = None if self.places.brokers is None else ends(self.places.brokers)
        self.told.say(f"the shop is closed; waiting for {what} …")
        until = self.clock.boot_ms() + DRAIN_MS
        never = threading.Event()
        as_of = None
        while as_of is None or self.pipeline.status().get(TARGET, {}).get("upper", 0) <= as_of:
            self._check(until, what)
            as_of = as_of or time_at(self.places, lsn, offsets)
            self.clock.wait(never, LOOK_MS)
            self.told.say_at_times(lambda: f"still waiting for {what} …")
        return as_of

    def _following(self, before: Made) -> str:
        made = self.traffic.made - before
        lag = _lag_text(self.pipeline.status().get(TARGET, {}))
        clicks = f"; {self.clicking.sent.clicks:,} clicks" if self.clicking else ""
        return (
            f"{made.transactions:,} transactions: {made.inserts:,} inserts,"
            f" {made.updates:,} updates, {made.deletes:,} deletes{clicks};"
            f" {lag}"
        )

    def _look(self) -> bool:
        """Return whether SQLite has rows; if so, check that their books balance."""
        books = books_in_sqlite(self.places.sqlite)
        if books is None:
            return False
        self.looks += 1
        self.torn = self.torn or what_is_wrong(books)
        return True

    def _check(self, until_ms: int | None = None, what: str = "") -> None:
        """Raise the error of a part that has ended, or of an exceeded time limit."""
        self.traffic.check()
        if self.clicking is not None:
            self.clicking.check()
        self.pipeline.check()
        if until_ms is not None and self.clock.boot_ms() > until_ms:
            waits = [
                f"{name} waits for {status['waits_for']}."
                for name, status in self.pipeline.status().items()
                if status.get("waits_for")
            ]
            raise UsageError(
                f"demo waited for {what}, in vain",
                detail=" ".join(waits),
                hint="Look at the log above; on a busy machine, try again later.",
            )


class _Carried:
    """Pipeline that runs in a thread, with its status and error."""

    def __init__(self, up: Up, file: Path, told: _Told) -> None:
        self._up = up
        self._file = file
        self._told = told
        self._stop = threading.Event()
        self._running: Supervisor | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="pipeline", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Request the end of the pipeline and wait for it."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(STOP_S)

    def status(self) -> Mapping[str, Mapping[str, Any]]:
        return {} if self._running is None else self._running.status()

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
            raise UsageError("pipeline of the demo ended by itself")
        for name, status in self.status().items():
            if status.get("state") == "stopped":
                error = status["error"]
                raise UsageError(
                    f'"{name}" has stopped: {error["message"]}',
                    detail=error["detail"],
                    hint=error["hint"],
                )

    def _run(self) -> None:
        try:
            self._up(self._file, stop=self._stop, told=self._tell, say=self._told.say)
        except BaseException as error:  # noqa: BLE001 - thread boundary: `check` raises it
            self._error = error

    def _tell(self, running: Supervisor) -> None:
        self._running = running


def pipeline_text(places: Places) -> str:
    """Return the pipeline file from a shop, and optionally a topic, to SQLite."""
    tables = {places.collection(table): table for table in TABLES}
    clicks = ""
    if places.brokers is not None:
        tables[TOPIC] = TOPIC
        columns = ", ".join(f"{name}: {word}" for name, word in COLUMNS.items())
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


def _to_try(places: Places) -> Sequence[str]:
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


def _lag_text(status: Mapping[str, Any]) -> str:
    """Return the lag of SQLite as a clause. A restarted materialization does not know it yet."""
    lag_ms = status.get("lag_ms")
    if lag_ms is None:
        return "the lag of SQLite is unknown"
    return f"SQLite is {lag_ms / 1_000:.1f} s behind the collections"


def _copying(status: Mapping[str, Mapping[str, Any]], seeded: int) -> str:
    """Return a progress line on the initial snapshot, before the first row is in SQLite."""
    for name, each in status.items():
        if error := each.get("error"):
            return f"{name} failed and is started again: {error['message']}"
    tables = status.get(SOURCE, {}).get("tables", ())
    if not tables:
        return f"waiting for the source's first look at Postgres{_COMPILES} …"
    copied = sum(table["rows"] for table in tables)
    if any(table["phase"] != "live" for table in tables):
        return f"first copy: {min(copied, seeded):,} of {seeded:,} rows"
    if TOPIC in status and status[TOPIC].get("phase") != "following":
        return f"the first copy is in collections; Spark reads the first clicks{_COMPILES} …"
    target = status.get(TARGET, {})
    waits = f"Spark and its first transaction{_COMPILES}"
    if target.get("phase") != "storing":
        waits = target.get("waits_for") or waits
    return f"the first copy is in collections; SQLite waits for {waits} …"
