"""Garbage collection: sinces that advance, unlinked files, and log entries below a rollup.

Each step is recorded in the log before an object is deleted, so a crash leaves only
work that the next run repeats. Holds are listed between the intention and the
settlement of a since (see `holds.py`).

The order is fixed. Files: unlink in an entry, settle past every hold, delete, forget.
The log: write a rollup, record it, raise the floor, delete below it (hazard A1).
"""

import threading
from collections.abc import Iterable

from penstock.durable import Blob
from penstock.errors import Corruption
from penstock.failpoints import Failpoint, hit
from penstock.persist.holds import LocalClaims, list_holds
from penstock.persist.machine import Machine
from penstock.persist.paths import BATCHES, ROLLUPS, hold_prefix, number_of, staging_of
from penstock.persist.settings import Settings
from penstock.persist.staging import epoch_of
from penstock.persist.state import (
    END,
    CollectionState,
    Destroy,
    ExpireHold,
    Forget,
    ForgetHold,
    Intend,
    Operation,
    Settle,
    State,
)
from penstock.telemetry import fields, logger

__all__ = ["Collector"]

log = logger("persist")


class Collector:
    """Advances sinces and deletes files that neither a hold nor the state needs."""

    def __init__(self, machine: Machine, claims: LocalClaims, settings: Settings) -> None:
        self._machine = machine
        self._claims = claims
        self._settings = settings
        self._one_at_a_time = threading.Lock()
        self._seen: dict[str, tuple[int, int]] = {}
        self._behind: set[int] = {
            id for id, c in machine.state.collections.items() if c.allowed > c.since
        }

    @property
    def blob(self) -> Blob:
        return self._machine.blob

    def allow_and_settle(self, ids: Iterable[int]) -> None:
        """Settle, after compaction of these collections was allowed."""
        self._behind.update(ids)
        self.settle()

    def busy(self) -> bool:
        """Return whether a since is behind its permission, or a file waits for deletion."""
        return bool(self._behind or self._machine.state.garbage or self._machine.state.expired)

    def settle(self) -> None:
        """Advance every since as far as holds permit, and delete the files that this releases."""
        with self._one_at_a_time:
            if not self.busy():
                return
            self._expire_leases()
            sinces, position = self._needs()
            # Checking first avoids intentions that holds would not permit.
            before, after = self._machine.commit(
                lambda state: self._intentions(state, sinces, position)
            )
            if before is not after:
                hit(Failpoint.SINCE_INTENDED)
                # SUBTLE: the holds are listed after the announcement is durable, never before.
                sinces, position = self._needs()
                _, after = self._machine.commit(lambda state: _settlement(state, sinces, position))
                hit(Failpoint.SINCE_SETTLED)
            self._behind = {
                id
                for id in self._behind
                if id in after.collections
                and after.collections[id].allowed > after.collections[id].since
            }
            self._collect(after)

    def sweep(self, staging: str | None = None) -> int:
        """Delete files under closed ids that were never linked, and return their number.

        List first, then read the log to its head, then check the epoch: a file that is
        listed and not linked at the head cannot be linked later.
        """
        prefix = BATCHES if staging is None else f"{BATCHES}{staging}/"
        listed = [each.key for each in self.blob.list(prefix)]
        state = self._machine.refresh(thorough=True)
        epoch = self._machine.epoch
        if not listed or epoch is None or state.epoch != epoch:
            return 0
        linked = state.linked()
        swept = 0
        for key in listed:
            id = staging_of(key)
            if id is None or id in state.staging or epoch_of(id) > epoch:
                continue
            if key in linked or key in state.garbage:
                continue
            self.blob.delete(key)
            swept += 1
        if staging is None:
            self._machine.log.sweep()
        if swept:
            log.info("unlinked files deleted", extra=fields(files=swept))
        return swept

    def truncate(self) -> None:
        """Delete the log below the older of two rollups, except young entries."""
        state = self._machine.state
        if len(state.rollups) < 2:
            return
        entries = self._machine.log
        lower, floor = entries.marks().floor, state.rollups[0]
        # Ages are by the clock of the store; the newest entry approximates its current time.
        now_ms = entries.written_ms(state.seqno - 1)
        while lower < floor and now_ms is not None:
            middle = (lower + floor + 1) // 2
            written_ms = entries.written_ms(middle - 1)
            if written_ms is None or now_ms - written_ms >= self._settings.young_ms:
                lower = middle
            else:
                floor = middle - 1
        if lower > entries.marks().floor:
            entries.truncate(lower, head=state.seqno)
        for listed in self.blob.list(ROLLUPS):
            number = number_of(listed.key)
            if number is not None and number < state.rollups[0]:
                self.blob.delete(listed.key)

    def _intentions(self, state: State, needed: dict[int, int], position: int) -> list[Operation]:
        sinces: dict[int, int] = {}
        for id in sorted(self._behind):
            collection = state.collections.get(id)
            if collection is None:
                continue
            since = min(collection.allowed, needed.get(id, END))
            if since > collection.since:
                sinces[id] = since
        collect = min(state.seqno, position)
        if not any(state.collected <= number < collect for number in state.garbage.values()):
            collect = state.collected
        if not sinces and collect == state.collected:
            return []
        return [Intend(sinces, collect)]

    def _needs(self) -> tuple[dict[int, int], int]:
        """Return the lowest sinces and the lowest position that local and remote readers need."""
        needed, position = self._claims.needs()
        state = self._machine.state
        try:
            holds = list_holds(self.blob)
        except Corruption as damaged:
            # The claims of a damaged hold are unknown, so every file is retained.
            log.warning("damaged hold retains all files", extra=fields(object=damaged.key))
            return dict.fromkeys(state.collections, 0), 0
        for id, (_, hold) in holds.items():
            if id in state.expired:
                continue
            position = min(position, hold.position)
            for collection, since in hold.sinces.items():
                needed[collection] = min(since, needed.get(collection, END))
        return needed, position

    def _expire_leases(self) -> None:
        now_ms = self._settings.clock.boot_ms()
        try:
            holds = list_holds(self.blob)
        except Corruption:
            return
        self._seen = {id: seen for id, seen in self._seen.items() if id in holds}
        lapsed: list[str] = []
        for id, (version, hold) in holds.items():
            if self._seen.get(id, (-1, 0))[0] != version:
                self._seen[id] = (version, now_ms)
            elif hold.lease_ms is not None and now_ms - self._seen[id][1] >= hold.lease_ms:
                lapsed.append(id)
        if lapsed:
            log.info("leases expired", extra=fields(holds=lapsed))
            self._machine.commit(
                lambda state: [ExpireHold(id) for id in lapsed if id not in state.expired]
            )
        expired = list(self._machine.state.expired)
        for id in expired:
            for listed in self.blob.list(hold_prefix(id)):
                self.blob.delete(listed.key)

    def _collect(self, state: State) -> None:
        keys = sorted(key for key, number in state.garbage.items() if number < state.collected)
        # An expired hold stays recorded until since has settled past it once.
        expired = sorted(state.expired)
        if not keys and not expired:
            return
        hit(Failpoint.COLLECT_BEGIN)
        for key in keys:
            self.blob.delete(key)
        hit(Failpoint.COLLECT_DONE)
        self._machine.commit(
            lambda _: [*([Forget(tuple(keys))] if keys else []), *map(ForgetHold, expired)]
        )


def _settlement(state: State, needed: dict[int, int], position: int) -> list[Operation]:
    sinces = {
        id: max(collection.since, min(collection.intended, needed.get(id, END)))
        for id, collection in state.collections.items()
        if collection.intended is not None
    }
    if state.collecting is None and not sinces:
        return []
    collect = state.collecting or 0
    settle = Settle(sinces, max(state.collected, min(collect, position)))
    # A replaced collection accepts no updates: nothing is readable past its upper.
    over = [id for id, since in sinces.items() if _is_over(state.collections[id], since)]
    return [settle, *map(Destroy, over)]


def _is_over(collection: CollectionState, since: int) -> bool:
    return bool(collection.successor) and since >= collection.upper
