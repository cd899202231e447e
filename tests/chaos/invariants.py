"""Checks of the written documents, the contents of the endpoint and the messages.

Each check is a function from values to violations. Deliveries with known errors test the
checks.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from tests.chaos.workload import Bank, Bound, Contents, Doc


class Violation(NamedTuple):
    """Violated invariant, with the place."""

    name: str
    detail: str


class Line(NamedTuple):
    """Document at an endpoint; in delta mode it may be a deletion."""

    doc: Doc
    deleted: bool = False


State = Mapping[str, Sequence[Line]]
"""Contents of an endpoint by resource, in the order of arrival where it is known."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """One collection at one endpoint, in both modes if it is bound in both."""

    what: str
    expected: Mapping[int, Doc]
    """Expected documents by id."""

    standard: Sequence[Line] | None = None
    delta: Sequence[Line] | None = None
    deletes: bool = True
    """True if delta updates include deletions."""


def check_delivery(delivery: Delivery) -> list[Violation]:
    """Return all violations of a complete delivery."""
    return [
        *conservation(delivery),
        *oracle_agreement(delivery),
        *no_loss(delivery),
        *no_duplicates(delivery),
        *no_ghosts(delivery),
        *agreement(delivery),
    ]


def conservation(given: Delivery) -> Iterator[Violation]:
    """Sums are constant."""
    total = sum(doc.amount for doc in given.expected.values())
    for mode, lines in _modes(given):
        if mode == "delta" and given.what == "accounts":
            continue  # Its documents are states, not changes: see `agreement`.
        found = sum(line.doc.amount for line in lines)
        if found != total:
            yield Violation("conservation", f"{given.what}, {mode}: {found} instead of {total}")


def oracle_agreement(given: Delivery) -> Iterator[Violation]:
    """Every document has its expected value."""
    for mode, lines in _modes(given):
        sums: dict[int, int] = {}
        for line in lines:
            doc = line.doc
            sums[doc.id] = sums.get(doc.id, 0) + doc.amount
            summed = mode == "delta" and given.what == "balances"
            found = sums[doc.id] if summed else doc.amount
            if found != doc.oracle:
                yield Violation("oracle-agreement", f"{given.what}, {mode}: {doc}, and not {found}")


def no_loss(given: Delivery) -> Iterator[Violation]:
    """The last version of every document exists."""
    for mode, lines in _modes(given):
        last: dict[int, int] = {}
        for line in lines:
            last[line.doc.id] = max(line.doc.seq, last.get(line.doc.id, 0))
        for id, doc in given.expected.items():
            if last.get(id, -1) < doc.seq:
                yield Violation("no-loss", f"{given.what}, {mode}: {doc} is missing")


def no_duplicates(given: Delivery) -> Iterator[Violation]:
    """No version is stored twice, in any transaction."""
    for mode, lines in _modes(given):
        seen: dict[int, int] = {}
        for line in lines:
            doc = line.doc
            if not line.deleted and doc.seq <= seen.get(doc.id, -1):
                yield Violation(
                    "no-duplicates", f"{given.what}, {mode}: {doc} after {seen[doc.id]}"
                )
            seen[doc.id] = max(doc.seq, seen.get(doc.id, -1))


def no_ghosts(given: Delivery) -> Iterator[Violation]:
    """Deleted documents are absent."""
    for line in given.standard or ():
        if line.doc.id not in given.expected:
            yield Violation("no-ghosts", f"{given.what}: {line.doc} was deleted")


def agreement(given: Delivery) -> Iterator[Violation]:
    """Reduced delta updates equal the standard table."""
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
            yield Violation(
                "standard-agrees-with-delta",
                f"{given.what}: {standard.get(id)} and {folded.get(id)}",
            )


def monotonic(frontiers: Iterable[tuple[str, int]]) -> Iterator[Violation]:
    """The committed frontier of a key range never decreases."""
    last: dict[str, int] = {}
    for key_range, frontier in frontiers:
        if frontier < last.get(key_range, 0):
            yield Violation("monotonic-checkpoints", f"{key_range}: {frontier} after {last}")
        last[key_range] = frontier


def one_tick(
    states: Iterable[State], bank: Bank, bounds: Sequence[Bound], frontiers: Iterable[int]
) -> Iterator[Violation]:
    """All resources are always as of the same tick, which never decreases."""
    moments = {frontier: bank.as_of(frontier) for frontier in sorted({0, *frontiers})}
    last = 0
    for state in states:
        fits = [
            frontier
            for frontier, moment in moments.items()
            if all(_is_as_of(state.get(each.resource, ()), each, moment) for each in bounds)
        ]
        if not fits:
            yield Violation("one-tick", f"{_sizes(state)} is as of no tick of {[*moments]}")
        elif max(fits) < last:
            yield Violation("one-tick", f"{max(fits)} after {last}")
        else:
            last = next(each for each in fits if each >= last)


def counted_twice(
    lines: Sequence[Line], bank: Bank, frontiers: Sequence[int]
) -> Iterator[Violation]:
    """If sums count a transaction twice, it is one interrupted transaction."""
    excess = {line.doc.id: line.doc.amount - line.doc.oracle for line in lines}
    if not any(excess.values()):
        return
    for lower, upper in pairwise(frontiers):
        was, now = bank.as_of(lower).balances, bank.as_of(upper).balances
        increments = {
            id: doc.amount - (was[id].amount if id in was else 0) for id, doc in now.items()
        }
        if all(each in (0, increments.get(id, 0)) for id, each in excess.items()):
            return
    yield Violation("counted-twice", f"{excess} is not the change of one transaction")


def never_back(states: Iterable[State], bounds: Sequence[Bound]) -> Iterator[Violation]:
    """No document is replaced by an older one, and no deleted document returns."""
    seen: dict[tuple[str, int], int] = {}
    deleted_ids: set[tuple[str, int]] = set()
    for state in states:
        for bound in bounds:
            if bound.delta:
                continue
            name = bound.resource
            present = {line.doc.id: line.doc.seq for line in state.get(name, ())}
            for id, seq in present.items():
                if seq < seen.get((name, id), 0) or (name, id) in deleted_ids:
                    yield Violation("never-back", f"{name}: id {id} at {seq} again")
                seen[name, id] = seq
            deleted_ids |= {each for each in seen if each[0] == name and each[1] not in present}


def _modes(given: Delivery) -> Iterator[tuple[str, Sequence[Line]]]:
    if given.standard is not None:
        yield "standard", given.standard
    if given.delta is not None:
        yield "delta", given.delta


def _is_as_of(lines: Sequence[Line], bound: Bound, moment: Contents) -> bool:
    expected = moment.of(bound.what)
    if bound.delta and bound.what == "accounts":
        # Closed accounts stay, and consolidated versions were never stored.
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
