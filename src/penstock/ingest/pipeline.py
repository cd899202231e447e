"""The loop from a source, over the reclock, into persist.

    tick ─► probe ─► draw ─► one entry: rows, remap, notes, uppers ─► committed

The clock is read before the source is probed, and what was probed is bound, so
whatever was acknowledged upstream before a tick is in it. What is about the
moment (a line that dropped, a server that restarts) closes the source, waits,
and goes on from what is durable. What is about the data is the source's to
record; what it cannot go on after ends the loop with the error.
"""

import random
import threading
from collections.abc import Container, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final

from penstock import persist
from penstock.clock import Clock
from penstock.durable import Blob
from penstock.errors import (
    DefiniteError,
    Fenced,
    InternalError,
    PenstockError,
    TransientError,
    UsageError,
)
from penstock.ingest.loading import SPARK_BYTES, Loader, ManyTasks
from penstock.ingest.relations import NOTE
from penstock.ingest.tick import Tick
from penstock.persist import AppendTo
from penstock.persist.requests import Request, answer, requests
from penstock.persist.state import END
from penstock.persist.state_store import Memory
from penstock.persist.store import open_store
from penstock.reclock import (
    Minted,
    Regressed,
    SteppedBack,
    Ticker,
    Unmoved,
    WaitForAgreement,
    accumulated,
    mint,
    progress_name,
    shape_of,
)
from penstock.retry import pauses_ms
from penstock.sources.source import ComparisonFailed, Frontier, Source
from penstock.telemetry import fields, logger

__all__ = ["Ingest"]

log = logger("ingest")

BEAT_MS: Final = 2_000
"""How often a start or a tick that is not over proves that we are the writer, and tells what it
does."""

REST_MS: Final = 15_000
"""How long nothing need be proved between two ticks."""

COMPACT_EVERY_MS: Final = 10_000
STATUS_EVERY_MS: Final = 1_000
HEAR_EVERY_MS: Final = 1_000

LAG: Final = ("lag_bytes", "lag_ms", "lag_records")
"""Fields of a source's status that hold what its last probe measured."""

OPENING: Final = "opening"
RETRYING: Final = "retrying"
STOPPED: Final = "stopped"
"""Phases in which nothing is asked of the source, so that it cannot tell its own."""


class Ingest:
    """One source, kept in step with one storage location."""

    def __init__(
        self,
        name: str,
        source: Source,
        client: persist.Client,
        *,
        tick_ms: int,
        retain_ms: int,
        clock: Clock,
        chance: random.Random,
        many: ManyTasks | None = None,
        spark_bytes: int = SPARK_BYTES,
        progress: str | None = None,
        taken: Container[str] = (),
    ) -> None:
        self.name = name
        self._source = source
        self._client = client
        self._clock = clock
        self._chance = chance
        self._retain_ms = retain_ms
        self._shape = shape_of(source.kind)
        self._remap = client.create_or_load(f"{name}_remap", schema=self._shape.remap, owner=name)
        self._memory = Memory(client, name)
        self._name_progress(progress, taken)
        self._many = many
        if many is not None:
            client.delegate_big_merges(many.merges(client.url))
        self._spark_bytes = spark_bytes
        self._loader: Loader
        self._pool: ThreadPoolExecutor
        self._beside: Blob
        self._bound = self._durable_bound()
        self._upper = self._durable_upper()
        self._goal: Frontier | None = None
        self._catching_up = False
        self._ticker = Ticker(clock, interval_ms=tick_ms, upstream_now=self._ask_upstream)
        self._heard_ms = 0
        self._postponed = False
        """Whether a request was left to the next tick."""

        self._compacted_ms = 0
        self._noted_ms = 0
        self._counted_since_ms = clock.now_ms()
        self._rows = 0
        self._bytes = 0
        self._ticked = False
        self._proved_ms = 0
        self._proves_every_ms: int | None = None
        """While the source is opened or followed."""

        self._opening = False
        self._opened = False
        """Whether upstream was ever reached by this process."""

        self._fenced: Fenced | None = None
        self._over = threading.Event()

    @property
    def bound(self) -> Frontier | None:
        """How far upstream what is durable here has come; None before the first copy is seen."""
        return self._bound

    @property
    def upper(self) -> int:
        """The upper of the source's collections."""
        return self._remap.upper

    def run(self, stop: threading.Event, *, once: bool = False) -> None:
        """Follow the source until `stop` is set, or until what was there at the start is durable.

        Raises:
            DefiniteError: the source cannot be followed until somebody acts.
            UsageError: nor can it be as the file says.
            Fenced: another process writes this location now.
        """
        pauses = pauses_ms(self._chance, first_ms=100)
        self._loader = Loader(
            self._client,
            self.name,
            many=self._many,
            spark_bytes=self._spark_bytes,
            stop=stop,
        )
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="spool")
        self._beside = open_store(self._client.url, persist.Settings(stop=stop))
        beat = threading.Thread(
            target=self._beat, args=(stop,), name=f"beat of {self.name}", daemon=True
        )
        beat.start()
        self._source.stopping(stop)
        try:
            if self.status().get("phase") in (RETRYING, STOPPED):
                # What the process before said is not so any more.
                self._note(phase=OPENING, waits_for="", error=None)
            while not stop.is_set():
                try:
                    self._open()
                    # Whatever came while nobody looked need not wait for a round time.
                    self._catching_up = self._bound is not None
                    if once and self._goal is None:
                        self._goal = self._source.probe().everything
                    self._follow(stop)
                    self._memory.write_down({"status": self._status(self._upper)})
                    break
                except TransientError as error:
                    if stop.is_set():
                        log.warning(
                            "stopped before the tick was complete",
                            extra=fields(source=self.name, error=str(error), detail=error.detail),
                        )
                        self._note(waits_for="", **self._disconnected(error))
                        break
                    if once and not self._opened:
                        raise  # Nobody waits for what was perhaps never there.
                    pause = next(pauses)
                    log.warning(
                        "source is lost; trying again",
                        extra=fields(
                            source=self.name, error=str(error), detail=error.detail, pause_ms=pause
                        ),
                    )
                    waits_for = f"{error}. {error.detail}".strip()
                    self._note(phase=RETRYING, waits_for=waits_for, **self._disconnected(error))
                    self._source.close()
                    self._clock.wait(stop, pause)
        except (DefiniteError, UsageError) as error:
            self._note_end(error)
            raise
        finally:
            self._over.set()
            beat.join()
            self._source.close()
            self._loader.close()
            self._pool.shutdown()
            self._beside.close()
        if self._fenced is not None:
            raise self._fenced

    def _disconnected(self, error: TransientError) -> dict[str, Any]:
        """Return the part of the status that says since when and why there is no connection."""
        status = self.status()
        since = None if status.get("connected") else status.get("disconnected_since_ms")
        return {
            **self._unknown_lag(),
            "connected": False,
            "disconnected_since_ms": since or self._clock.now_ms(),
            "disconnected_reason": f"{error}. {error.detail}".strip(),
        }

    def _unknown_lag(self) -> dict[str, None]:
        """Return the lag of a source that does not answer: nobody knows it."""
        return {name: None for name in LAG if name in self.status()}

    def _note_end(self, error: PenstockError) -> None:
        """Let others see why it goes on no more, if the store lets us."""
        told = {"message": str(error), "detail": error.detail, "hint": error.hint}
        with suppress(PenstockError):
            self._note(phase=STOPPED, waits_for="", error=told)

    def _beat(self, stop: threading.Event) -> None:
        """While nothing is committed for long: write down why, and so prove that we are the writer.

        Upstream hears from us only as long as that is proved; and a start that waits for a
        slot, or a tick in which tables are compared, can take very long.
        """
        while not self._over.wait(BEAT_MS / 1_000):
            try:
                self._prove()
            except Fenced as error:
                # What is waited for may take for ever, and would be for nothing.
                self._fenced = error
                stop.set()
                return
            except PenstockError:
                continue  # Whoever draws the tick hears of it too, and does something about it.
            except Exception:
                log.exception("beat failed; it goes on", extra=fields(source=self.name))

    def _prove(self) -> None:
        # What is told is added to what was told last, and a tick may be telling just now.
        with self._memory.lock:
            every, now = self._proves_every_ms, self._clock.boot_ms()
            if every is None or now - self._proved_ms < every:
                return
            phase = {"phase": OPENING} if self._opening else {}
            waits_for = self._source.waits_for()
            # The last probe is as old as the wait.
            lag = self._unknown_lag() if self._opening or waits_for else {}
            self._note(**phase, waits_for=waits_for, **lag)
            self._proved_ms = now
        self._source.proved()

    def _open(self) -> None:
        """Let the source be ready, which may take long."""
        self._proved_ms = self._clock.boot_ms()
        self._opening, self._proves_every_ms = True, BEAT_MS
        try:
            self._source.open(self._memory, self._loader, self._bound)
        finally:
            with self._memory.lock:
                self._opening, self._proves_every_ms = False, None
        self._opened = True
        if self.status().get("phase") in (OPENING, RETRYING, STOPPED):
            self._memory.write_down({"status": self._status(self._upper)})

    def _follow(self, stop: threading.Event) -> None:
        self._proved_ms = self._clock.boot_ms()
        self._proves_every_ms = REST_MS
        try:
            self._tick_by_tick(stop)
        finally:
            with self._memory.lock:
                self._proves_every_ms = None

    def _tick_by_tick(self, stop: threading.Event) -> None:
        while not self._arrived():
            match self._ticker.next(stop, upper=self._upper, at_once=self._catching_up):
                case None:
                    return
                case WaitForAgreement(time=time, ahead_ms=ahead):
                    log.warning(
                        "the clock is far ahead and upstream's does not agree; waiting",
                        extra=fields(source=self.name, clock_ms=time, ahead_ms=ahead),
                    )
                    continue
                case SteppedBack(time=time, by_ms=by):
                    log.warning(
                        "the clock stepped back; times go on by one",
                        extra=fields(source=self.name, by_ms=by, time=time),
                    )
                case tick:
                    time = tick.time
            self._proves_every_ms = BEAT_MS
            self._tick(time)
            self._proves_every_ms = REST_MS

    def _arrived(self) -> bool:
        """Whether what was upstream at the start is durable, if that is all that is asked for."""
        goal, bound = self._goal, self._bound
        # At least one tick: the server may have been replaced by one that stands further back.
        return (
            goal is not None
            and bound is not None
            and self._ticked
            and not self._postponed
            and self._source.settled()
            and all(bound.get(partition, 0) >= offset for partition, offset in goal.items())
        )

    def _tick(self, time: int) -> None:
        asked = self._hear()
        errored_before = self._errored_tables() if asked else set()
        probe = self._source.probe()
        self._catching_up = probe.more
        tick = Tick(self._client, self.name, self._memory, time, self._loader, self._pool)
        try:
            reached = self._source.draw(tick, probe.frontier)
            remap = None if reached is None else self._bind(reached, time)
            self._rows += tick.rows
            self._bytes += tick.bytes
            self._note_status(tick, time)
            tick.commit(self._source.collections(), remap)
        finally:
            tick.let_go()
        self._upper = time + 1
        self._ticked = True
        self._proved_ms = self._clock.boot_ms()
        if reached is not None:
            self._bound = reached
        self._source.committed(reached)
        for request in asked:
            left = self._left(request)
            if (self._errored_tables(tick) - errored_before).intersection(left):
                # SUBTLE: the table was live when the request came, and this tick found the change
                # that the request is to repair. The request stays, and the next tick handles it.
                self._postponed = True
            else:
                answer(self._beside, request, left=left, mended=tick.mended)
        self._compact(time)

    def _hear(self) -> list[Request]:
        """What is asked of us; what cannot be done is answered at once."""
        now = self._clock.boot_ms()
        if now - self._heard_ms < HEAR_EVERY_MS and not self._postponed:
            return []
        self._heard_ms, self._postponed = now, False
        taken = []
        for request in requests(self._beside, now_ms=self._clock.now_ms()):
            if request.verb != "resync":
                continue  # Whoever runs this loop is asked.
            try:
                self._source.resync(request.tables)
            except (UsageError, DefiniteError) as error:
                answer(self._beside, request, error=error)
            else:
                taken.append(request)
        return taken

    def _errored_tables(self, tick: Tick | None = None) -> set[str]:
        """Return the tables in error, except those that `tick` has compared in vain."""
        failures = {} if tick is None else tick.failures
        return {
            table["name"]
            for table in self._source.status().get("tables", ())
            if table["error"]
            and not isinstance(failures.get(table["collection"]), ComparisonFailed)
        }

    def _left(self, request: Request) -> dict[str, str]:
        """The tables that were asked for and are still in error, or not there to compare yet."""
        left = {}
        for table in self._source.status().get("tables", ()):
            name = table["name"]
            if request.tables and name not in request.tables:
                continue
            if table["error"]:
                left[name] = table["error"]
            elif table["phase"] != "live":
                left[name] = f"table {name} was not compared, since its first copy is under way"
        return left

    def _bind(self, reached: Frontier, time: int) -> AppendTo:
        match mint(self._shape, self._bound or {}, reached, at=time):
            case Minted(updates=updates):
                return AppendTo(self._remap, updates, self._remap.upper, time + 1)
            case Unmoved():
                return AppendTo(self._remap, [], self._remap.upper, time + 1)
            case Regressed(partition=partition, was=was, now=now):
                raise InternalError(
                    f'source "{self.name}" went back from {was} to {now} in partition {partition}',
                    hint="A source must not draw less than what is bound; please report this.",
                )

    def _name_progress(self, given: str | None, taken: Container[str]) -> None:
        """Write down how the progress relation is called, once; or again, if the file says so."""
        known = self._memory.recall(NOTE)
        if known is None or (given is not None and known["name"] != given):
            chosen = progress_name(self.name, taken, given=given)
            self._memory.write_down({NOTE: {"name": chosen, "kind": self._source.kind}})

    def _durable_bound(self) -> Frontier | None:
        upper = self._remap.upper
        if upper == 0:
            return None
        return accumulated(self._shape, self._remap.snapshot(upper - 1).arrow())

    def _durable_upper(self) -> int:
        """Where our times go on. The notes have times of their own, which say nothing here."""
        # A table may have failed, or recovered, at a tick before anything was bound.
        told = [
            span.lower if span.upper == END else span.upper
            for collection in self._client.state.collections.values()
            for span in collection.errors
        ]
        return max([self._remap.upper, *told])

    def _ask_upstream(self) -> int | None:
        return self._source.probe().now_ms

    def _compact(self, time: int) -> None:
        """Let since follow, `retain` behind."""
        now = self._clock.boot_ms()
        if now - self._compacted_ms < COMPACT_EVERY_MS:
            return
        self._compacted_ms = now
        since = time - self._retain_ms
        for name in (*self._source.collections(), self._remap.name):
            for each in self._client.state.generations(name):
                if since > each.allowed:
                    as_of = each.upper - 1 if each.successor else None
                    self._client.collection(name, as_of=as_of).allow_compaction(since)
        self._memory.collection.allow_compaction(self._memory.upper - 1)

    def _note_status(self, tick: Tick, time: int) -> None:
        now = self._clock.boot_ms()
        if now - self._noted_ms < STATUS_EVERY_MS:
            return
        self._noted_ms = now
        tick.remember("status", self._status(time + 1))

    def status(self) -> Mapping[str, Any]:
        """For people: phase, rows, lag, what is waited for; as of the last tick."""
        return self._memory.recall("status") or {}

    def _status(self, upper: int) -> Mapping[str, Any]:
        return {
            **self._source.status(),
            "connected": True,
            "catching_up": self._catching_up,
            "rows": self._rows,
            "bytes": self._bytes,
            "counted_since_ms": self._counted_since_ms,
            "as_of": upper - 1 if upper else None,
            "written_ms": self._clock.now_ms(),
        }

    def _note(self, **told: Any) -> None:
        """Write down something besides the status that was told last."""
        with self._memory.lock:
            # SUBTLE: before the first connection there is no status, and without its kind a
            # source would be taken for a materialization.
            status = {"kind": self._source.kind, **self.status(), **told}
            status["written_ms"] = self._clock.now_ms()
            self._memory.write_down({"status": status})
