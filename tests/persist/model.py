"""Reference model of a storage location.

A location is a dictionary of collections; a collection is a list of updates and
a few numbers. The model has no batches, entries, epochs or files. Reads of a
real location must equal reads of the model.
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
    """Intervals `[lower, upper)` of times in error."""

    def in_error(self, as_of: int) -> bool:
        """Return whether an error prevents a read as of a time."""
        return any(lower <= as_of < upper for lower, upper in self.errors)

    def lasting(self) -> list[tuple[int, int]]:
        """The errors that a reading as of since or later can meet."""
        return [(lower, upper) for lower, upper in self.errors if upper > self.since]

    def distinguishes_from(self, lower: int) -> bool:
        """Return whether changes from `lower` on are still distinct from older ones."""
        return self.since == self.begins or self.since < lower

    def columns_as_of(self, as_of: int) -> tuple[str, ...]:
        """The columns that readers as of a time see."""
        return [v for v in self.versions if v.since <= as_of or v is self.versions[0]][-1].columns

    def filled(self, row: dict[str, Any], columns: tuple[str, ...]) -> Row:
        """The row as it reads with these columns."""
        defaults = {name: value for v in self.versions for name, value in v.defaults.items()}
        return tuple(row.get(name, defaults.get(name)) for name in columns)

    def contents(self, as_of: int) -> Counter[Row]:
        """Return the multiplicity of each row as of a time."""
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
            # Rows that existed before the beginning appear at the beginning.
            time = max(written, self.begins)
            if lower <= time < upper:
                found[self.filled(row, columns), time] += diff
        return _without_zeros(found)

    def unsealed(self) -> int:
        """Return the number of updates that are not sealed."""
        return sum(time >= self.upper for _, time, _ in self.updates)


@dataclass
class Request:
    """Request of one call to one collection; the model of `CollectionAppend`."""

    name: str
    updates: list[tuple[dict[str, Any], int, int]] = field(default_factory=list)
    expected: int | None = None
    upper: int | None = None


@dataclass
class Model:
    """A storage location."""

    collections: dict[str, ModelCollection] = field(default_factory=dict)
    made: int = 0
    """Number of collections ever created; each has another id."""

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

    def append(self, requests: list[Request]) -> "Appended | UpperMismatch | type[UsageError]":
        """All of it, or none of it and why."""
        reached = 0
        if (refused := self.mismatch(requests)) is not None:
            return refused
        for request in requests:
            collection = self.collections[request.name]
            if request.upper is not None and request.upper < collection.upper:
                return UsageError
            if any(time < collection.upper for _, time, _ in request.updates):
                return UsageError
            reached = collection.upper if request.upper is None else request.upper
        for request in requests:
            collection = self.collections[request.name]
            collection.updates += request.updates
            if request.upper is not None:
                collection.upper = request.upper
        return Appended(reached)

    def mismatch(self, requests: list[Request]) -> "UpperMismatch | type[UsageError] | None":
        """Return the error of requests, independent of others in the same call."""
        for request in requests:
            if request.expected is not None:
                inside = all(
                    request.expected <= time < (request.upper or 0)
                    for _, time, _ in request.updates
                )
                if not inside or (request.upper or 0) < request.expected:
                    return UsageError
        for request in requests:
            upper = self.collections[request.name].upper
            if request.expected is not None and request.expected != upper:
                return UpperMismatch(request.name, upper)
        return None

    def append_with_changes(
        self, requests: list[Request], changes: list[tuple[str, str, Any]]
    ) -> "Appended | UpperMismatch | type[UsageError]":
        """Append, and say more in the same entry; all of it or none."""
        if (refused := self.mismatch(requests)) is not None:
            return refused
        for kind, name, given in changes:
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
        writes = [given for kind, _, given in changes if kind == "write"]
        outcome = self.append([*writes, *requests])
        if isinstance(outcome, Appended) and not requests and not writes:
            return Appended(self.collections[changes[-1][1]].upper)
        return outcome

    def append_in_turn(self, queue: list[list[Request]]) -> list[Any]:
        """Make queued calls in order: a failed call fails the calls after it."""
        outcomes: list[Any] = []
        failed: set[str] = set()
        for requests in queue:
            names = {request.name for request in requests}
            outcome = AlreadyFailed if names & failed else self.append(requests)
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
        """Advance every since as far as allowances and holds permit."""
        for name, collection in self.collections.items():
            reached = min(collection.allowed, held.get(name, END))
            collection.since = max(collection.since, reached)


def _without_zeros(counter: "Counter[Any]") -> "Counter[Any]":
    return Counter({key: count for key, count in counter.items() if count})
