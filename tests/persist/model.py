"""What a storage location promises, said as plainly as possible.

A location is a dictionary of collections, a collection a list of updates and
a few numbers. There are no batches, entries, epochs or files here: whatever
the real one does with those, it must read like this.
"""

from collections import Counter
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import UsageError
from penstock.persist import END, AlreadyFailed, Appended, UpperMismatch

Row = tuple[Any, ...]


@dataclass
class Version:
    """One version of a row schema: its columns, and what older rows hold in the new ones."""

    since: int
    columns: tuple[str, ...]
    defaults: dict[str, Any] = field(default_factory=dict)


@dataclass
class ModelCollection:
    """All updates ever written, each row as a dictionary by column."""

    versions: list[Version]
    updates: list[tuple[dict[str, Any], int, int]] = field(default_factory=list)
    since: int = 0
    upper: int = 0
    allowed: int = 0
    begins: int = 0
    errors: list[tuple[int, int]] = field(default_factory=list)
    """From which time on, and up to which, it is in error."""

    def in_error(self, as_of: int) -> bool:
        """Whether it cannot be read as of a time because of an error."""
        return any(lower <= as_of < upper for lower, upper in self.errors)

    def lasting(self) -> list[tuple[int, int]]:
        """The errors that a reading as of since or later can meet."""
        return [(lower, upper) for lower, upper in self.errors if upper > self.since]

    def told_from(self, lower: int) -> bool:
        """Whether the changes from `lower` on are still told apart from what was before."""
        return self.since == self.begins or self.since < lower

    def columns_as_of(self, as_of: int) -> tuple[str, ...]:
        """The columns that readers as of a time see."""
        return [v for v in self.versions if v.since <= as_of or v is self.versions[0]][-1].columns

    def filled(self, row: dict[str, Any], columns: tuple[str, ...]) -> Row:
        """The row as it reads with these columns."""
        defaults = {name: value for v in self.versions for name, value in v.defaults.items()}
        return tuple(row.get(name, defaults.get(name)) for name in columns)

    def contents(self, as_of: int) -> Counter[Row]:
        """How often each row is there as of a time."""
        columns = self.columns_as_of(as_of)
        found: Counter[Row] = Counter()
        for row, time, diff in self.updates:
            if time <= as_of:
                found[self.filled(row, columns)] += diff
        return _without_zeros(found)

    def changes(self, lower: int, upper: int, columns: tuple[str, ...]) -> Counter[tuple[Row, int]]:
        """The sum of the updates with times in `[lower, upper)`, by row and time."""
        found: Counter[tuple[Row, int]] = Counter()
        for row, written, diff in self.updates:
            # What was there when it began came with the beginning.
            time = max(written, self.begins)
            if lower <= time < upper:
                found[self.filled(row, columns), time] += diff
        return _without_zeros(found)

    def unsealed(self) -> int:
        """How many updates wait for a seal."""
        return sum(time >= self.upper for _, time, _ in self.updates)


@dataclass
class Ask:
    """What one call asks of one collection; the model of `persist.write.CollectionAppend`."""

    name: str
    updates: list[tuple[dict[str, Any], int, int]] = field(default_factory=list)
    expected: int | None = None
    upper: int | None = None


@dataclass
class Model:
    """A storage location."""

    collections: dict[str, ModelCollection] = field(default_factory=dict)
    made: int = 0
    """How many collections were ever made; each has another number."""

    ids: dict[str, int] = field(default_factory=dict)

    def copy(self) -> "Model":
        return deepcopy(self)

    def create(self, name: str, columns: tuple[str, ...]) -> None:
        if name not in self.collections:
            self.collections[name] = ModelCollection([Version(0, columns)])
            self.made += 1
            self.ids[name] = self.made

    def destroy(self, name: str) -> bool:
        return self.collections.pop(name, None) is not None

    def append(self, asks: list[Ask]) -> "Appended | UpperMismatch | type[UsageError]":
        """All of it, or none of it and why."""
        reached = 0
        if (refused := self.misfit(asks)) is not None:
            return refused
        for ask in asks:
            collection = self.collections[ask.name]
            if ask.upper is not None and ask.upper < collection.upper:
                return UsageError
            if any(time < collection.upper for _, time, _ in ask.updates):
                return UsageError
            reached = collection.upper if ask.upper is None else ask.upper
        for ask in asks:
            collection = self.collections[ask.name]
            collection.updates += ask.updates
            if ask.upper is not None:
                collection.upper = ask.upper
        return Appended(reached)

    def misfit(self, asks: list[Ask]) -> "UpperMismatch | type[UsageError] | None":
        """What is wrong with asks whatever else is said with them."""
        for ask in asks:
            if ask.expected is not None:
                inside = all(ask.expected <= time < (ask.upper or 0) for _, time, _ in ask.updates)
                if not inside or (ask.upper or 0) < ask.expected:
                    return UsageError
        for ask in asks:
            upper = self.collections[ask.name].upper
            if ask.expected is not None and ask.expected != upper:
                return UpperMismatch(ask.name, upper)
        return None

    def tell(
        self, asks: list[Ask], also: list[tuple[str, str, Any]]
    ) -> "Appended | UpperMismatch | type[UsageError]":
        """Append, and say more in the same entry; all of it or none."""
        if (refused := self.misfit(asks)) is not None:
            return refused
        for kind, name, given in also:
            collection = self.collections[name]
            last = collection.errors[-1] if collection.errors else (0, 0)
            if kind == "begin":
                if collection.upper or collection.begins or collection.since > given:
                    return UsageError
                collection.begins = collection.since = given
                collection.allowed = max(collection.allowed, given)
            elif kind == "fail":
                if given < max(collection.upper, last[1]):
                    return UsageError
                collection.errors.append((given, END))
            elif kind == "recover":
                if last[1] != END or given < max(collection.upper, last[0]):
                    return UsageError
                collection.errors[-1:] = [(last[0], given)] if last[0] < given else []
            elif kind == "grow":
                collection.versions.append(given)
        writes = [given for kind, _, given in also if kind == "write"]
        outcome = self.append([*writes, *asks])
        if isinstance(outcome, Appended) and not asks and not writes:
            return Appended(self.collections[also[-1][1]].upper)
        return outcome

    def append_in_turn(self, queue: list[list[Ask]]) -> list[Any]:
        """Calls queued one behind the other: one that fails, fails those behind it."""
        outcomes: list[Any] = []
        failed: set[str] = set()
        for asks in queue:
            names = {ask.name for ask in asks}
            outcome = AlreadyFailed if names & failed else self.append(asks)
            if not isinstance(outcome, Appended):
                failed |= names
            outcomes.append(outcome)
        return outcomes

    def discard(self, names: list[str]) -> None:
        for name in names:
            collection = self.collections[name]
            collection.updates = [u for u in collection.updates if u[1] < collection.upper]

    def allow(self, name: str, since: int) -> None:
        collection = self.collections[name]
        collection.allowed = max(collection.allowed, since)

    def settle(self, held: Mapping[str, int]) -> None:
        """Let every since go as far as it is allowed and nothing holds it."""
        for name, collection in self.collections.items():
            reached = min(collection.allowed, held.get(name, END))
            collection.since = max(collection.since, reached)


def _without_zeros(counter: "Counter[Any]") -> "Counter[Any]":
    return Counter({key: count for key, count in counter.items() if count})
