"""A short run of the nemesis for both endpoints, and planted violations for its checker."""

import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from penstock.servers.postgres import PostgresServer
from tests.e2e.ledger import History, LedgerTraffic, State
from tests.e2e.observer import Checker, PostgresEndpoint, TableMissing
from tests.e2e.outside import Figures, outside
from tests.e2e.resource_sampler import ALLOWED, FEWEST, Sample, unbounded


@pytest.mark.spark
def test_killed_pipeline_shows_only_source_states_in_both_endpoints(tmp_path: Path) -> None:
    seed = int(os.environ.get("PENSTOCK_TEST_SEED", "1"))
    rng = random.Random(seed)
    with ExitStack() as stack:
        run = outside(stack, tmp_path, rng, Figures("both"), sampled=False)
        try:
            lives: list[Callable[[], None]] = [
                run.kill_starting,
                run.kill_at_failpoint,
                partial(run.kill_following, 1),
            ]
            rng.shuffle(lives)
            for life in lives:
                life()
            run.stop()
            assert run.end() == []
            assert run.violations() == []
        except BaseException as error:
            error.add_note(f"seed {seed}: {'; '.join(run.events)}")
            raise
        for name, observer in run.observers.items():
            assert len(observer.checker.versions) > 3, name


@pytest.fixture(scope="module")
def history_and_states(
    postgres_server: PostgresServer,
) -> Iterator[tuple[History, list[State]]]:
    """Versions 0 to 20 of a source, and the state of each."""
    database = postgres_server.create_database("ledger")
    traffic = LedgerTraffic(database.url(), random.Random(1), rate=1)
    traffic.create()
    endpoint = PostgresEndpoint(database.url())
    states = []
    with traffic._acting() as transact:
        for _ in range(21):
            state = endpoint.read()
            assert state is not None
            states.append(state)
            transact()
    yield traffic.history, states
    database.drop()


def kinds(history: History, *states: State) -> list[str]:
    """Return the kinds of violations in states that were observed in this order."""
    checker = Checker("endpoint", history)
    for state in states:
        checker.check(state)
    return [violation.split(": ")[1] for violation in checker.violations]


EMPTY = State((0, 0, 0, 0), (0,) * 21)


def test_checker_accepts_source_states_in_order(
    history_and_states: tuple[History, list[State]],
) -> None:
    history, states = history_and_states
    assert [state.version for state in states] == [*range(21)]
    assert kinds(history, EMPTY, EMPTY, *states[::4], states[20], states[20]) == []


def test_checker_reports_state_between_two_transactions_as_torn(
    history_and_states: tuple[History, list[State]],
) -> None:
    history, states = history_and_states
    early, late = states[3], states[17]
    # The tables of the bank from one state, the tables of the shop from another.
    cut = 11
    torn = replace(late, checksum=late.checksum[:cut] + early.checksum[cut:])
    assert kinds(history, early, torn) == ["altered"]
    # Only one of two tables of the bank.
    cut = 5
    torn = replace(late, checksum=late.checksum[:cut] + early.checksum[cut:])
    assert kinds(history, early, torn) == ["torn", "altered"]
    # An order without its lines.
    torn = replace(late, books=(1, 0, late.books[2] - 2, late.books[3] - 1))
    assert kinds(history, early, torn) == ["torn"]
    # Rows in some tables before there is a ledger.
    torn = replace(states[0], checksum=(0, 0, *states[0].checksum[2:]))
    assert "torn" in kinds(history, EMPTY, torn)


def test_checker_reports_older_state_as_reversed(
    history_and_states: tuple[History, list[State]],
) -> None:
    history, states = history_and_states
    assert kinds(history, states[4], states[9], states[8], states[9]) == ["reversed"]
    assert kinds(history, states[4], EMPTY) == ["emptied"]


def test_checker_reports_uncommitted_version_as_invented(
    history_and_states: tuple[History, list[State]],
) -> None:
    history, states = history_and_states
    later = replace(states[20], checksum=(1, 4_711, *states[20].checksum[2:]))
    assert kinds(history, states[20], later) == ["invented"]


def test_checker_reports_transfer_applied_twice_as_altered(
    history_and_states: tuple[History, list[State]],
) -> None:
    history, states = history_and_states
    amounts = list(states[9].checksum)
    # From account 3 to account 4: no sum of money changes.
    amounts[2], amounts[4] = amounts[2] - 50, amounts[4] - 3 * 50
    amounts[5], amounts[7] = amounts[5] + 50, amounts[7] + 4 * 50
    doubled = replace(states[9], checksum=tuple(amounts))
    assert doubled.torn() == ""
    assert kinds(history, states[8], doubled) == ["altered"]


def test_checker_reports_dropped_table_as_missing(
    history_and_states: tuple[History, list[State]],
) -> None:
    history, states = history_and_states
    checker = Checker("endpoint", history)
    checker.check_missing(TableMissing("orders"))
    checker.check(states[0])
    assert checker.violations == []
    checker.check_missing(TableMissing("orders"))
    assert checker.violations == ["endpoint: missing: orders after version 0"]


def samples(**growth: float) -> list[Sample]:
    return [
        Sample(
            number,
            {
                name: int(limit * (1 + growth.get(name, 0) * number))
                for name, limit in ALLOWED.items()
            },
            following=True,
        )
        for number in range(4 * FEWEST)
    ]


def test_unbounded_growth_is_reported() -> None:
    assert unbounded(samples()) == []
    for name in ALLOWED:
        (found,) = unbounded(samples(**{name: 0.1}))
        assert found.startswith(f"{name} grew from ")
