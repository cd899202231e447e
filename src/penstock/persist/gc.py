"""Letting go: sinces that move, files nobody links, entries nobody needs.

Each of the three is announced or recorded in the log before anything is
deleted, so a crash at any point leaves only work that the next run finds
again. Holds are looked at between announcing and settling (see `holds.py`).

Order, always: unlink in an entry, settle past every hold, delete, forget. For
the log: rollup, record it, raise the floor, delete below it (hazard A1).
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
    """Moves sinces and deletes what no hold and no state needs, on behalf of the writer."""

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
        """Where it all lies."""
        return self._machine.blob

    def allow_and_settle(self, ids: Iterable[int]) -> None:
        """These collections were allowed to forget more: settle."""
        self._behind.update(ids)
        self.settle()

    def busy(self) -> bool:
        """Whether some since stays behind, or something waits to be deleted."""
        return bool(self._behind or self._machine.state.garbage or self._machine.state.expired)

    def settle(self) -> None:
        """Move every since as far as holds let it, and delete what that frees."""
        with self._one_at_a_time:
            if not self.busy():
                return
            self._expire_leases()
            sinces, position = self._needs()
            # A first look saves announcing what holds would not let happen.
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
        """Delete files that were written under closed ids and never linked; how many.

        List first, then read the log to its head, then check the epoch: a file
        that the listing shows and the head does not link never will be.
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
            log.info("swept files that were never linked", extra=fields(files=swept))
        return swept

    def truncate(self) -> None:
        """Delete the log below the older of two rollups, but for young entries."""
        state = self._machine.state
        if len(state.rollups) < 2:
            return
        entries = self._machine.log
        lower, floor = entries.marks().floor, state.rollups[0]
        # Ages are told by the store's own clock; its newest entry says what time it is there.
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
        """What readers need, here and elsewhere: the least sinces and the least position."""
        needed, position = self._claims.needs()
        state = self._machine.state
        try:
            holds = list_holds(self.blob)
        except Corruption as damaged:
            # What a damaged hold claims is not known, so nothing is given up.
            log.warning("a hold is damaged and keeps everything", extra=fields(object=damaged.key))
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
            log.info("leases ran out", extra=fields(holds=lapsed))
            self._machine.commit(
                lambda state: [ExpireHold(id) for id in lapsed if id not in state.expired]
            )
        expired = list(self._machine.state.expired)
        for id in expired:
            for listed in self.blob.list(hold_prefix(id)):
                self.blob.delete(listed.key)

    def _collect(self, state: State) -> None:
        keys = sorted(key for key, number in state.garbage.items() if number < state.collected)
        # An expired hold stays on record until since has settled past it once.
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
    # A collection that was replaced takes no more updates: past its upper nothing is readable.
    over = [id for id, since in sinces.items() if _is_over(state.collections[id], since)]
    return [settle, *map(Destroy, over)]


def _is_over(collection: CollectionState, since: int) -> bool:
    return bool(collection.successor) and since >= collection.upper
