"""Holds that live as long as a DataFrame.

A DataFrame is a plan that is executed later, possibly many times. Its files must
exist until it can no longer be executed, so each scan holds a claim. The scans of one
process share one client per storage location, opened for the first scan and closed
with the last.

If a client loses its hold, for example because the process was suspended longer than
the lease, its scans keep it and later scans share a new client.
"""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from penstock.persist.client import Client, open
from penstock.persist.errors import HoldLost
from penstock.persist.holds import Claim
from penstock.persist.settings import Settings

__all__ = ["ScanHold", "ScanHolds"]


TRIES: Final = 3
"""Attempts to begin a scan when clients lose their hold first."""


@dataclass(slots=True, eq=False)
class _Shared:
    url: str
    hold: bool
    client: Client
    users: int = 0
    lost: bool = False
    """True if its files may have been deleted; later scans then open another client."""


@dataclass(frozen=True, slots=True)
class ScanHold:
    """A claim on one collection, held until it is released."""

    client: Client
    claim: Claim
    release: Callable[[], None]
    """Idempotent."""


class ScanHolds:
    """All scans of this process."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.RLock()
        self._shared: list[_Shared] = []

    def begin(self, url: str, collection: int, name: str, since: int, *, hold: bool) -> ScanHold:
        """Claim a collection of the storage location at `url` from `since` on.

        Raises:
            SinceError: that history has been compacted.
            HoldLost: the hold was lost before the scan began, in every attempt.
        """
        for _ in range(TRIES - 1):
            try:
                return self._begin(url, collection, name, since, hold)
            except HoldLost:
                continue
        return self._begin(url, collection, name, since, hold)

    def held(self) -> dict[str, bool]:
        """Return the storage locations being read, and whether all their scans are held."""
        with self._lock:
            urls = {shared.url for shared in self._shared}
            free = {shared.url for shared in self._shared if not shared.hold}
            return {url: url not in free for url in sorted(urls)}

    def statistics(self) -> dict[str, int]:
        """Return the number of scans of each storage location."""
        with self._lock:
            counts: dict[str, int] = {}
            for shared in self._shared:
                counts[shared.url] = counts.get(shared.url, 0) + shared.users
            return counts

    def _begin(self, url: str, collection: int, name: str, since: int, hold: bool) -> ScanHold:
        with ExitStack() as stack:
            shared = self._enter(url, hold)
            stack.callback(self._leave, shared)
            claims = shared.client.reader.claims
            try:
                claim = stack.enter_context(claims.claim(collection, name, since))
                # SUBTLE: the claim itself may count where older ones of the same hold do
                # not; then the next renewal would end it with them.
                claims.check(claim.state)
            except HoldLost:
                shared.lost = True
                raise
            kept = stack.pop_all()
        return ScanHold(shared.client, claim, kept.close)

    def _enter(self, url: str, hold: bool) -> _Shared:
        with self._lock:
            for shared in self._shared:
                if (shared.url, shared.hold, shared.lost) == (url, hold, False):
                    break
            else:
                client = open(url, hold=hold, settings=self._settings)
                shared = _Shared(url, hold, client)
                self._shared.append(shared)
            shared.users += 1
            return shared

    def _leave(self, shared: _Shared) -> None:
        with self._lock:
            shared.users -= 1
            if shared.users == 0:
                self._shared.remove(shared)
                shared.client.close()
