"""Tests of the checks, by deliveries with known errors."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import scenarios
from tests.chaos.invariants import (
    Delivery,
    Line,
    Violation,
    check_delivery,
    counted_twice,
    monotonic,
    never_back,
    one_tick,
)
from tests.chaos.workload import Bank, Bound, Contents, Doc

CASES = {
    case["id"]: case
    for case in json.loads((Path(__file__).parents[1] / "vectors" / "flow.json").read_text())[
        "cases"
    ]
}
KINDS = ("consistency_invariant", "chaos_scenario")

Lines = list[Line]


def truncated(lines: Lines) -> Lines:
    return [each for each in lines if each.doc.seq == 0]


def with_amount(lines: Lines, id: int, amount: int) -> Lines:
    return [Line(each.doc._replace(amount=amount)) if each.doc.id == id else each for each in lines]


MUTATIONS: dict[str, Callable[[Lines, Lines], tuple[Lines, Lines]]] = {
    "none": lambda standard, delta: (standard, delta),
    "standard[1]=-11; merged_delta inserts [1,1,-3,-8] at index 2": lambda standard, delta: (
        with_amount(standard, 1, -11),
        [*delta[:2], Line(Doc(1, 1, -3, -8)), *delta[2:]],
    ),
    "standard[2]=11; merged_delta += [2,1,3,8]": lambda standard, delta: (
        with_amount(standard, 2, 11),
        [*delta, Line(Doc(2, 1, 3, 8))],
    ),
    "all bindings keep only seq 0": lambda _standard, delta: (truncated(delta), truncated(delta)),
}


@pytest.mark.parametrize(
    "id", [id for id, case in CASES.items() if case["kind"] == "consistency_invariant"]
)
def test_delivery_of_a_vector_has_its_violations(id: str) -> None:
    case = CASES[id]
    fixture = case["input"]["fixture"]
    assert fixture["columns"] == ["id", "seq", "balanceDelta", "oracle.balance"]
    delta = [Line(Doc(*row)) for row in fixture["documents"]]
    standard = [Line(Doc(*row)) for row in fixture["standard"]]
    expected = {line.doc.id: line.doc for line in standard}
    standard, delta = MUTATIONS[case["input"]["mutation"]](standard, delta)
    names = {
        violation.name
        for violation in check_delivery(Delivery("balances", expected, standard, delta))
    }
    assert set(case["expect"]["violations_include"]) <= names
    assert not set(case["expect"]["violations_exclude"]) & names
    if not case["expect"]["violations_include"]:
        assert names == set()


@pytest.mark.parametrize(
    "id", [id for id, case in CASES.items() if case["kind"] == "chaos_scenario"]
)
def test_every_scenario_of_the_vectors_exists_or_does_not_apply(id: str) -> None:
    case = CASES[id]
    assert (case["title"] in scenarios.VECTORS) != (case["input"]["class"] == "documentCounter")


ONE, TWO = Doc(1, 1, 5, 5), Doc(1, 2, 3, 3)
TABLE = (Bound("accounts"), Bound("log"))


def names(violations: Any) -> set[str]:
    return {each.name for each in violations}


@pytest.mark.parametrize(
    ("given", "violations"),
    [
        (Delivery("accounts", {1: TWO}, [Line(TWO)], [Line(ONE), Line(TWO)]), set()),
        (Delivery("accounts", {}, [Line(ONE)]), {"no-ghosts", "conservation"}),
        (Delivery("accounts", {1: TWO}, [Line(ONE)]), {"no-loss", "conservation"}),
        (Delivery("accounts", {}, [], [Line(ONE), Line(ONE, deleted=True)]), set()),
        (Delivery("accounts", {}, [], [Line(ONE)]), {"standard-agrees-with-delta"}),
        (Delivery("accounts", {}, [], [Line(ONE)], deletes=False), set()),
        (
            Delivery("log", {1: ONE}, None, [Line(ONE), Line(ONE)]),
            {"no-duplicates", "conservation"},
        ),
        (Delivery("accounts", {1: ONE}, [Line(ONE._replace(oracle=6))]), {"oracle-agreement"}),
    ],
    ids=["well", "ghost", "old", "gone", "not-gone", "cannot-go", "twice", "untrue"],
)
def test_wrong_delivery_has_its_violation(given: Delivery, violations: set[str]) -> None:
    assert names(check_delivery(given)) == violations


def test_checkpoint_that_decreases_violates_monotonic_checkpoints() -> None:
    assert not names(monotonic([("a", 3), ("b", 1), ("a", 3), ("a", 6)]))
    assert names(monotonic([("a", 3), ("b", 6), ("a", 1)])) == {"monotonic-checkpoints"}


class History(Bank):
    """Two ticks: an account that is changed, and the log of it."""

    def __init__(self) -> None:
        log = {1: Doc(1, 1, 5, 5), 2: Doc(2, 1, -2, -2)}
        self.at = {0: Contents({1: ONE}, {1: log[1]}, {}), 1: Contents({1: TWO}, log, {})}


def states(*of: tuple[int, int]) -> list[dict[str, Lines]]:
    """For each, the accounts as of one frontier and the log as of another."""
    bank = History()
    return [
        {
            "accounts": [Line(each) for each in bank.as_of(one).accounts.values()],
            "log": [Line(each) for each in bank.as_of(other).log.values()],
        }
        for one, other in of
    ]


@pytest.mark.parametrize(
    ("seen", "fails"),
    [
        ([(0, 0), (1, 1), (2, 2)], False),
        ([(0, 0), (2, 2)], False),
        ([(1, 1), (2, 1), (2, 2)], True),
        ([(1, 1), (0, 0), (2, 2)], True),
    ],
    ids=["each", "some", "torn", "back"],
)
def test_bindings_of_different_ticks_violate_one_tick(
    seen: list[tuple[int, int]], fails: bool
) -> None:
    found_violations: list[Violation] = list(one_tick(states(*seen), History(), TABLE, [1, 2]))
    assert names(found_violations) == ({"one-tick"} if fails else set())


def test_sum_that_counts_two_transactions_twice_violates_counted_twice() -> None:
    bank = History()
    bank.at[0] = Contents({}, {}, {1: Doc(1, 1, 5, 5), 2: Doc(2, 1, 5, 5)})
    bank.at[1] = Contents({}, {}, {1: Doc(1, 2, 8, 8), 2: Doc(2, 2, 2, 2)})

    def violations_of(one: int, other: int) -> set[str]:
        lines = [Line(Doc(1, 2, one, 8)), Line(Doc(2, 2, other, 2))]
        return names(counted_twice(lines, bank, [0, 1, 2]))

    assert (
        not violations_of(8, 2)
        | violations_of(11, 2)
        | violations_of(11, -1)
        | violations_of(13, 7)
    )
    assert violations_of(14, 2) == violations_of(9, 2) == violations_of(13, -1) == {"counted-twice"}


def test_older_document_violates_never_back() -> None:
    assert not names(never_back(states((1, 1), (2, 1), (2, 2)), TABLE))
    assert names(never_back(states((2, 2), (1, 2)), TABLE)) == {"never-back"}
    assert names(never_back(states((1, 1), (0, 1), (1, 1)), TABLE)) == {"never-back"}
