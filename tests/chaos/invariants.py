"""What must hold of what was written, what is at the endpoint, and what went over the wire.

Each check is a function from values to the names of what is broken, so it is itself tested,
by deliveries that are wrong in a known way.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from tests.chaos.workload import Bank, Bound, Doc, Moment


class Broken(NamedTuple):
    """An invariant that does not hold, and where."""

    name: str
    detail: str


class Line(NamedTuple):
    """A document at an endpoint; in delta mode it may say that one is gone."""

    doc: Doc
    deleted: bool = False


State = Mapping[str, Sequence[Line]]
"""What an endpoint holds, by resource; in the order in which it came, where that is known."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """One collection at one endpoint, in both modes if it is bound in both."""

    what: str
    expected: Mapping[int, Doc]
    """By id, what must be there."""

    standard: Sequence[Line] | None = None
    delta: Sequence[Line] | None = None
    deletes: bool = True
    """Whether delta updates say what is gone."""


def judged(delivery: Delivery) -> list[Broken]:
    """All that is wrong with a delivery, once everything has come to rest."""
    return [
        *conservation(delivery),
        *oracle_agreement(delivery),
        *no_loss(delivery),
        *no_duplicates(delivery),
        *no_ghosts(delivery),
        *agreement(delivery),
    ]


def conservation(given: Delivery) -> Iterator[Broken]:
    """Nothing is made and nothing vanishes: sums are what they were."""
    total = sum(doc.amount for doc in given.expected.values())
    for mode, lines in _modes(given):
        if mode == "delta" and given.what == "accounts":
            continue  # Its documents are states, not changes: see `agreement`.
        found = sum(line.doc.amount for line in lines)
        if found != total:
            yield Broken("conservation", f"{given.what}, {mode}: {found} instead of {total}")


def oracle_agreement(given: Delivery) -> Iterator[Broken]:
    """Every document has come to what it says it must come to."""
    for mode, lines in _modes(given):
        sums: dict[int, int] = {}
        for line in lines:
            doc = line.doc
            sums[doc.id] = sums.get(doc.id, 0) + doc.amount
            summed = mode == "delta" and given.what == "balances"
            found = sums[doc.id] if summed else doc.amount
            if found != doc.oracle:
                yield Broken("oracle-agreement", f"{given.what}, {mode}: {doc}, and not {found}")


def no_loss(given: Delivery) -> Iterator[Broken]:
    """The last version of every document is there."""
    for mode, lines in _modes(given):
        last: dict[int, int] = {}
        for line in lines:
            last[line.doc.id] = max(line.doc.seq, last.get(line.doc.id, 0))
        for id, doc in given.expected.items():
            if last.get(id, -1) < doc.seq:
                yield Broken("no-loss", f"{given.what}, {mode}: {doc} is not there")


def no_duplicates(given: Delivery) -> Iterator[Broken]:
    """No version comes twice, in whatever transaction."""
    for mode, lines in _modes(given):
        seen: dict[int, int] = {}
        for line in lines:
            doc = line.doc
            if not line.deleted and doc.seq <= seen.get(doc.id, -1):
                yield Broken("no-duplicates", f"{given.what}, {mode}: {doc} after {seen[doc.id]}")
            seen[doc.id] = max(doc.seq, seen.get(doc.id, -1))


def no_ghosts(given: Delivery) -> Iterator[Broken]:
    """What is gone is gone."""
    for line in given.standard or ():
        if line.doc.id not in given.expected:
            yield Broken("no-ghosts", f"{given.what}: {line.doc} was deleted")


def agreement(given: Delivery) -> Iterator[Broken]:
    """Delta updates, folded, are the standard table."""
    if given.standard is None or given.delta is None:
        return
    folded: dict[int, Doc] = {}
    for doc, deleted in given.delta:
        before = folded.get(doc.id)
        if deleted:
            folded.pop(doc.id, None)
        elif given.what == "balances" and before is not None:
            folded[doc.id] = Doc(doc.id, doc.seq, before.amount + doc.amount, doc.oracle)
        else:
            folded[doc.id] = doc
    standard = {line.doc.id: line.doc for line in given.standard}
    if not given.deletes:
        folded = {id: doc for id, doc in folded.items() if id in standard}
    for id in sorted(standard.keys() | folded.keys()):
        if standard.get(id) != folded.get(id):
            yield Broken(
                "standard-agrees-with-delta",
                f"{given.what}: {standard.get(id)} and {folded.get(id)}",
            )


def monotonic(frontiers: Iterable[tuple[str, int]]) -> Iterator[Broken]:
    """The checkpoints that a range of keys commits never go back."""
    last: dict[str, int] = {}
    for key_range, frontier in frontiers:
        if frontier < last.get(key_range, 0):
            yield Broken("monotonic-checkpoints", f"{key_range}: {frontier} after {last}")
        last[key_range] = frontier


def one_tick(
    states: Iterable[State], bank: Bank, bounds: Sequence[Bound], frontiers: Iterable[int]
) -> Iterator[Broken]:
    """At every moment all resources are as of the same tick, and that never goes back."""
    moments = {frontier: bank.as_of(frontier) for frontier in sorted({0, *frontiers})}
    last = 0
    for state in states:
        fits = [
            frontier
            for frontier, moment in moments.items()
            if all(_is_as_of(state.get(each.resource, ()), each, moment) for each in bounds)
        ]
        if not fits:
            yield Broken("one-tick", f"{_sizes(state)} is as of no tick of {[*moments]}")
        elif max(fits) < last:
            yield Broken("one-tick", f"{max(fits)} after {last}")
        else:
            last = next(each for each in fits if each >= last)


def counted_twice(lines: Sequence[Line], bank: Bank, frontiers: Sequence[int]) -> Iterator[Broken]:
    """Where sums may count a transaction twice, it is one that was broken off, and no more."""
    over = {line.doc.id: line.doc.amount - line.doc.oracle for line in lines}
    if not any(over.values()):
        return
    for lower, upper in pairwise(frontiers):
        was, now = bank.as_of(lower).balances, bank.as_of(upper).balances
        came = {id: doc.amount - (was[id].amount if id in was else 0) for id, doc in now.items()}
        if all(each in (0, came.get(id, 0)) for id, each in over.items()):
            return
    yield Broken("counted-twice", f"{over} is not what one transaction brought")


def never_back(states: Iterable[State], bounds: Sequence[Bound]) -> Iterator[Broken]:
    """No document is ever replaced by an older one, and none comes back that was deleted."""
    seen: dict[tuple[str, int], int] = {}
    gone: set[tuple[str, int]] = set()
    for state in states:
        for bound in bounds:
            if bound.delta:
                continue
            name = bound.resource
            here = {line.doc.id: line.doc.seq for line in state.get(name, ())}
            for id, seq in here.items():
                if seq < seen.get((name, id), 0) or (name, id) in gone:
                    yield Broken("never-back", f"{name}: id {id} at {seq} again")
                seen[name, id] = seq
            gone |= {each for each in seen if each[0] == name and each[1] not in here}


def _modes(given: Delivery) -> Iterator[tuple[str, Sequence[Line]]]:
    if given.standard is not None:
        yield "standard", given.standard
    if given.delta is not None:
        yield "delta", given.delta


def _is_as_of(lines: Sequence[Line], bound: Bound, moment: Moment) -> bool:
    expected = moment.of(bound.what)
    if bound.delta and bound.what == "accounts":
        # Closed accounts stay, and versions that were netted never came.
        last = {line.doc.id: line.doc for line in lines if not line.deleted}
        return all(last.get(id) == doc for id, doc in expected.items())
    if bound.delta and bound.what == "balances":
        sums: dict[int, int] = {}
        for line in lines:
            sums[line.doc.id] = sums.get(line.doc.id, 0) + line.doc.amount
        return sums == {id: doc.amount for id, doc in expected.items()}
    found = {line.doc.id: line.doc for line in lines}
    return found == expected and len(found) == len(lines)


def _sizes(state: State) -> str:
    return ", ".join(f"{name}: {len(lines)}" for name, lines in state.items())
