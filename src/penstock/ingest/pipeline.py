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
from typing import Any, Final

from penstock import persist
from penstock.clock import Clock
from penstock.durable import Blob
from penstock.errors import (
    DefiniteError,
    InternalError,
    PenstockError,
    TransientError,
    UsageError,
)
from penstock.ingest.loading import SPARK_BYTES, Loader, ManyTasks
from penstock.ingest.memory import Memory
from penstock.ingest.relations import NOTE
from penstock.ingest.requests import Request, answer, requests
from penstock.ingest.tick import Tick
from penstock.persist import AppendTo
from penstock.persist.lake import open_store
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
from penstock.sources.source import Frontier, Source
from penstock.telemetry import fields, logger

__all__ = ["Ingest"]

log = logger("ingest")

BEAT_MS: Final = 2_000
"""How often a tick that is not over proves that we are the writer, and tells what it does."""

REST_MS: Final = 15_000
"""How long nothing need be proved between two ticks."""

COMPACT_EVERY_MS: Final = 10_000
STATUS_EVERY_MS: Final = 1_000
HEAR_EVERY_MS: Final = 1_000


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
        self._memory = Memory(client, name, clock)
        self._name_progress(progress, taken)
        self._many = many
        if many is not None:
            client.delegate_big_merges(many.merges(client.url))
        self._spark_bytes = spark_bytes
        self._loader: Loader
        self._pool: ThreadPoolExecutor
        self._beside: Blob
        self._bound = self._durable_bound()
        self._upper = max(self._remap.upper, self._memory.upper)
        self._goal: Frontier | None = None
        self._catching_up = False
        self._ticker = Ticker(clock, interval_ms=tick_ms, upstream_now=self._ask_upstream)
        self._heard_ms = 0
        self._compacted_ms = 0
        self._noted_ms = 0
        self._rows = 0
        self._bytes = 0
        self._ticked = False
        self._proved_ms = 0
        self._proves_every_ms: int | None = None
        """While the source is followed."""

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
            Fenced: another process writes this location now.
        """
        pauses = pauses_ms(self._chance, first_ms=100)
        self._loader = Loader(
            self._client, self.name, many=self._many, spark_bytes=self._spark_bytes
        )
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="spool")
        self._beside = open_store(self._client.url, persist.Settings())
        beat = threading.Thread(target=self._beat, name=f"beat of {self.name}", daemon=True)
        beat.start()
        try:
            while not stop.is_set():
                try:
                    self._source.open(self._memory, self._loader, self._bound)
                    # Whatever came while nobody looked need not wait for a round time.
                    self._catching_up = self._bound is not None
                    if once and self._goal is None:
                        self._goal = self._source.probe().everything
                    self._follow(stop)
                    self._memory.write_down({"status": self._status(self._upper - 1)})
                    return
                except TransientError as error:
                    pause = next(pauses)
                    log.warning(
                        "source is lost; trying again",
                        extra=fields(
                            source=self.name, error=str(error), detail=error.detail, pause_ms=pause
                        ),
                    )
                    self._note_trouble(error)
                    self._source.close()
                    self._clock.wait(stop, pause)
        finally:
            self._over.set()
            beat.join()
            self._source.close()
            self._loader.close()
            self._pool.shutdown()
            self._beside.close()

    def _beat(self) -> None:
        """While nothing is committed for long: write down why, and so prove that we are the writer.

        Upstream hears from us only as long as that is proved; and a tick in which tables
        are compared, or that waits for a slot, can take very long.
        """
        while not self._over.wait(BEAT_MS / 1_000):
            every, now = self._proves_every_ms, self._clock.boot_ms()
            if every is None or now - self._proved_ms < every:
                continue
            try:
                self._memory.write_down(
                    {
                        "status": {
                            **(self._memory.recall("status") or {}),
                            "waits_for": self._source.waits_for(),
                            "written_ms": self._clock.now_ms(),
                        }
                    }
                )
            except PenstockError:
                continue  # Whoever draws the tick hears of it too, and does something about it.
            self._proved_ms = now
            self._source.proved()

    def _follow(self, stop: threading.Event) -> None:
        self._proved_ms = self._clock.boot_ms()
        self._proves_every_ms = REST_MS
        try:
            self._tick_by_tick(stop)
        finally:
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
            and all(bound.get(partition, 0) >= offset for partition, offset in goal.items())
        )

    def _tick(self, time: int) -> None:
        asked = self._hear()
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
            answer(self._beside, request, left=self._left_in_error(request))
        self._compact(time)

    def _hear(self) -> list[Request]:
        """What is asked of us; what cannot be done is answered at once."""
        now = self._clock.boot_ms()
        if now - self._heard_ms < HEAR_EVERY_MS:
            return []
        self._heard_ms = now
        taken = []
        for request in requests(self._beside):
            try:
                if request.verb != "resync":
                    raise UsageError(f'a source cannot "{request.verb}"', hint="Ask for a resync.")
                self._source.resync(request.tables)
            except (UsageError, DefiniteError) as error:
                answer(self._beside, request, error=error)
            else:
                taken.append(request)
        return taken

    def _left_in_error(self, request: Request) -> dict[str, str]:
        """The tables that were asked for and are still in error, and why."""
        return {
            table["name"]: table["error"]
            for table in self._source.status().get("tables", ())
            if table["error"] and (not request.tables or table["name"] in request.tables)
        }

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
            collection = self._client.collection(name)
            if since > collection.state.allowed:
                collection.allow_compaction(since)
        self._memory.collection.allow_compaction(self._memory.upper - 1)

    def _note_status(self, tick: Tick, time: int) -> None:
        now = self._clock.boot_ms()
        if now - self._noted_ms < STATUS_EVERY_MS:
            return
        self._noted_ms = now
        tick.remember("status", self._status(time))

    def status(self) -> Mapping[str, Any]:
        """For people: phase, rows, lag, what is waited for; as of the last tick."""
        return self._memory.recall("status") or {}

    def _status(self, time: int) -> Mapping[str, Any]:
        return {
            **self._source.status(),
            "catching_up": self._catching_up,
            "rows": self._rows,
            "bytes": self._bytes,
            "as_of": time,
            "written_ms": self._clock.now_ms(),
        }

    def _note_trouble(self, error: TransientError) -> None:
        status = {
            **(self._memory.recall("status") or {}),
            "phase": "retrying",
            "waits_for": f"{error}. {error.detail}".strip(),
            "written_ms": self._clock.now_ms(),
        }
        self._memory.write_down({"status": status})
