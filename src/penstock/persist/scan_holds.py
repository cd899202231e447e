"""Readings that outlive the call that began them, as a DataFrame does.

A DataFrame is a plan: it is read later, perhaps often. Until nobody can read
it any more, what it would read must stay. So each reading holds a claim, and
the readings of one process share one client for each storage location, opened
for the first and closed with the last.

A client that lost its hold, as when the process was asleep for longer than the
lease, stays with the readings that have it. Those that begin later share a new
one.
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
"""How many clients a reading tries that lose their hold before it begins."""


@dataclass(slots=True, eq=False)
class _Shared:
    url: str
    hold: bool
    client: Client
    users: int = 0
    lost: bool = False
    """Whether what it held may be gone; then no other reading joins."""


@dataclass(frozen=True, slots=True)
class ScanHold:
    """A claim on one collection, kept until it is released."""

    client: Client
    claim: Claim
    release: Callable[[], None]
    """May be called twice."""


class ScanHolds:
    """All readings of this process."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.RLock()
        self._shared: list[_Shared] = []

    def begin(self, url: str, collection: int, name: str, since: int, *, hold: bool) -> ScanHold:
        """Claim a collection of the storage location at `url` from `since` on.

        Raises:
            SinceError: what lies there is no longer kept.
            HoldLost: the hold was lost before the reading began, again and again.
        """
        for _ in range(TRIES - 1):
            try:
                return self._begin(url, collection, name, since, hold)
            except HoldLost:
                continue
        return self._begin(url, collection, name, since, hold)

    def held(self) -> dict[str, bool]:
        """The storage locations that are being read, and whether all of that is held."""
        with self._lock:
            urls = {shared.url for shared in self._shared}
            free = {shared.url for shared in self._shared if not shared.hold}
            return {url: url not in free for url in sorted(urls)}

    def statistics(self) -> dict[str, int]:
        """How many readings there are of each storage location."""
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
