"""The ingest loop: source → reclock → persist.

    tick ─► probe ─► read_into ─► one entry: rows, remap, state, uppers ─► committed

The loop reads the clock before it probes the source, and binds the probed frontier. A
tick therefore contains everything that upstream acknowledged before its time.

A transient error (a dropped connection, a server that restarts) ends the run, and the next run
resumes from the durable position. The source records errors about the data itself.
"""

import threading
from collections.abc import Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final

from penstock import persist
from penstock.clock import Clock
from penstock.errors import (
    DefiniteError,
    Fenced,
    InternalError,
    PenstockError,
    TransientError,
    UsageError,
)
from penstock.ingest.progress_views import PROGRESS_KEY
from penstock.ingest.snapshot_loader import SPARK_BYTES, IngestJobs, SnapshotLoader
from penstock.ingest.tick_transaction import TickTransaction
from penstock.persist import AppendTo
from penstock.persist.requests import Request
from penstock.persist.state import END
from penstock.persist.state_store import StateStore
from penstock.progress import Frontier
from penstock.reclock import (
    Minted,
    Regressed,
    SteppedBack,
    Ticker,
    Unmoved,
    WaitForAgreement,
    accumulate,
    mint,
    progress_name,
)
from penstock.sources.registry import remap_form
from penstock.sources.source import (
    ComparisonFailed,
    OwnershipObserver,
    Resyncable,
    SnapshotProgress,
    Source,
    Stoppable,
    WaitReporter,
)
from penstock.supervisor.status import ErrorStatus, SourceStatus
from penstock.supervisor.task import LoopRequests
from penstock.telemetry import fields, logger

__all__ = ["IngestLoop"]

log = logger("ingest")

VERIFY_MS: Final = 2_000
"""Interval of lock verification and status writes during a long start or tick."""

IDLE_VERIFY_MS: Final = 15_000
"""Interval of lock verification between two ticks."""

COMPACT_EVERY_MS: Final = 10_000
STATUS_EVERY_MS: Final = 1_000

STATUS: Final = "status"
LAG: Final = frozenset({"lag_bytes", "lag_ms", "lag_records"})
"""Status fields that the last probe measured."""

OPENING: Final = "opening"
NOT_YET: Final = "the connection is being opened"
RETRYING: Final = "retrying"
STOPPED: Final = "stopped"
"""Phases that the loop sets, because the source is not open."""


class IngestLoop:
    """Replicates one source to its storage location."""

    def __init__(
        self,
        name: str,
        source: Source,
        client: persist.Client,
        *,
        tick_ms: int,
        retain_ms: int,
        clock: Clock,
        jobs: IngestJobs | None = None,
        spark_bytes: int = SPARK_BYTES,
        progress: str | None = None,
        taken: Container[str] = (),
    ) -> None:
        self.name = name
        self._source = source
        self._client = client
        self._clock = clock
        self._retain_ms = retain_ms
        self._form = remap_form(source.kind)
        self._remap = client.create_or_load(f"{name}_remap", schema=self._form.remap, owner=name)
        self._memory = StateStore(client, name)
        self._name_progress(progress, taken)
        self._jobs = jobs
        if jobs is not None:
            client.delegate_big_merges(jobs.merges(client.url))
        self._spark_bytes = spark_bytes
        self._loader: SnapshotLoader | None = None
        """Kept between a run that failed and the run that resumes it."""

        self._pool: ThreadPoolExecutor
        self._bound = self._durable_bound()
        self._upper = self._durable_upper()
        self._goal: Frontier[Any] | None = None
        self._catching_up = False
        self._ticker = Ticker(clock, interval_ms=tick_ms, upstream_now=self._upstream_now_ms)
        self._requests: LoopRequests | None = None
        self._postponed = False
        """Set if a request is postponed to the next tick."""

        self._since_ms = 0
        self._status_ms = 0
        self._counted_since_ms = clock.now_ms()
        self._rows = 0
        self._bytes = 0
        self._commits = 0
        self._step = "open"
        self._verified_ms = 0
        self._verify_every_ms: int | None = None
        """Set while the source is open or being opened."""

        self._opening = False
        self._opened = False
        """Set once this process has connected to upstream."""

        self._fenced: Fenced | None = None
        self._over = threading.Event()
        # The status of the previous run does not apply: upstream has not answered yet.
        self._put_status(phase=OPENING, waits_for="", error=None, **self._disconnected(NOT_YET))

    @property
    def commits(self) -> int:
        """Return the number of committed ticks."""
        return self._commits

    @property
    def is_resumable(self) -> bool:
        """Return whether upstream has answered: otherwise it may not exist."""
        return self._opened

    @property
    def step(self) -> str:
        """Return the step at which the last run failed: `open` or `tick`."""
        return self._step

    def use_requests(self, requests: LoopRequests, /) -> None:
        """Handle the resync requests of this queue."""
        self._requests = requests

    def run(self, stop: threading.Event, *, once: bool = False) -> None:
        """Run until `stop` is set, or with `once` until the data present at the start is durable.

        Raises:
            TransientError: the attempt failed; the next run resumes from the durable position.
            DefiniteError: the source cannot continue until a person acts.
            UsageError: the configuration is invalid.
            Fenced: another process has taken over the storage location.
        """
        if self._loader is None:
            self._loader = SnapshotLoader(
                self._client,
                self.name,
                jobs=self._jobs,
                spark_bytes=self._spark_bytes,
                stop=stop,
            )
        resumes = False
        self._over.clear()
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="spool")
        verifier = threading.Thread(
            target=self._keep_verifying, args=(stop,), name=f"lock of {self.name}", daemon=True
        )
        verifier.start()
        if isinstance(self._source, Stoppable):
            self._source.use_stop(stop)
        try:
            if not stop.is_set():
                self._open(self._loader)
                # The backlog does not wait for the next full tick interval.
                self._catching_up = self._bound is not None
                if once and self._goal is None:
                    self._goal = self._source.probe().end
                self._follow(stop, self._loader)
                self._memory.put({STATUS: self._status(self._upper).to_json()})
        except TransientError as error:
            if self._fenced is not None:
                raise self._fenced from error
            reason, resumes = _reason(error), not stop.is_set()
            if stop.is_set():
                self._put_status(waits_for="", **self._disconnected(reason))
            elif self._opened or not once:
                self._put_status(phase=RETRYING, waits_for=reason, **self._disconnected(reason))
            raise
        except (DefiniteError, UsageError) as error:
            self._put_final_error(error)
            raise
        finally:
            self._over.set()
            verifier.join()
            self._source.close()
            self._pool.shutdown()
            if not resumes:
                # SUBTLE: closing waits for reads that hang. A run that resumes does not wait.
                self._loader.close()
                self._loader = None
        if self._fenced is not None:
            raise self._fenced

    def _disconnected(self, reason: str) -> dict[str, Any]:
        """Return the status fields with the time and reason of the disconnection."""
        status = self.status()
        since = None if status.connected else status.disconnected_since_ms
        return {
            **self._unknown_lag(),
            "connected": False,
            "disconnected_since_ms": since or self._clock.now_ms(),
            "disconnected_reason": reason,
        }

    def _unknown_lag(self) -> dict[str, None]:
        """Return the lag fields of a source that does not answer, all None."""
        return dict.fromkeys(self.status().keys & LAG)

    def _put_final_error(self, error: PenstockError) -> None:
        """Store the error in the status, unless the store fails too."""
        with suppress(PenstockError):
            self._put_status(phase=STOPPED, waits_for="", error=ErrorStatus.of(error))

    def _keep_verifying(self, stop: threading.Event) -> None:
        """Verify the lock and store the status while no tick commits.

        The source sends feedback upstream only while the lock is verified. A start that waits
        for a slot, or a tick that compares tables, can take hours.
        """
        while not self._over.wait(VERIFY_MS / 1_000):
            try:
                self._verify_lock()
            except Fenced as error:
                # The operation in progress may take hours, and its result could not be committed.
                self._fenced = error
                stop.set()
                return
            except PenstockError:
                continue  # The thread that runs the tick gets the same error and handles it.
            except Exception:
                log.exception("lock verification failed", extra=fields(source=self.name))

    def _verify_lock(self) -> None:
        # A status update extends the stored status, and a tick may be updating it too.
        with self._memory.lock:
            every, now = self._verify_every_ms, self._clock.boot_ms()
            if every is None or now - self._verified_ms < every:
                return
            phase = {"phase": OPENING} if self._opening else {}
            source = self._source
            waits_for = source.waits_for() if isinstance(source, WaitReporter) else ""
            # The last probe is as old as the wait.
            lag = self._unknown_lag() if self._opening or waits_for else {}
            self._put_status(**phase, waits_for=waits_for, **lag)
            self._verified_ms = now
        if isinstance(self._source, OwnershipObserver):
            self._source.ownership_verified()

    def _open(self, loader: SnapshotLoader) -> None:
        """Open the source. This may take hours."""
        self._step = "open"
        self._verified_ms = self._clock.boot_ms()
        self._opening, self._verify_every_ms = True, VERIFY_MS
        try:
            self._source.open(self._memory, loader, self._bound)
        finally:
            with self._memory.lock:
                self._opening, self._verify_every_ms = False, None
        self._opened, self._step = True, "tick"
        if self.status().phase in (OPENING, RETRYING, STOPPED):
            self._memory.put({STATUS: self._status(self._upper).to_json()})

    def _follow(self, stop: threading.Event, loader: SnapshotLoader) -> None:
        self._verified_ms = self._clock.boot_ms()
        self._verify_every_ms = IDLE_VERIFY_MS
        try:
            self._tick_by_tick(stop, loader)
        finally:
            with self._memory.lock:
                self._verify_every_ms = None

    def _tick_by_tick(self, stop: threading.Event, loader: SnapshotLoader) -> None:
        while not self._has_reached_goal():
            match self._ticker.next(stop, upper=self._upper, at_once=self._catching_up):
                case None:
                    return
                case WaitForAgreement(time=time, ahead_ms=ahead):
                    log.warning(
                        "clock far ahead of upstream; waiting",
                        extra=fields(source=self.name, clock_ms=time, ahead_ms=ahead),
                    )
                    continue
                case SteppedBack(time=time, by_ms=by):
                    log.warning(
                        "clock stepped back; times advance by one",
                        extra=fields(source=self.name, by_ms=by, time=time),
                    )
                case tick:
                    time = tick.time
            self._verify_every_ms = VERIFY_MS
            self._tick(time, loader)
            self._verify_every_ms = IDLE_VERIFY_MS

    def _has_reached_goal(self) -> bool:
        """Return whether a goal is set and durable."""
        goal, bound = self._goal, self._bound
        # At least one tick: the server may have been replaced by one with a lower position.
        return (
            goal is not None
            and bound is not None
            and self._commits > 0
            and not self._postponed
            and self._is_loaded()
            and goal <= bound
        )

    def _is_loaded(self) -> bool:
        return not isinstance(self._source, SnapshotProgress) or self._source.is_loaded()

    def _tick(self, time: int, loader: SnapshotLoader) -> None:
        resyncs = self._take_requests()
        errored_before = self._errored_tables() if resyncs else set()
        probe = self._source.probe()
        self._catching_up = probe.more
        tick = TickTransaction(self._client, self.name, self._memory, time, loader, self._pool)
        try:
            reached = self._source.read_into(tick, probe.frontier)
            remap, bound = (None, None) if reached is None else self._bind(reached, time)
            self._rows += tick.rows
            self._bytes += tick.bytes
            self._put_tick_status(tick, time)
            tick.commit(self._source.collections(), remap)
        finally:
            tick.close()
        self._upper = time + 1
        self._commits += 1
        self._verified_ms = self._clock.boot_ms()
        if bound is not None:
            self._bound = bound
        self._source.committed(reached)
        if resyncs:
            self._respond(resyncs, tick, errored_before)
        self._compact(time)

    def _take_requests(self) -> list[Request]:
        """Return the resync requests for this tick; reject impossible ones immediately."""
        self._postponed = False
        if self._requests is None:
            return []
        taken = []
        for request in self._requests.loop_requests():
            try:
                self._resync(request.tables)
            except (UsageError, DefiniteError) as error:
                self._requests.respond(request, error)
            else:
                taken.append(request)
        return taken

    def _respond(
        self, resyncs: Sequence[Request], tick: TickTransaction, errored_before: set[str]
    ) -> None:
        """Respond to the requests that the committed tick has executed."""
        assert self._requests is not None, "requests were taken from it"
        for request in resyncs:
            left = self._unrepaired(request)
            if (self._errored_tables(tick) - errored_before).intersection(left):
                # SUBTLE: the table was live when the request arrived, and this tick detected the
                # change that the request is to repair. The next tick handles the request.
                self._postponed = True
            else:
                self._requests.respond(request, left=left, corrected_rows=tick.corrected_rows)

    def _resync(self, tables: Sequence[str]) -> None:
        if not isinstance(self._source, Resyncable):
            raise UsageError(
                f'source "{self.name}" cannot be compared with upstream',
                detail="Upstream cannot show which of its records were read.",
                hint=f"To read it again, drop it and start it again: penstock drop {self.name}",
            )
        self._source.resync(tables)

    def _errored_tables(self, tick: TickTransaction | None = None) -> set[str]:
        """Return the errored tables, except tables whose comparison failed in `tick`."""
        failures = {} if tick is None else tick.failures
        return {
            table.name
            for table in self._source_status().tables
            if table.error and not isinstance(failures.get(table.collection), ComparisonFailed)
        }

    def _unrepaired(self, request: Request) -> dict[str, str]:
        """Return the requested tables that are still errored or loading, each with the reason."""
        left = {}
        for table in self._source_status().tables:
            name = table.name
            if request.tables and name not in request.tables:
                continue
            if table.error:
                left[name] = table.error
            elif table.phase != "live":
                left[name] = f"table {name} was not compared: its initial snapshot is in progress"
        return left

    def _bind(self, reached: Frontier[Any], time: int) -> tuple[AppendTo, Frontier[Any]]:
        """Return the updates of the remap, and the frontier that they bind."""
        current = self._bound or Frontier()
        match mint(self._form, current, reached, time=time):
            case Minted(updates=updates, frontier=frontier):
                return AppendTo(self._remap, updates, self._remap.upper, time + 1), frontier
            case Unmoved():
                return AppendTo(self._remap, [], self._remap.upper, time + 1), current
            case Regressed(partition=partition, was=was, now=now):
                raise InternalError(
                    f'frontier of source "{self.name}" moved back from {was} to {now} in partition '
                    f"{partition}",
                    hint="A source must not read less than the bound frontier; please report this.",
                )

    def _name_progress(self, given: str | None, taken: Container[str]) -> None:
        """Store the name of the progress relation at the first start, or if the file changes it."""
        known = self._memory.get(PROGRESS_KEY)
        if known is None or (given is not None and known["name"] != given):
            name = progress_name(self.name, taken, given=given)
            self._memory.put({PROGRESS_KEY: {"name": name, "kind": self._source.kind}})

    def _durable_bound(self) -> Frontier[Any] | None:
        upper = self._remap.upper
        if upper == 0:
            return None
        return accumulate(self._form, self._remap.snapshot(upper - 1).arrow())

    def _durable_upper(self) -> int:
        """Return the first time that is free. State has its own times, which do not count."""
        # A table may have failed or recovered at a tick before the first binding.
        error_bounds = [
            span.lower if span.upper == END else span.upper
            for collection in self._client.state.collections.values()
            for span in collection.errors
        ]
        return max([self._remap.upper, *error_bounds])

    def _upstream_now_ms(self) -> int | None:
        return self._source.probe().now_ms

    def _compact(self, time: int) -> None:
        """Advance since to `retain` behind the current time."""
        now = self._clock.boot_ms()
        if now - self._since_ms < COMPACT_EVERY_MS:
            return
        self._since_ms = now
        since = time - self._retain_ms
        for name in (*self._source.collections(), self._remap.name):
            for collection in self._client.state.generations(name):
                if since > collection.allowed:
                    as_of = collection.upper - 1 if collection.successor else None
                    self._client.collection(name, as_of=as_of).allow_compaction(since)
        self._memory.collection.allow_compaction(self._memory.upper - 1)

    def _put_tick_status(self, tick: TickTransaction, time: int) -> None:
        now = self._clock.boot_ms()
        if now - self._status_ms < STATUS_EVERY_MS:
            return
        self._status_ms = now
        tick.put_state(STATUS, self._status(time + 1).to_json())

    def status(self) -> SourceStatus:
        """Return phase, row counts, lag and the current wait, as of the last status write."""
        return SourceStatus.parse(self._memory.get(STATUS) or {})

    def _status(self, upper: int) -> SourceStatus:
        return self._source_status().updated(
            connected=True,
            catching_up=self._catching_up,
            rows=self._rows,
            bytes=self._bytes,
            counted_since_ms=self._counted_since_ms,
            as_of=upper - 1 if upper else None,
            written_ms=self._clock.now_ms(),
        )

    def _source_status(self) -> SourceStatus:
        return SourceStatus.parse(self._source.status())

    def _put_status(self, **changes: Any) -> None:
        """Store the last status with some fields changed."""
        with self._memory.lock:
            # SUBTLE: there is no status before the first connection, and readers take a status
            # without `kind` for the status of a materialization.
            status = self.status().updated(
                kind=self._source.kind, **changes, written_ms=self._clock.now_ms()
            )
            self._memory.put({STATUS: status.to_json()})


def _reason(error: TransientError) -> str:
    return f"{error}. {error.detail}".strip()
