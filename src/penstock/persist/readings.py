"""Readings that outlive the call that began them, as a DataFrame does.

A DataFrame is a plan: it is read later, perhaps often. Until nobody can read
it any more, what it would read must stay. So each reading holds a claim, and
the readings of one process share one client for each storage location, opened
for the first and closed with the last.
"""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from penstock.persist.client import Client, open
from penstock.persist.holds import Claim
from penstock.persist.settings import Settings

__all__ = ["Reading", "Readings"]


@dataclass(slots=True)
class _Shared:
    client: Client
    users: int = 0


@dataclass(frozen=True, slots=True)
class Reading:
    """A claim on one collection, kept until it is released."""

    client: Client
    claim: Claim
    release: Callable[[], None]
    """May be called twice."""


class Readings:
    """All readings of this process."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.RLock()
        self._shared: dict[tuple[str, bool], _Shared] = {}

    def begin(self, url: str, collection: int, name: str, since: int, *, hold: bool) -> Reading:
        """Claim a collection of the storage location at `url` from `since` on.

        Raises:
            SinceError: what lies there is no longer kept.
        """
        with ExitStack() as stack:
            client = self._enter(url, hold)
            stack.callback(self._leave, url, hold)
            claim = stack.enter_context(client.reader.claims.claim(collection, name, since))
            kept = stack.pop_all()
        return Reading(client, claim, kept.close)

    def held(self) -> dict[str, bool]:
        """The storage locations that are being read, and whether all of that is held."""
        with self._lock:
            return {url: (url, False) not in self._shared for url, _ in self._shared}

    def statistics(self) -> dict[str, int]:
        """How many readings there are of each storage location."""
        with self._lock:
            counts: dict[str, int] = {}
            for (url, _), shared in self._shared.items():
                counts[url] = counts.get(url, 0) + shared.users
            return counts

    def _enter(self, url: str, hold: bool) -> Client:
        with self._lock:
            shared = self._shared.get((url, hold))
            if shared is None:
                client = open(url, hold=hold, settings=self._settings)
                shared = self._shared[url, hold] = _Shared(client)
            shared.users += 1
            return shared.client

    def _leave(self, url: str, hold: bool) -> None:
        with self._lock:
            shared = self._shared[url, hold]
            shared.users -= 1
            if shared.users == 0:
                del self._shared[url, hold]
                shared.client.close()
