"""Resources of an open client: threads, sockets and claims, and their shutdown.

They are separate from the client. A client that is not closed explicitly is closed when it
is garbage-collected, by a finalizer that must not refer to the client. In addition to the
resources of a reader, a writer has:

    committer      writes accepted calls
    maintenance    merges, writes rollups, garbage-collects
    notifier       wakes the listeners of other processes
"""

import os
import socket
import threading

from penstock.durable import CachedBlob, RetryingBlob, probe_location
from penstock.errors import DeterminateError, PenstockError, UsageError
from penstock.failpoints import Failpoint, hit
from penstock.persist.batch import Batches
from penstock.persist.gc import Collector
from penstock.persist.holds import Claims, LeasedClaims, LocalClaims, NoClaims
from penstock.persist.lock import LockHandoff, take_lock
from penstock.persist.machine import Machine
from penstock.persist.maintenance import Maintenance
from penstock.persist.merge.merger import Merger
from penstock.persist.notify import NotificationListener, Notifier, Wakeups
from penstock.persist.settings import Settings
from penstock.persist.staging import Staging
from penstock.persist.state import Release
from penstock.persist.write import Committer
from penstock.telemetry import fields, logger

__all__ = ["Runtime"]

log = logger("persist")


class Runtime:
    """Resources of one client, without a reference to the client."""

    def __init__(self, blob: RetryingBlob, settings: Settings) -> None:
        self.blob = blob
        self.settings = settings
        self.machine = Machine(blob, settings)
        cache = CachedBlob(blob, bound_bytes=settings.cache_bytes)
        self.batches = Batches(blob, cache, settings)
        self.wakeups = Wakeups()
        self.notifications = NotificationListener(self.wakeups)
        self.closed = threading.Event()
        self.claims: Claims
        self.notifier: Notifier | None = None
        self.maintenance: Maintenance | None = None
        self.committer: Committer | None = None
        self._pid = os.getpid()

    def read(self, *, hold: bool) -> None:
        """Start as a reader; with `hold`, history is retained during reads."""
        self.machine.load()
        owner = f"{socket.gethostname()}-{os.getpid()}"
        self.claims = (
            LeasedClaims(self.machine, self.settings, owner=owner)
            if hold
            else NoClaims(self.machine)
        )

    def write(
        self,
        writer: str,
        *,
        after: int | None,
        handoff: LockHandoff | None,
        take_over: bool,
        pid: int | None,
    ) -> None:
        """Start as the writer: take the lock, or adopt the one of `handoff`.

        Raises:
            LockHeld: another id is writing; or, without `take_over`, another process of this host.
            Fenced: another writer has taken the lock, or another process has after epoch `after`.
        """
        blob, settings = self.blob, self.settings
        probe_location(blob, lambda: f"{settings.chance.getrandbits(64):016x}")
        self.machine.load()
        self.notifier = notifier = _create_notifier(settings.notify)
        try:
            if handoff is None:
                address = notifier.address if notifier else ""
                take_lock(
                    self.machine,
                    settings,
                    writer,
                    where=blob.name,
                    address=address,
                    after=after,
                    take_over=take_over,
                    pid=pid,
                )
            else:
                self.machine.adopt(handoff.epoch)
        except BaseException:
            if notifier is not None:
                notifier.close()
            raise
        self._start_writing(notifier, None if handoff is None else handoff.staging)

    def close(self, *, release: bool = True) -> None:
        """Finish accepted calls and close all resources; with `release`, release the lock."""
        if os.getpid() != self._pid:
            return  # A forked child has neither these threads nor the lock.
        if self.committer is not None:
            self.committer.close()
        self.closed.set()
        try:
            if self.maintenance is not None:
                self.maintenance.stop()
            self.claims.close()
            if release:
                self._release()
        finally:
            self.notifications.close()
            if self.notifier is not None:
                self.notifier.close()
            self.blob.close()

    def close_forgotten(self) -> None:
        """Close a client that was not closed explicitly, and log an error instead of raising it."""
        try:
            self.close()
        except PenstockError as error:
            log.warning("a forgotten client could not be closed", extra=fields(error=str(error)))

    def must_not_be_forked(self) -> None:
        """Check that this process is not a forked child: threads do not survive a fork.

        Raises:
            UsageError: the process was forked after the client was opened.
        """
        if os.getpid() != self._pid:
            raise UsageError(
                f'client of location "{self.blob.name}" was opened before a fork',
                hint="Open the location again in the child process.",
            )

    def _start_writing(self, notifier: Notifier | None, adopted: str | None) -> None:
        machine, settings, wakeups = self.machine, self.settings, self.wakeups
        epoch = machine.epoch
        assert epoch is not None
        staging = Staging(epoch, adopted)
        claims = LocalClaims(machine, settings)
        collector = Collector(machine, claims, settings)
        if notifier is not None:
            notifier.start(machine.state.location)

        def wake(seqno: int) -> None:
            wakeups.wake_all()
            if notifier is not None:
                notifier.notify(seqno)

        self.claims = claims
        merger = Merger(self.batches, staging, settings)
        self.maintenance = Maintenance(machine, merger, collector, settings)
        self.committer = Committer(
            machine, self.batches, staging, allow=collector.allow_and_settle, wake=wake
        )
        left = [
            c.name
            for c in machine.state.collections.values()
            if any(batch.upper > c.upper for batch in c.batches)
        ]
        if left:
            log.warning(
                "found updates that were written and not sealed; see Client.unsealed",
                extra=fields(location=self.blob.name, collections=left),
            )
        if settings.background:
            self.maintenance.start()

    def _release(self) -> None:
        if self.committer is None or self.maintenance is None:
            return
        if self.committer.broken is not None:
            raise self.committer.broken
        maintenance = self.maintenance
        if maintenance.entries_since_rollup() >= 16:
            try:
                maintenance.roll_up()
            except DeterminateError as error:
                log.warning("no rollup was written", extra=fields(error=str(error)))
        _, after = self.machine.commit(lambda _: [*maintenance.rollup_record(), Release()])
        self.machine.log.witness(after.seqno)
        hit(Failpoint.RELEASE_DONE)


def _create_notifier(address: str) -> Notifier | None:
    """Return a notifier, or None if it cannot listen; readers then rely on polling."""
    if not address:
        return None
    try:
        return Notifier(address)
    except OSError as error:
        log.warning("listeners cannot be woken", extra=fields(address=address, error=str(error)))
        return None
