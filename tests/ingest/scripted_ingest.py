"""Steps of the scripts in tests/scripts/ingest: a database that changes while it is ingested.

    setup [since=15]    execute statements before the pipeline starts; skip the script on a
                        server older than that version
    start               start the pipeline; the input is more config of the source, as YAML
    do [script=yes]     execute statements between two ticks, one per line, or as one script.
                        Then wait until all changes are durable; every readable collection
                        must equal its table
    resync [t …]        send the request of `penstock resync`, and print the response
    restart             stop the pipeline, and start it again
    hold, release       block the reads of initial snapshots; unblock them

Each step prints the reaction of the pipeline: which tables it compared, and how many rows
it corrected; which collections are errored, and the error. A collection that is not printed
is unchanged and equal to its table.
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


class ScriptedIngest:
    """One database and its pipeline, driven step by step."""

    def __init__(self, database: Database, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._gate = threading.Lock()
        self._ticks = 0
        self._gate_ticks(patch)
        patch.setattr("penstock.supervisor.request_queue.POLL_MS", 20)
        self._snapshots_allowed = threading.Event()
        self._snapshots_allowed.set()
        self._stopping = False
        self._gate_snapshots(patch)
        self._database = database
        self._version = major(database)
        self._folder = folder
        self.pump: Pump | None = None
        self._client: persist.Client | None = None
        self._log = _LogRecorder()
        self.states: dict[str, str] = {}

    def close(self) -> None:
        """Stop the pipeline, and ignore its error."""
        self._snapshots_allowed.set()
        logger = logging.getLogger("penstock")
        logger.removeHandler(self._log)
        logger.setLevel(logging.NOTSET)
        if self._client is not None:
            self._client.close()
        if self.pump is not None:
            self.pump.__exit__(Exception)

    def execute(self, directive: Directive) -> str:
        """Execute one step and return its output."""
        match directive.name:
            case "setup":
                required = int(directive.args.get("since", 0))
                if self._version < required:
                    pytest.skip(f"requires Postgres {required}, but the server is {self._version}")
                self._database.sql("\n".join(directive.input))
                return ""
            case "start":
                options: dict[str, Any] = yaml.safe_load("\n".join(directive.input)) or {}
                return self.start(**options)
            case "do":
                texts: Sequence[str] = directive.input
                if "script" in directive.args:
                    texts = ["\n".join(texts)]
                with self.between_ticks():
                    for text in texts:
                        self._database.sql(text)
                return self.report()
            case "resync":
                return self._resync([word for line in directive.input for word in line.split()])
            case "restart":
                was_held = not self._snapshots_allowed.is_set()
                self._stopping = True
                self._snapshots_allowed.set()
                self._started_pump().stop()
                self._stopping = False
                if was_held:
                    self._snapshots_allowed.clear()
                self._started_pump().start()
                return self.report()
            case "hold":
                self.hold()
                return ""
            case "release":
                return self.release()
            case name:
                raise AssertionError(f'directive "{name}" does not exist')

    def start(self, **options: Any) -> str:
        """Start the pipeline with this config of its source, and return its report."""
        self.pump = Pump(self._database, self._folder, **options)
        logger = logging.getLogger("penstock")
        logger.addHandler(self._log)
        logger.setLevel(logging.INFO)
        self.pump.start()
        return self.report()

    def hold(self) -> None:
        """Block the reads of initial snapshots."""
        self._snapshots_allowed.clear()

    def release(self) -> str:
        """Unblock the reads of initial snapshots, and return the report."""
        self._snapshots_allowed.set()
        return self.report()

    def between_ticks(self) -> AbstractContextManager[Any]:
        """Return a context in which no tick runs."""
        return self._gate

    def _started_pump(self) -> Pump:
        assert self.pump is not None, "the pipeline is not started"
        return self.pump

    def _resync(self, tables: list[str]) -> str:
        blob = open_store(self._started_pump().storage, persist.Settings())
        try:
            response = send_request(
                blob, "resync", tables, clock=SYSTEM_CLOCK, rng=random.Random(),
                patience_ms=10_000,
            )  # fmt: skip
        except UsageError:
            raise (
                self._started_pump().error or AssertionError("the pipeline does not respond")
            ) from None
        finally:
            blob.close()
        if not response["done"]:
            return self._render("refused", response["error"], response["detail"], response["hint"])
        return self.report()

    def report(self) -> str:
        """Return the reaction of the pipeline, once all upstream changes are durable."""
        time, is_loading = self._await_ticks(), True
        while is_loading:
            # SUBTLE: in this order. The ticks below end after each snapshot that this read sees.
            is_loading = self._snapshots_allowed.is_set() and self._is_loading()
            time = self._await_ticks()
        lines = self._log.take()
        for name in self._reader().collections():
            if name.startswith(f"{SOURCE}."):
                state, report = self._inspect(self._reader().collection(name), time)
                if self.states.get(name) != state:
                    lines += report
                self.states[name] = state
        return "\n".join(lines) or "equal"

    def _await_ticks(self) -> int:
        """Return a time at or after each change acknowledged by now, once it is durable."""
        pump, ticks = self._started_pump(), self._ticks
        deadline = SYSTEM_CLOCK.boot_ms() + 60_000
        # The next tick may have read the clock already.
        while self._ticks < ticks + 2:
            if pump.error is not None:
                raise pump.error
            if SYSTEM_CLOCK.boot_ms() > deadline:
                raise TimeoutError("no tick within 60 s")
            SYSTEM_CLOCK.wait(threading.Event(), 5)
        return self._reader().collection(f"{SOURCE}_remap").upper - 1

    def _reader(self) -> persist.Client:
        if self._client is None:
            # A tick may merge files that a read still needs.
            self._client = self._started_pump().reader(hold=True)
        return self._client

    def _inspect(self, collection: persist.Collection, time: int) -> tuple[str, list[str]]:
        table = collection.name.removeprefix(f"{SOURCE}.")
        if not collection.upper:
            return NOT_SEEN, [f"{table} is not seen yet"]
        errors = collection.state.errors
        if errors and errors[-1].upper == END:
            self._check_error(collection, errors[-1].lower, time)
            error = errors[-1].error
            text = self._render(f"{table} is in error", error.message, error.detail, error.hint)
            return text, [text]
        differs = difference(collection, time, self._database, table, self._row_filter(table))
        if differs:
            return differs, [f"{table} differs: {differs}"]
        if errors:
            # Times within the error stay unreadable.
            with pytest.raises(CollectionErrored):
                collection.snapshot(errors[-1].upper - 1)
        columns = ", ".join(collection.snapshot(time).arrow().column_names[:-2])
        return f"equal ({columns})", [f"{table} is equal ({columns})"]

    def _row_filter(self, table: str) -> str:
        """Return the row filter of the table in the publication, as SQL."""
        if self._version < 15:
            return "true"
        filters = self._database.sql(
            "SELECT rowfilter FROM pg_publication_tables"
            " WHERE pubname = 'penstock' AND schemaname || '.' || tablename = %s",
            [table],
        )
        return filters[0][0] if filters and filters[0][0] else "true"

    def _check_error(self, collection: persist.Collection, lower: int, time: int) -> None:
        """Check that snapshots below `lower` succeed, and later ones fail."""
        assert collection.upper > time, "the upper of an errored collection does not advance"
        if lower > collection.since:
            collection.snapshot(lower - 1)
        for as_of in (lower, time):
            with pytest.raises(CollectionErrored):
                collection.snapshot(as_of)

    def _is_loading(self) -> bool:
        state = self._reader().collection(f"{SOURCE}/state")
        entries = (update.data for update in state.snapshot(state.upper - 1))
        return any(
            name.startswith("table/") and entry["phase"] in ("loading", "loaded")
            for name, entry in entries
        )

    def _gate_ticks(self, patch: pytest.MonkeyPatch) -> None:
        """Make each tick hold the gate, and count the ticks."""
        tick = IngestLoop._tick

        def gated(ingest: IngestLoop, *arguments: Any) -> None:
            with self._gate:
                tick(ingest, *arguments)
                self._ticks += 1

        patch.setattr(IngestLoop, "_tick", gated)

    def _gate_snapshots(self, patch: pytest.MonkeyPatch) -> None:
        """Make each read of a snapshot wait until snapshots are allowed."""
        read = SnapshotSplit.read

        def held(split: SnapshotSplit, stop: Any = None) -> Iterator[pa.RecordBatch]:
            self._snapshots_allowed.wait()
            if self._stopping:
                raise TransientError("the pipeline stops")
            yield from read(split, stop)

        patch.setattr(SnapshotSplit, "read", held)

    def _render(self, subject: str, message: str, detail: str, hint: str) -> str:
        details = [f"  {line}" for line in (detail, hint) if line]
        return "\n".join([f"{subject}: {message}", *details]).replace(
            self._started_pump().location, "LOCATION"
        )


class _LogRecorder(logging.Handler):
    """Recorder of the log events about tables."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._lines: list[str] = []
        self._reasons: dict[str, str] = {}

    def emit(self, record: logging.LogRecord) -> None:
        fields: dict[str, Any] = getattr(record, "fields", {})
        table: str = fields.get("table", "")
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
        """Return the lines since the last call, sorted."""
        lines, self._lines = sorted(self._lines), []
        return lines
