"""The checks, checked: deliveries that are wrong in a known way, as the vectors have them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import scenarios
from tests.chaos.invariants import (
    Broken,
    Delivery,
    Line,
    counted_twice,
    judged,
    monotonic,
    never_back,
    one_tick,
)
from tests.chaos.workload import Bank, Bound, Doc, Moment

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
def test_a_delivery_is_judged_as_its_vector_says(id: str) -> None:
    case = CASES[id]
    fixture = case["input"]["fixture"]
    assert fixture["columns"] == ["id", "seq", "balanceDelta", "oracle.balance"]
    delta = [Line(Doc(*row)) for row in fixture["documents"]]
    standard = [Line(Doc(*row)) for row in fixture["standard"]]
    expected = {line.doc.id: line.doc for line in standard}
    standard, delta = MUTATIONS[case["input"]["mutation"]](standard, delta)
    found = {each.name for each in judged(Delivery("balances", expected, standard, delta))}
    assert set(case["expect"]["violations_include"]) <= found
    assert not set(case["expect"]["violations_exclude"]) & found
    if not case["expect"]["violations_include"]:
        assert found == set()


@pytest.mark.parametrize(
    "id", [id for id, case in CASES.items() if case["kind"] == "chaos_scenario"]
)
def test_every_scenario_of_the_vectors_is_there_or_has_nothing_to_run_on(id: str) -> None:
    case = CASES[id]
    assert (case["title"] in scenarios.VECTORS) != (case["input"]["class"] == "documentCounter")


ONE, TWO = Doc(1, 1, 5, 5), Doc(1, 2, 3, 3)
TABLE = (Bound("accounts"), Bound("log"))


def names(broken: Any) -> set[str]:
    return {each.name for each in broken}


@pytest.mark.parametrize(
    ("given", "broken"),
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
def test_what_is_wrong_has_its_name(given: Delivery, broken: set[str]) -> None:
    assert names(judged(given)) == broken


def test_checkpoints_rise_by_range() -> None:
    assert not names(monotonic([("a", 3), ("b", 1), ("a", 3), ("a", 6)]))
    assert names(monotonic([("a", 3), ("b", 6), ("a", 1)])) == {"monotonic-checkpoints"}


class History(Bank):
    """Two ticks: an account that is changed, and the log of it."""

    def __init__(self) -> None:
        log = {1: Doc(1, 1, 5, 5), 2: Doc(2, 1, -2, -2)}
        self.at = {0: Moment({1: ONE}, {1: log[1]}, {}), 1: Moment({1: TWO}, log, {})}


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
def test_all_bindings_are_of_one_tick_which_rises(seen: list[tuple[int, int]], fails: bool) -> None:
    found: list[Broken] = list(one_tick(states(*seen), History(), TABLE, [1, 2]))
    assert names(found) == ({"one-tick"} if fails else set())


def test_a_sum_counts_one_transaction_twice_at_most() -> None:
    bank = History()
    bank.at[0] = Moment({}, {}, {1: Doc(1, 1, 5, 5), 2: Doc(2, 1, 5, 5)})
    bank.at[1] = Moment({}, {}, {1: Doc(1, 2, 8, 8), 2: Doc(2, 2, 2, 2)})

    def found(one: int, other: int) -> set[str]:
        lines = [Line(Doc(1, 2, one, 8)), Line(Doc(2, 2, other, 2))]
        return names(counted_twice(lines, bank, [0, 1, 2]))

    assert not found(8, 2) | found(11, 2) | found(11, -1) | found(13, 7)
    assert found(14, 2) == found(9, 2) == found(13, -1) == {"counted-twice"}


def test_a_document_never_goes_back() -> None:
    assert not names(never_back(states((1, 1), (2, 1), (2, 2)), TABLE))
    assert names(never_back(states((2, 2), (1, 2)), TABLE)) == {"never-back"}
    assert names(never_back(states((1, 1), (0, 1), (1, 1)), TABLE)) == {"never-back"}
