"""The collections that a materialization reads: how far they are, and that they are kept."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from penstock import persist
from penstock.errors import UsageError
from penstock.materialize.intervals import Bound
from penstock.persist.errors import CollectionMissing
from penstock.persist.lake import storage_locations
from penstock.persist.records import CollectionState, ErrorSpan

__all__ = ["Holding", "Lakeside", "Ready", "owner_of"]


def owner_of(materialization: str) -> str:
    """The owner of the holds of a materialization."""
    return f"materialize-{materialization}"


@dataclass(frozen=True, slots=True)
class Ready:
    """How far a transaction may go."""

    upper: int
    """The next transaction ends here, or before."""

    target: int
    """All transactions together can go this far now: past the times at which bindings freeze."""

    behind: str = ""
    """What keeps it from going further, for people; empty if nothing does."""

    errored: tuple[tuple[str, ErrorSpan], ...] = ()
    """Collections in error, and since when."""

    frozen: frozenset[str] = frozenset()
    """Errored collections that are left behind: their bindings have everything below the error."""


@dataclass(frozen=True, slots=True)
class Holding:
    """A collection as it is while its files are kept."""

    url: str
    id: str
    state: CollectionState

    @property
    def predecessors(self) -> frozenset[str]:
        """Ids of the collections that had its name before."""
        location, _, _ = self.id.rpartition("/")
        return frozenset(f"{location}/{id}" for id in self.state.predecessors)

    def bound(
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
    ) -> Bound:
        """It, as bound to a resource."""
        state = self.state
        return Bound(
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


class Lakeside:
    """The bound collections, each opened once, and one hold for each storage location."""

    def __init__(
        self,
        location: str,
        names: Sequence[str],
        *,
        owner: str,
        stop: threading.Event | None = None,
    ) -> None:
        """Open them; soon after `stop` is set, a store that fails is not asked again.

        Raises:
            CollectionMissing: the lake does not have one of them.
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
                bound = [each for each in names if each in state.names]
                if not bound:
                    # What was bound there once need not be kept any more.
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
        """Let go of the stores; what is held stays held."""
        self._stack.close()

    def state(self, name: str, as_of: int | None = None) -> CollectionState:
        """Return the collection that a name refers to, now or as of a time, as it is now."""
        found = self._clients[self._where[name]].state.named(name, as_of)
        if found is None:
            raise UsageError(
                f'collection "{name}" was dropped while it was being materialized',
                hint="Take it out of the materialization.",
            )
        return found

    def predecessors(self, name: str, as_of: int | None = None) -> frozenset[str]:
        """Return the ids of the collections that had a name before, as in `Reached`."""
        location = self._clients[self._where[name]].state.location
        return frozenset(f"{location}/{id}" for id in self.state(name, as_of).predecessors)

    def ready(
        self,
        frontiers: Mapping[str, int],
        incompatible: Mapping[str, ErrorSpan],
        *,
        leave_behind: bool,
    ) -> Ready:
        """Return how far all collections can be read.

        An errored collection ends at its error time. With `leave_behind` it does not count
        once its bindings have reached that time; `frontiers` says how far they are. Collections
        that are `incompatible` with a resource are left behind likewise. A collection that
        begins later than the others end is waited for.
        """
        states = [self.state(each) for each in self._where]
        errored = tuple(
            (each, span)
            for each in states
            for span in each.errors[-1:]
            if span.lower < each.upper <= span.upper and each.name not in incompatible
        )
        errored += tuple((self.state(name), span) for name, span in incompatible.items())
        ends = {each.name: each.upper for each in states}
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
        # Everything below the error is stored first: a transaction ends exactly there.
        cuts: list[int] = [*freezing, upper] if upper else freezing
        cut = min(cuts, default=0)
        named = tuple((state.name, span) for state, span in errored)
        target = upper if ends else max(freezing, default=0)
        return Ready(cut, target, behind, named, frozenset(frozen))

    def _common_upper(self, ends: Mapping[str, int]) -> tuple[int, str]:
        """Return the time up to which all of `ends` can be read, and the collection waited for."""
        if not ends:
            return 0, ""
        last = min(ends, key=ends.__getitem__)
        upper = ends[last]
        begins = max(self.state(name).since for name in ends)
        if upper and begins >= upper:
            return 0, f'collection "{last}" to reach {begins}'
        ahead = max(ends.values())
        return upper, f'collection "{last}" to go on from {upper}' if ahead > upper else ""

    @contextmanager
    def reading(self, sinces: Mapping[str, int], upper: int) -> Iterator[Mapping[str, Holding]]:
        """Yield the collections for a transaction up to `upper`; their files stay in the block."""
        with ExitStack() as stack:
            found: dict[str, Holding] = {}
            for name, since in sinces.items():
                url = self._where[name]
                state = self.state(name, max(upper - 1, 0))
                client, id = self._clients[url], state.id
                since = max(since, state.since)
                claim = stack.enter_context(client.reader.claims.claim(id, name, since))
                unique = f"{client.state.location}/{id}"
                found[name] = Holding(url, unique, claim.state.collections[id])
            yield found

    def hold(self, sinces: Mapping[str, int]) -> None:
        """Keep these collections from these times on."""
        for url, hold in self._holds.items():
            hold.move({name: since for name, since in sinces.items() if self._where[name] == url})
