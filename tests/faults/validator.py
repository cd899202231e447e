"""Checker of histories. Pure: events in, violations out.

It does not know logs, files or epochs. It knows the requests, the answers and
the observations; each member of `Invariant` must hold between them. Every share
of an operation carries a marker that is never retracted. Each read therefore
shows which operations it contains, and all its rows can be computed and compared.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

Event = dict[str, Any]


class Invariant(Enum):
    """Invariants by their numbers in the table of hazards; 0 is definiteness."""

    DEFINITE = 0
    ACKNOWLEDGED = 1
    LINKED = 2
    ONE_OUTCOME = 3
    STALE_EPOCH = 4
    READABLE = 5
    LISTENER = 6
    HELD = 7
    POWER_CUT = 8
    FENCED = 28


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken invariant."""

    invariant: Invariant
    what: str

    def __str__(self) -> str:
        return f"{self.invariant.value} {self.invariant.name.lower()}: {self.what}"


@dataclass(slots=True)
class _Op:
    name: str
    who: str
    at: int
    kind: str
    rows: dict[int, list[tuple[str, int, int]]]
    uppers: dict[int, int]
    destroys: int | None
    outcome: str = "none"
    answered_at: int = 0
    seen_in: dict[int, str] = field(default_factory=dict)
    """One read that contains the operation, by collection."""

    seen_out: dict[int, str] = field(default_factory=dict)
    """One read that should contain the operation and does not, by collection."""

    def begins(self, id: int) -> int:
        return min(time for _, time, _ in self.rows[id])


def violations(history: Sequence[Event]) -> list[Violation]:
    """Return every violation in `history`."""
    check = _Check(history)
    check.readings()
    check.listeners()
    check.finals()
    check.operations()
    check.monotonic()
    check.holds()
    check.fencing()
    return check.found


class _Check:
    def __init__(self, history: Sequence[Event]) -> None:
        self.found: list[Violation] = []
        self.history = history
        self.by_kind: defaultdict[str, list[Event]] = defaultdict(list)
        for event in history:
            self.by_kind[event["event"]].append(event)
        self.ops: dict[str, _Op] = {}
        for event in self.by_kind["intent"]:
            self.ops[event["op"]] = _Op(
                name=event["op"],
                who=event["who"],
                at=event["at"],
                kind=event["kind"],
                rows={
                    int(id): [(d, t, n) for d, t, n in rows]
                    for id, rows in event.get("rows", {}).items()
                },
                uppers={int(id): upper for id, upper in event.get("uppers", {}).items()},
                destroys=event.get("destroys"),
            )
        for event in self.by_kind["outcome"]:
            op = self.ops[event["op"]]
            if op.outcome != "none":
                self._broken(Invariant.ONE_OUTCOME, f"{op.name} has two outcomes")
            op.outcome, op.answered_at = event["outcome"], event["at"]
        self.in_collection: defaultdict[int, list[_Op]] = defaultdict(list)
        for op in self.ops.values():
            for id in op.rows:
                self.in_collection[id].append(op)
        self.final: dict[int, Event] | None = None
        if self.by_kind["final"]:
            last = self.by_kind["final"][-1]
            self.final = {each["id"]: each for each in last["collections"]}
        self.cut = bool(self.by_kind["power_cut"])

    def readings(self) -> None:
        """Check that each snapshot is the sum of its operations, and equal for all readers."""
        first: dict[tuple[int, int], Event] = {}
        for event in self.by_kind["snapshot"]:
            id, as_of = event["id"], event["as_of"]
            before = first.setdefault((id, as_of), event)
            if before["contents"] != event["contents"]:
                self._broken(
                    Invariant.DEFINITE,
                    f"collection {id} as of {as_of} was read differently by "
                    f"{before['who']} and {event['who']}: "
                    f"{_difference(before['contents'], event['contents'])}",
                )
            self._reading(
                f"snapshot of {id} as of {as_of} by {event['who']}",
                id,
                Counter(event["contents"]),
                beyond=as_of + 1,
            )
        for event in self.by_kind["damaged"]:
            unreadable = event["key"].startswith(("log/", "rollup/"))
            self._broken(
                Invariant.READABLE if unreadable else Invariant.LINKED,
                f"{event['who']} met {event['error']}",
            )

    def listeners(self) -> None:
        """Check that listeners receive everything once, in order, without gaps, to the end."""
        begun = {event["listener"]: event for event in self.by_kind["listen"]}
        frontier = {name: event["as_of"] + 1 for name, event in begun.items()}
        given: dict[str, Counter[tuple[str, int]]] = {name: Counter() for name in begun}
        for event in self.by_kind["changes"]:
            name = event["listener"]
            what = f"listener {name}"
            if event["lower"] != frontier[name]:
                self._broken(
                    Invariant.LISTENER, f"{what} jumped from {frontier[name]} to {event['lower']}"
                )
            frontier[name] = event["upper"]
            for datum, time, diff in event["rows"]:
                if not event["lower"] <= time < event["upper"]:
                    self._broken(Invariant.LISTENER, f"{what} was given {datum} at {time} too late")
                if given[name][datum, time]:
                    self._broken(Invariant.LISTENER, f"{what} was given {datum} at {time} twice")
                given[name][datum, time] += diff
        for name, rows in given.items():
            id, lower, upper = begun[name]["id"], begun[name]["as_of"] + 1, frontier[name]
            self._given(name, id, rows, lower, upper)
        for event in self.by_kind["ended"]:
            if event["frontier"] < event["expected"]:
                self._broken(
                    Invariant.LISTENER,
                    f"listener {event['listener']} stands still at {event['frontier']}, though "
                    f"the collection has come to {event['expected']}",
                )

    def finals(self) -> None:
        """Check the state that a new process finds at the end."""
        for event in self.by_kind["final"]:
            for key, reason in event["damage"]:
                unreadable = key.startswith(("log/", "rollup/"))
                self._broken(
                    Invariant.READABLE if unreadable else Invariant.LINKED,
                    f"object {key} is damaged: {reason}",
                )
        for id, found in (self.final or {}).items():
            rows: Counter[Any] = Counter(found["contents"])
            for datum, _, diff in found["unsealed"]:
                rows[datum] += diff
            self._reading(f"collection {id} at the end", id, rows, beyond=None)

    def operations(self) -> None:
        """Check that each operation has one outcome, which agrees with the reads."""
        destroyed = {op.destroys for op in self.ops.values() if op.destroys is not None}
        for op in self.ops.values():
            for id in op.rows:
                if id in op.seen_in and id in op.seen_out:
                    lost = Invariant.POWER_CUT if self.cut else Invariant.DEFINITE
                    self._broken(
                        lost, f"{op.name} is in {op.seen_in[id]} and not in {op.seen_out[id]}"
                    )
            seen_in, seen_out = op.seen_in, op.seen_out
            if op.outcome == "acknowledged" and seen_out:
                self._broken(
                    Invariant.ACKNOWLEDGED,
                    f"{op.name} was acknowledged and is not in {next(iter(seen_out.values()))}",
                )
            elif op.outcome == "fenced" and seen_in:
                self._broken(
                    Invariant.STALE_EPOCH,
                    f"{op.name} was fenced and is in {next(iter(seen_in.values()))}",
                )
            elif op.outcome == "refused" and seen_in:
                self._broken(
                    Invariant.ONE_OUTCOME,
                    f"{op.name} was refused and is in {next(iter(seen_in.values()))}",
                )
            elif set(seen_in) - set(seen_out) and set(seen_out) - set(seen_in):
                self._broken(Invariant.ONE_OUTCOME, f"{op.name} happened only in part")
            if op.outcome == "acknowledged" and self.final is not None:
                for id in {*op.rows, *op.uppers} - set(self.final) - destroyed:
                    self._broken(Invariant.ACKNOWLEDGED, f"collection {id} of {op.name} is gone")

    def monotonic(self) -> None:
        """Check that since and upper only advance, and that no read is ahead of durable data."""
        last: dict[tuple[str, int], tuple[int, int]] = {}
        most: dict[int, tuple[int, str]] = {}
        for event in self.history:
            match event["event"]:
                case "seen":
                    key = event["who"], event["id"]
                    since, upper = last.get(key, (0, 0))
                    if event["since"] < since or event["upper"] < upper:
                        self._broken(
                            Invariant.DEFINITE,
                            f"{event['who']} saw collection {event['id']} go back from "
                            f"[{since}, {upper}) to [{event['since']}, {event['upper']})",
                        )
                    last[key] = event["since"], event["upper"]
                    reached, id, who = event["upper"], event["id"], event["who"]
                case "changes":
                    reached, id, who = event["upper"], event["id"], event["listener"]
                case "snapshot":
                    reached, id, who = event["as_of"] + 1, event["id"], event["who"]
                case _:
                    continue
            if reached > most.get(id, (0, ""))[0]:
                most[id] = reached, who
        for op in self.ops.values():
            if op.outcome == "acknowledged":
                for id, upper in op.uppers.items():
                    if upper > most.get(id, (0, ""))[0]:
                        most[id] = upper, op.name
        for id, found in (self.final or {}).items():
            reached, who = most.get(id, (0, ""))
            if reached > found["upper"]:
                self._broken(
                    Invariant.POWER_CUT if self.cut else Invariant.ACKNOWLEDGED,
                    f"{who} saw collection {id} complete up to {reached}, and it ends at "
                    f"{found['upper']}",
                )

    def holds(self) -> None:
        """Check that since stays at or below every hold, and that held times are readable."""
        held: dict[tuple[str, int], int] = {}
        for event in self.history:
            match event["event"]:
                case "held":
                    held[event["holder"], event["id"]] = event["since"]
                case "unheld":
                    held.pop((event["holder"], event["id"]), None)
                case "seen":
                    self._since(held, event["id"], event["since"])
                case "final":
                    for each in event["collections"]:
                        self._since(held, each["id"], each["since"])
                case "denied" if event["held"] and _breaks_hold(event["error"]):
                    self._broken(
                        Invariant.HELD,
                        f"{event['who']} holds collection {event['id']} and could not read it as "
                        f"of {event['as_of']}: {event['error']}",
                    )
                case _:
                    pass

    def fencing(self) -> None:
        """Check that a fenced process stays fenced, and that one of two writers progresses."""
        fenced: dict[str, int] = {}
        for event in self.by_kind["fenced"]:
            fenced.setdefault(event["who"], event["at"])
        for op in self.ops.values():
            if op.outcome == "acknowledged" and op.at > fenced.get(op.who, op.at):
                self._broken(Invariant.FENCED, f"{op.name} was acknowledged after a fence")
        for event in self.by_kind["opened"]:
            if event["epoch"] is not None and event["at"] > fenced.get(event["who"], event["at"]):
                self._broken(Invariant.FENCED, f"{event['who']} took the lock back")
        for event in self.by_kind["exit"]:
            if event["of"] in fenced and event["status"] == 0:
                self._broken(Invariant.FENCED, f"{event['of']} was fenced and ended well")
        for event in self.by_kind["contest"]:
            if not any(
                op.outcome == "acknowledged" and event["begin"] < op.answered_at < event["end"]
                for op in self.ops.values()
            ):
                self._broken(Invariant.FENCED, "two writers met and neither made progress")

    def _reading(self, what: str, id: int, rows: "Counter[str]", *, beyond: int | None) -> None:
        expected: Counter[str] = Counter()
        for op in self.in_collection[id]:
            if beyond is not None and op.begins(id) >= beyond:
                continue
            count = rows.get(op.name, 0)
            if count not in (0, 1):
                self._broken(Invariant.ONE_OUTCOME, f"{op.name} is {count} times in {what}")
            if not count:
                op.seen_out.setdefault(id, what)
                continue
            op.seen_in.setdefault(id, what)
            for datum, time, diff in op.rows[id]:
                if beyond is None or time < beyond:
                    expected[datum] += diff * (1 if datum != op.name else count)
        expected = Counter({datum: n for datum, n in expected.items() if n})
        actual = Counter({datum: n for datum, n in rows.items() if n})
        if expected != actual:
            self._broken(
                Invariant.DEFINITE,
                f"{what} is not the sum of its operations: {_difference(expected, actual)}",
            )

    def _given(
        self, name: str, id: int, rows: "Counter[tuple[str, int]]", lower: int, upper: int
    ) -> None:
        what = f"what listener {name} was given"
        expected: Counter[tuple[str, int]] = Counter()
        for op in self.in_collection[id]:
            within = [row for row in op.rows[id] if lower <= row[1] < upper and row[2] > 0]
            if not within:
                continue
            if not rows.get(within[0][:2], 0):
                op.seen_out.setdefault(id, what)
                continue
            op.seen_in.setdefault(id, what)
            for datum, time, diff in op.rows[id]:
                if lower <= time < upper:
                    expected[datum, time] += diff
        nonzero = {key: n for key, n in expected.items() if n}
        actual = {key: n for key, n in rows.items() if n}
        if nonzero != actual:
            self._broken(
                Invariant.LISTENER,
                f"{what} is not the sum of its operations: {_difference(nonzero, actual)}",
            )

    def _since(self, held: dict[tuple[str, int], int], id: int, since: int) -> None:
        for (holder, held_id), at in held.items():
            if held_id == id and since > at:
                self._broken(
                    Invariant.HELD,
                    f"since of collection {id} is {since}, though {holder} holds it at {at}",
                )

    def _broken(self, invariant: Invariant, what: str) -> None:
        self.found.append(Violation(invariant, what))


def _breaks_hold(error: str) -> bool:
    """Return whether the error violates a hold. A since that is just moving does not."""
    return error.startswith("SinceError") or "was compacted" in error


def _difference(expected: Any, actual: Any) -> str:
    keys = [key for key in {**expected, **actual} if expected.get(key) != actual.get(key)]
    lines = [f"{key} {expected.get(key, 0)} → {actual.get(key, 0)}" for key in sorted(keys)[:4]]
    return ", ".join(lines) + (f" and {len(keys) - 4} more" if len(keys) > 4 else "")
