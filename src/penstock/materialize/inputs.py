"""Input collections of a materialization: their progress, and the holds that retain them."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from penstock import persist
from penstock.errors import DefiniteError, UsageError
from penstock.materialize.intervals import BoundResource
from penstock.persist.errors import CollectionMissing
from penstock.persist.lake import storage_locations
from penstock.persist.records import CollectionState, ErrorSpan
from penstock.progress.time import describe_time

__all__ = [
    "ClaimedCollection",
    "InputCollections",
    "Readiness",
    "StoppedByError",
    "hold_owner",
    "stopping_error",
]


def hold_owner(materialization: str) -> str:
    """Return the owner name of the holds of a materialization."""
    return f"materialize-{materialization}"


@dataclass(frozen=True, slots=True)
class Readiness:
    """Upper bounds of the next transaction and of the current backlog."""

    upper: int
    """Largest possible upper of the next transaction."""

    target: int
    """Upper of the current backlog. Larger than `upper` if a binding must freeze on the way."""

    behind: str = ""
    """Description, for the status, of the collection that limits the upper, or empty."""

    errored: tuple[tuple[str, ErrorSpan], ...] = ()
    """Errored collections, each with the time span of its error."""

    frozen: frozenset[str] = frozenset()
    """Errored collections whose bindings hold every change below the error (`leave_behind`)."""


@dataclass(frozen=True, slots=True)
class ClaimedCollection:
    """State of a collection whose files are retained for a read."""

    url: str
    id: str
    state: CollectionState

    @property
    def predecessors(self) -> frozenset[str]:
        """Ids of the earlier collections with the same name."""
        location, _, _ = self.id.rpartition("/")
        return frozenset(f"{location}/{id}" for id in self.state.predecessors)

    def bind(
        self,
        path: str,
        backfill: int,
        columns: str,
        *,
        unknown: bool,
        frozen: bool,
        truncates: bool,
        layout: str,
        continued: frozenset[str],
    ) -> BoundResource:
        """Return the collection as bound to a resource."""
        state = self.state
        return BoundResource(
            path,
            state.name,
            self.id,
            backfill,
            state.since,
            state.upper,
            tuple((span.lower, span.upper) for span in state.errors),
            columns,
            unknown,
            frozen,
            truncates,
            layout,
            continued,
            self.predecessors,
        )


class InputCollections:
    """The bound collections of a materialization, and one hold in each storage location."""

    def __init__(
        self,
        location: str,
        names: Sequence[str],
        *,
        owner: str,
        stop: threading.Event | None = None,
    ) -> None:
        """Open the storage locations of all collections in `names`, and take the holds.

        Soon after `stop` is set, failed store requests are not retried.

        Raises:
            CollectionMissing: the lake does not contain one of the collections.
        """
        self._stack = ExitStack()
        self._clients: dict[str, persist.Client] = {}
        self._where: dict[str, str] = {}
        known: list[str] = []
        try:
            for url in storage_locations(location):
                client = persist.open(url, settings=persist.Settings(stop=stop))
                state = client.state
                known += state.listed()
                bound = [name for name in names if name in state.names]
                if not bound:
                    # An earlier specification may have bound collections of this location. Its hold
                    # would pin their since permanently.
                    client.drop_hold(owner)
                    client.close()
                    continue
                self._stack.callback(client.close)
                self._clients[url] = client
                self._where |= dict.fromkeys(bound, url)
            for name in names:
                if name not in self._where:
                    raise CollectionMissing(name, where=location, known=sorted(known))
            self._holds = {url: client.hold(owner) for url, client in self._clients.items()}
        except BaseException:
            self._stack.close()
            raise

    def close(self) -> None:
        """Close the stores. The holds remain in force."""
        self._stack.close()

    def state(self, name: str, as_of: int | None = None) -> CollectionState:
        """Return the current state of the collection that had `name` at `as_of`, by default now."""
        collection = self._clients[self._where[name]].state.named(name, as_of)
        if collection is None:
            raise UsageError(
                f'collection "{name}" was dropped while it was being materialized',
                hint="Remove it from the materialization.",
            )
        return collection

    def predecessors(self, name: str, as_of: int | None = None) -> frozenset[str]:
        """Return the ids of the earlier collections with a name (see `ResourceProgress`)."""
        location = self._clients[self._where[name]].state.location
        return frozenset(f"{location}/{id}" for id in self.state(name, as_of).predecessors)

    def ready(
        self,
        frontiers: Mapping[str, int],
        incompatible: Mapping[str, ErrorSpan],
        *,
        leave_behind: bool,
    ) -> Readiness:
        """Return the time up to which all collections can be read.

        An errored collection ends at its error time. With `leave_behind`, an errored collection
        no longer limits the upper once its bindings have reached that time, according to
        `frontiers`. A collection that is `incompatible` with a resource is treated as errored.
        If a collection begins after another one ends, the common upper is 0 until the latter
        reaches that time.
        """
        states = [self.state(name) for name in self._where]
        errored = tuple(
            (collection, span)
            for collection in states
            for span in collection.errors[-1:]
            if span.lower < collection.upper <= span.upper and collection.name not in incompatible
        )
        errored += tuple((self.state(name), span) for name, span in incompatible.items())
        ends = {collection.name: collection.upper for collection in states}
        freezing: list[int] = []
        frozen: set[str] = set()
        for state, span in errored:
            if not leave_behind:
                ends[state.name] = span.lower
                continue
            del ends[state.name]
            if max(frontiers[state.name], state.since) < span.lower:
                freezing.append(span.lower)
            else:
                frozen.add(state.name)
        upper, behind = self._common_upper(ends)
        # One transaction ends exactly at the error time: it stores every change below the error.
        cuts: list[int] = [*freezing, upper] if upper else freezing
        cut = min(cuts, default=0)
        named = tuple((state.name, span) for state, span in errored)
        target = upper if ends else max(freezing, default=0)
        return Readiness(cut, target, behind, named, frozenset(frozen))

    def _common_upper(self, ends: Mapping[str, int]) -> tuple[int, str]:
        """Return the common upper of `ends`, and a description of the collection that limits it."""
        if not ends:
            return 0, ""
        last = min(ends, key=ends.__getitem__)
        upper = ends[last]
        begins = max(self.state(name).since for name in ends)
        if upper and begins >= upper:
            return 0, f'collection "{last}" to reach {begins}'
        ahead = max(ends.values())
        return upper, f'collection "{last}" to continue from {upper}' if ahead > upper else ""

    @contextmanager
    def claim(
        self, sinces: Mapping[str, int], upper: int
    ) -> Iterator[Mapping[str, ClaimedCollection]]:
        """Yield the collections for a transaction up to `upper`, by name.

        Their files from `sinces` on are retained until the block ends.
        """
        with ExitStack() as stack:
            claimed: dict[str, ClaimedCollection] = {}
            for name, since in sinces.items():
                url = self._where[name]
                state = self.state(name, max(upper - 1, 0))
                client, id = self._clients[url], state.id
                since = max(since, state.since)
                claim = stack.enter_context(client.reader.claims.claim(id, name, since))
                unique = f"{client.state.location}/{id}"
                claimed[name] = ClaimedCollection(url, unique, claim.state.collections[id])
            yield claimed

    def hold(self, sinces: Mapping[str, int]) -> None:
        """Move the holds: retain each collection from its time in `sinces` on."""
        for url, hold in self._holds.items():
            hold.move({name: since for name, since in sinces.items() if self._where[name] == url})


class StoppedByError(DefiniteError):
    """A bound collection is in error, and `on_error: stop` applies."""


def stopping_error(materialization: str, ready: Readiness, reached: int) -> StoppedByError | None:
    """Return the error that stops a materialization with `on_error: stop` now, or None."""
    for name, span in ready.errored:
        if span.lower <= reached or not ready.upper:
            stored = span.error
            return StoppedByError(
                f'materialization "{materialization}" has stopped at '
                f'{describe_time(span.lower)}: collection "{name}" is in error: {stored.message}',
                detail=stored.detail,
                hint=f"{stored.hint} The materialization resumes when the error ends. To "
                "continue without this collection, set on_error: leave_behind.".strip(),
            )
    return None
