"""Stories of a database that changes under a pipeline, told in tests/scripts/ingest.

    setup [since=15]    statements, before anything follows the database; a server of an
                        older version cannot be told this story
    start               begin to follow it; the input is more settings, as YAML
    do [script=yes]     statements, one a line, or as one script; all of them between two
                        ticks. Then everything must be durable, and every collection that can
                        be read must be equal to its table
    resync [t …]        ask for it, as `penstock resync` does, and tell the answer
    restart             end the pipeline, and start it again
    hold, release       let no first copy be read; let them go on

Each prints what the pipeline did about it: which tables it compared, and how many
rows had to be mended; which collections are in error, and why. What is not
mentioned is as it was, and equal.
"""

import logging
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml

from penstock import persist
from penstock.clock import SYSTEM_CLOCK
from penstock.errors import TransientError, UsageError
from penstock.ingest.loop import IngestLoop
from penstock.persist import CollectionErrored
from penstock.persist.requests import send_request
from penstock.persist.state import END
from penstock.persist.store import open_store
from penstock.servers.postgres import Database
from penstock.sources.postgres.snapshot import SnapshotSplit
from tests.datadriven import Directive
from tests.fix_postgres import major
from tests.ingest.equality import difference
from tests.ingest.pump import SOURCE, Pump

NOT_SEEN = "not seen"


class Story:
    """One database, and the pipeline that follows it."""

    def __init__(self, database: Database, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._gate = threading.Lock()
        self._ticks = 0
        self._gated(patch)
        patch.setattr("penstock.supervisor.request_queue.POLL_MS", 20)
        self._free = threading.Event()
        self._free.set()
        self._ending = False
        self._holding(patch)
        self._database = database
        self._version = major(database)
        self._folder = folder
        self.pump: Pump | None = None
        self._client: persist.Client | None = None
        self._heard = _Heard()
        self.states: dict[str, str] = {}

    def close(self) -> None:
        """End it, whatever became of it."""
        self._free.set()
        logger = logging.getLogger("penstock")
        logger.removeHandler(self._heard)
        logger.setLevel(logging.NOTSET)
        if self._client is not None:
            self._client.close()
        if self.pump is not None:
            self.pump.__exit__(Exception)

    def obey(self, directive: Directive) -> str:
        """Carry out one step."""
        match directive.name:
            case "setup":
                needed = int(directive.args.get("since", 0))
                if self._version < needed:
                    pytest.skip(f"Postgres {self._version} lacks what {needed} has")
                self._database.sql("\n".join(directive.input))
                return ""
            case "start":
                options: dict[str, Any] = yaml.safe_load("\n".join(directive.input)) or {}
                return self.follow(**options)
            case "do":
                texts: Sequence[str] = directive.input
                if "script" in directive.args:
                    texts = ["\n".join(texts)]
                with self.between_ticks():
                    for text in texts:
                        self._database.sql(text)
                return self.told()
            case "resync":
                return self._resynced([word for line in directive.input for word in line.split()])
            case "restart":
                held = not self._free.is_set()
                self._ending = True
                self._free.set()
                self._running().stop()
                self._ending = False
                if held:
                    self._free.clear()
                self._running().start()
                return self.told()
            case "hold":
                self.hold()
                return ""
            case "release":
                return self.release()
            case unknown:
                raise AssertionError(f"no directive is called {unknown}")

    def follow(self, **options: Any) -> str:
        """Begin to follow the database."""
        self.pump = Pump(self._database, self._folder, **options)
        logger = logging.getLogger("penstock")
        logger.addHandler(self._heard)
        logger.setLevel(logging.INFO)
        self.pump.start()
        return self.told()

    def hold(self) -> None:
        """Let no first copy be read."""
        self._free.clear()

    def release(self) -> str:
        """Let first copies go on."""
        self._free.set()
        return self.told()

    def between_ticks(self) -> AbstractContextManager[Any]:
        """What is done here is done between two ticks."""
        return self._gate

    def _running(self) -> Pump:
        assert self.pump is not None, "nothing has been started"
        return self.pump

    def _resynced(self, tables: list[str]) -> str:
        blob = open_store(self._running().storage, persist.Settings())
        try:
            said = send_request(
                blob, "resync", tables, clock=SYSTEM_CLOCK, rng=random.Random(),
                patience_ms=10_000,
            )  # fmt: skip
        except UsageError:
            raise (self._running().error or AssertionError("nobody answers")) from None
        finally:
            blob.close()
        if not said["done"]:
            return self._shown("refused", said["error"], said["detail"], said["hint"])
        return self.told()

    def told(self) -> str:
        """What the pipeline did, once all that is upstream is durable."""
        time, copying = self._settled(), True
        while copying:
            # In this order: a copy that has just been seen began before what is settled then.
            copying = self._free.is_set() and self._copying()
            time = self._settled()
        lines = self._heard.take()
        for name in self._reader().collections():
            if name.startswith(f"{SOURCE}."):
                state, told = self._looked_at(self._reader().collection(name), time)
                if self.states.get(name) != state:
                    lines += told
                self.states[name] = state
        return "\n".join(lines) or "equal"

    def _settled(self) -> int:
        """Wait until what was acknowledged by now is durable; the time that holds it."""
        pump, ticks = self._running(), self._ticks
        deadline = SYSTEM_CLOCK.boot_ms() + 60_000
        # The next one may have looked at the clock already.
        while self._ticks < ticks + 2:
            if pump.error is not None:
                raise pump.error
            if SYSTEM_CLOCK.boot_ms() > deadline:
                raise TimeoutError("it does not come further")
            SYSTEM_CLOCK.wait(threading.Event(), 5)
        return self._reader().collection(f"{SOURCE}_remap").upper - 1

    def _reader(self) -> persist.Client:
        if self._client is None:
            # Every tick may merge files that a read still needs.
            self._client = self._running().reader(hold=True)
        return self._client

    def _looked_at(self, collection: persist.Collection, time: int) -> tuple[str, list[str]]:
        table = collection.name.removeprefix(f"{SOURCE}.")
        if not collection.upper:
            return NOT_SEEN, [f"{table} is not seen yet"]
        errors = collection.state.errors
        if errors and errors[-1].upper == END:
            self._check_error(collection, errors[-1].lower, time)
            error = errors[-1].error
            told = self._shown(f"{table} is in error", error.message, error.detail, error.hint)
            return told, [told]
        differs = difference(collection, time, self._database, table, self._sent(table))
        if differs:
            return differs, [f"{table} differs: {differs}"]
        if errors:
            # What could not be read stays so.
            with pytest.raises(CollectionErrored):
                collection.snapshot(errors[-1].upper - 1)
        columns = ", ".join(collection.snapshot(time).arrow().column_names[:-2])
        return f"equal ({columns})", [f"{table} is equal ({columns})"]

    def _sent(self, table: str) -> str:
        """Which rows the publication sends."""
        if self._version < 15:
            return "true"
        found = self._database.sql(
            "SELECT rowfilter FROM pg_publication_tables"
            " WHERE pubname = 'penstock' AND schemaname || '.' || tablename = %s",
            [table],
        )
        return found[0][0] if found and found[0][0] else "true"

    def _check_error(self, collection: persist.Collection, lower: int, time: int) -> None:
        """It fails from a definite time on, and below that it reads."""
        assert collection.upper > time, "the upper of a collection in error moves on"
        if lower > collection.since:
            collection.snapshot(lower - 1)
        for as_of in (lower, time):
            with pytest.raises(CollectionErrored):
                collection.snapshot(as_of)

    def _copying(self) -> bool:
        state = self._reader().collection(f"{SOURCE}/state")
        notes = (update.data for update in state.snapshot(state.upper - 1))
        return any(
            name.startswith("table/") and note["phase"] in ("loading", "loaded")
            for name, note in notes
        )

    def _gated(self, patch: pytest.MonkeyPatch) -> None:
        """Let ticks come only when nobody is in the gate, and count them."""
        tick = IngestLoop._tick

        def gated(ingest: IngestLoop, *arguments: Any) -> None:
            with self._gate:
                tick(ingest, *arguments)
                self._ticks += 1

        patch.setattr(IngestLoop, "_tick", gated)

    def _holding(self, patch: pytest.MonkeyPatch) -> None:
        """Let copies be read only while they are free to be."""
        read = SnapshotSplit.read

        def held(split: SnapshotSplit, stop: Any = None) -> Iterator[pa.RecordBatch]:
            self._free.wait()
            if self._ending:
                raise TransientError("the pipeline ends")
            yield from read(split, stop)

        patch.setattr(SnapshotSplit, "read", held)

    def _shown(self, what: str, message: str, detail: str, hint: str) -> str:
        told = "\n".join([f"{what}: {message}", *(f"  {each}" for each in (detail, hint) if each)])
        return told.replace(self._running().location, "LOCATION")


class _Heard(logging.Handler):
    """What the source says it does."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._lines: list[str] = []
        self._reasons: dict[str, str] = {}

    def emit(self, record: logging.LogRecord) -> None:
        fields = getattr(record, "fields", {})
        table = fields.get("table")
        match record.msg:
            case "table is compared":
                self._reasons[table] = fields["reason"]
            case "table was compared":
                reason = self._reasons.pop(table)
                self._lines.append(
                    f"{table} was compared, {reason}: {fields['differing']} differed"
                )
            case "table changed during snapshot; restarting":
                self._lines.append(f"{table} was copied again")
            case message if message.startswith("table ") and table:
                self._lines.append(f"{table}: {message}")
            case _:
                pass

    def take(self) -> list[str]:
        """All since the last time."""
        lines, self._lines = sorted(self._lines), []
        return lines
