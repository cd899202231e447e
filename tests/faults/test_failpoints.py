"""A `kill -9` and an error at every failpoint.

A child executes a script that hits all of them. After the fault, the location
opens again, contains all acknowledged operations and every other operation
completely or not at all, accepts new work, and has no leftover files.
"""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from penstock import persist
from penstock.durable import open_blob
from penstock.failpoints import Action, Failpoint
from penstock.persist import Settings
from penstock.testing.clocks import ManualClock
from tests.faults.actors import COMMANDS, HASTY, Child
from tests.faults.history import Recorder, Scribe, read_history
from tests.faults.inspect import inspected, litter
from tests.faults.validator import violations

QUICK: dict[str, Any] = {**HASTY, "young_ms": 1, "proof_ms": 0, "lease_ms": 50, "background": False}
"""Settings that make entries old at once, without background work."""

WRITING = ["append", "append words 100", "write", "seal", "all", "allow"] + 3 * [
    "append words 100",
    "compact",
]
READING = ["snapshot", "hold", "snapshot", "drop"]

READERS = {Failpoint.HOLD_PLACED, Failpoint.HOLD_COUNTED}

SOURCES = {
    Failpoint.SLOT_INTENDED,
    Failpoint.SLOT_CREATED,
    Failpoint.COPY_DONE,
    Failpoint.REPLACEMENT_CREATED,
    Failpoint.REPLACEMENT_READ,
    Failpoint.TICK_BEGIN,
    Failpoint.TICK_DONE,
    Failpoint.CONFIRM_DONE,
}
"""Failpoints of a source, hit in tests/ingest."""

MATERIALIZATIONS = {
    Failpoint.APPLY_DONE,
    Failpoint.PLAN_DONE,
    Failpoint.STORE_DONE,
    Failpoint.RESOURCE_DROPPED,
    Failpoint.RECOVERY_DONE,
    Failpoint.ACKNOWLEDGE_DONE,
}
"""Failpoints of a transaction, hit in tests/materialize."""

DROPS = {
    Failpoint.SLOT_DROPPED,
    Failpoint.TARGET_DELETED,
    Failpoint.HOLD_DROPPED,
    Failpoint.DROP_DONE,
}
"""Failpoints of a drop, hit in tests/engine."""

NAMES = {Failpoint.NAMES_TAKEN}
"""Failpoint of a task that takes its names, hit in tests/engine/test_names.py."""

ELSEWHERE = SOURCES | MATERIALIZATIONS | DROPS | NAMES


@pytest.mark.parametrize(
    ("package", "points"),
    [
        ("ingest", SOURCES),
        ("materialize", MATERIALIZATIONS),
        ("engine", DROPS),
        ("engine", NAMES),
    ],
)
def test_failpoint_of_another_package_is_armed_by_a_test_there(
    package: str, points: set[Failpoint]
) -> None:
    modules = [path.read_text() for path in (Path(__file__).parents[1] / package).glob("test_*.py")]
    unarmed = {
        point
        for point in points
        if not any(f"Failpoint.{point.name}" in module or point in module for module in modules)
    }
    assert unarmed == set()


# Entry numbers beyond the opening of the location.
LATER = {Failpoint.LOG_CREATE_BEGIN: 6, Failpoint.LOG_CREATE_DONE: 6}


@pytest.mark.parametrize("action", [Action.KILL, Action.ERROR])
@pytest.mark.parametrize("point", [point for point in Failpoint if point not in ELSEWHERE])
def test_fault_at_failpoint_loses_duplicates_and_leaks_nothing(
    tmp_path: Path, point: Failpoint, action: Action
) -> None:
    url, folder = f"file:{tmp_path / 'data'}", tmp_path / "history"
    folder.mkdir()
    reads = point in READERS
    if reads:
        work(url, folder, "before", ["append", "append words 100"])
    options: dict[str, Any] = {} if reads else {"writer": "a"}
    child = Child(
        "puppet",
        "tripped",
        url,
        folder,
        failpoints=f"{point}={action}@{LATER.get(point, 1)}",
        settings=json.dumps(QUICK).replace(" ", ""),
        **options,
    )
    try:
        answers = [child.receive()]
        for command in READING if reads else [*WRITING, "close"]:
            if not answers[-1]:
                break
            answers.append(child.request(command))
        status = child.wait() if not answers[-1] else child.process.poll()
        if action is Action.KILL:
            assert status == -signal.SIGKILL, answers
    finally:
        child.end()
    work(url, folder, "after", WRITING)
    work(url, folder, "reader", READING, writer=None)
    sweep(url, folder)
    found = violations([*read_history(folder), *inspected(url)])
    assert not found, "\n".join(map(str, found))
    assert not litter(url)
    assert not [*(tmp_path / "data" / "tmp").iterdir()]


@pytest.mark.parametrize("action", [Action.KILL, Action.ERROR])
@pytest.mark.parametrize(
    ("point", "happened"), [(Failpoint.LOG_CREATE_BEGIN, False), (Failpoint.LOG_CREATE_DONE, True)]
)
def test_append_all_with_fault_at_log_create_is_atomic(
    tmp_path: Path, point: Failpoint, happened: bool, action: Action
) -> None:
    url, folder = f"file:{tmp_path / 'data'}", tmp_path / "history"
    folder.mkdir()
    work(url, folder, "before", ["all"])
    # The first entry takes the epoch, the second appends to both collections.
    child = Child("puppet", "w", url, folder, writer="a", failpoints=f"{point}={action}@2")
    try:
        assert child.receive() == "ready"
        assert child.request("all") == ("" if action is Action.KILL else "doubt")
        if action is Action.ERROR:
            assert child.request("append") == "doubt"  # It accepts no more work.
    finally:
        child.end()
    with persist.open(url, hold=False) as client:
        uppers = {client.collection(name).upper for name in ("words", "others")}
    assert uppers == ({10} if happened else {5})
    found = violations([*read_history(folder), *inspected(url)])
    assert not found, "\n".join(map(str, found))


def sweep(url: str, folder: Path) -> None:
    """Expire the lease of a dead reader while the writer observes it, then compact."""
    clock = ManualClock()
    settings = Settings(**QUICK, clock=clock)
    with persist.open(url, writer="a", settings=settings) as client:
        scribe = Scribe(Recorder("sweeper", folder / "sweeper.jsonl"), client)
        for _ in range(3):
            for command in ("append", "compact"):
                assert COMMANDS[command](scribe) == "acknowledged"
            clock.move_ms(QUICK["lease_ms"])


def work(
    url: str, folder: Path, who: str, commands: list[str], *, writer: str | None = "a"
) -> None:
    """Execute all `commands` in this process, and assert that each succeeds."""
    recorder = Recorder(who, folder / f"{who}.jsonl")
    settings = Settings(**QUICK)
    with persist.open(url, writer=writer, settings=settings) as client:
        scribe = Scribe(recorder, client)
        for command in commands:
            name, *words = command.split()
            assert COMMANDS[name](scribe, *words) in ("acknowledged", "read", "held", "dropped")
    open_blob(url).close()
