"""Background maintenance by the writer; never needed for correctness.

One thread merges batches as the spine requires, writes a rollup after enough entries,
and deletes unneeded files. A step that fails, or that `kill -9` interrupts, is repeated
by the next pass.
"""

import threading

from penstock.errors import Fenced, PenstockError, StoreError
from penstock.failpoints import Failpoint, hit
from penstock.persist.gc import Collector
from penstock.persist.machine import Machine
from penstock.persist.merge.merger import Merger, batches_below_since, merge_since, mergeable
from penstock.persist.settings import Settings
from penstock.persist.state import (
    Batch,
    CloseStaging,
    CollectionState,
    MergeBatches,
    OpenStaging,
    Operation,
    RolledUp,
    State,
)
from penstock.telemetry import fields, logger

__all__ = ["Maintenance"]

log = logger("persist")


class Maintenance:
    """Merges, rolls up and garbage-collects a location on behalf of its writer."""

    def __init__(
        self,
        machine: Machine,
        merger: Merger,
        collector: Collector,
        settings: Settings,
    ) -> None:
        self._machine = machine
        self.merger = merger
        self._batches = merger.batches
        self._staging = merger.staging
        self._collector = collector
        self._settings = settings
        self._rolled = machine.state.rollups[-1] if machine.state.rollups else 0
        self._unrecorded: int | None = None
        self._truncated_at = 0
        self._settled_ms = 0
        self._looked: State | None = None
        self._working = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.last_error: Exception | None = None
        """The error of the last pass, if it failed."""

    def start(self) -> None:
        """Run in the background until stopped."""
        self._thread = threading.Thread(target=self._run, name="penstock-maintenance", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Finish the current pass and stop."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def round(self) -> None:
        """Run one pass: all steps that are due."""
        with self._working:
            self._merge_due()
            self._roll_up_if_due()
            now_ms = self._settings.clock.boot_ms()
            if self._collector.busy() and now_ms - self._settled_ms >= self._settings.settle_ms:
                self._settled_ms = now_ms
                self._collector.settle()
            self._turn_staging()
            if len(self._machine.state.rollups) > 1 and (
                self._machine.state.rollups[-1] != self._truncated_at
            ):
                self._truncated_at = self._machine.state.rollups[-1]
                self._collector.truncate()

    def compact(self) -> None:
        """Merge each collection into as few batches as memory allows, then collect garbage."""
        with self._working:
            self._collector.settle()
            for id in sorted(self._machine.state.collections):
                collection = self._machine.state.collections.get(id)
                if collection is not None:
                    self._merge_all(collection, base=True)
                collection = self._machine.state.collections.get(id)
                if collection is not None:
                    self._merge_all(collection, base=False)
            self.roll_up()
            self._collector.settle()
            self._turn_staging()
            self._collector.sweep()
            self._collector.truncate()

    def sweep(self) -> None:
        """Delete files of earlier epochs that were never linked."""
        with self._working:
            self._collector.sweep()

    def roll_up(self) -> None:
        """Write a rollup of the current state and record it."""
        state = self._machine.state
        if state.seqno > self._rolled:
            self._machine.write_rollup(state)
            self._rolled = self._unrecorded = state.seqno
        self._record_rollup()

    def rollup_record(self) -> list[Operation]:
        """Return the operations that record a rollup that no entry mentions yet."""
        recorded, self._unrecorded = self._unrecorded, None
        return [] if recorded is None else [RolledUp(recorded)]

    def entries_since_rollup(self) -> int:
        """Return the number of entries that an open would replay."""
        return self._machine.state.seqno - self._rolled

    def _run(self) -> None:
        swept = False
        while not self._settings.clock.wait(self._stop, self._settings.upkeep_ms):
            try:
                if not swept:
                    self.sweep()
                    swept = True
                self.last_error = None
                self.round()
            except Fenced:
                return
            except PenstockError as error:
                self.last_error = error
                log.warning("maintenance failed; retrying", extra=fields(error=str(error)))
            except Exception as error:
                # Thread boundary: reads and writes continue without maintenance.
                self.last_error = error
                log.exception("maintenance raised; retrying")

    def _merge_due(self) -> None:
        state, before = self._machine.state, self._looked
        self._looked = state
        for id, collection in state.collections.items():
            if before is not None and before.collections.get(id) is collection:
                continue
            try:
                self._merge_while_due(collection)
            except (Fenced, StoreError):
                raise
            except Exception as error:
                # A collection that cannot be merged must not block the others.
                self.last_error = error
                log.exception(
                    "collection could not be merged", extra=fields(collection=collection.name)
                )

    def _merge_while_due(self, collection: CollectionState) -> None:
        while not self._stop.is_set():
            inputs = self.merger.due(collection)
            merged = self._merge(collection, inputs) if inputs else None
            if merged is None:
                return
            collection = merged

    def _merge_all(self, collection: CollectionState, *, base: bool) -> None:
        """Merge the batches at or below since into a base, or the batches above it."""
        while True:
            ready = batches_below_since(collection, self._batches)
            group: list[Batch] = []
            for batch in mergeable(collection, self._batches):
                if (batch in ready) is not base:
                    continue
                if group and not self.merger.possible(collection, [*group, batch]):
                    if len(group) > 1:
                        break
                    group = []
                group.append(batch)
            # Merging one batch advances its times to since; times of a base are already advanced.
            lone = len(group) == 1 and not (
                group[0].merged and (base or group[0].since >= merge_since(collection))
            )
            if (len(group) < 2 and not lone) or not self.merger.possible(collection, group):
                return
            merged = self._merge(collection, group)
            if merged is None:
                return
            collection = merged

    def _merge(self, collection: CollectionState, inputs: list[Batch]) -> CollectionState | None:
        """Return the collection after the merge, or None if it was destroyed before the merge."""
        ids = tuple(batch.id for batch in inputs)
        since = merge_since(collection)
        with self._machine.fence_before_damage():
            output = self.merger.merge(collection, inputs, since=since)
        hit(Failpoint.MERGE_BUILT)

        def plan(state: State) -> list[Operation]:
            current = state.collections.get(collection.id)
            present = {batch.id for batch in current.batches} if current else set()
            return [MergeBatches(collection.id, ids, output)] if present.issuperset(ids) else []

        try:
            _, after = self._machine.commit(plan)
        finally:
            if output is not None:
                self._staging.release(output)
        hit(Failpoint.MERGE_DONE)
        return after.collections.get(collection.id)

    def _roll_up_if_due(self) -> None:
        grown = self._machine.bytes_since_rollup > (8 << 20)
        if self.entries_since_rollup() >= self._settings.rollup_every or (
            grown and self.entries_since_rollup() >= 16
        ):
            self.roll_up()

    def _record_rollup(self) -> None:
        operations = self.rollup_record()
        if operations:
            self._machine.commit(lambda _: operations)

    def _turn_staging(self) -> None:
        if self._staging.worn():
            opened = self._staging.next_id()
            self._machine.commit(lambda _: [OpenStaging(opened)])
            self._staging.turn_over()
        done = self._staging.finished()
        if done:
            self._machine.commit(
                lambda state: [CloseStaging(id) for id in done if id in state.staging]
            )
            for id in done:
                self._collector.sweep(id)
