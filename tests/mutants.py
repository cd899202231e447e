"""Mutation testing of the modules where a defect loses or duplicates data.

    python -m tests.mutants [--module NAME] [--sample N] [--minutes N] [--seed N] [--jobs N]

mutmut changes one operator, constant, argument or statement at a time. Here the tests
that call the changed function run on each mutant. If none of them fails, the mutant
survives: a test is missing, or the change has no observable effect.

The mutated sources are in `build/mutants/NAME/src`. For each entry of `MODULES` one process
collects its tests and forks: first a child that records which test calls which function,
then one child for each mutant. So a mutant costs a fork and the tests that reach it,
cheapest first. The tests run in one process and start no JVM; all share one Postgres.

Of each module a random sample of mutants is run, which depends only on the source and
the seed; `--sample 0` runs all. With `--minutes` no further mutant of a module is started
after that time; the sample is in random order, so its beginning is a sample too.
`build/mutants/NAME.diff` holds the survivors.

A module that fails does not end the run. A test that fails without a mutation is left out
and named. Each mutant has a process group, which is ended with it, a time limit and a
memory limit, because a mutant may loop. The exit status is 1 if a module or a test failed.

mutmut changes neither decorated functions (properties, context managers) nor code
outside of functions. Its settings are in `pyproject.toml`.
"""

import argparse
import ctypes
import difflib
import fnmatch
import importlib
import json
import math
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest
from mutmut.mutation.file_mutation import mutate_file_contents
from mutmut.mutation.trampoline import set_mutant_under_test
from mutmut.state import state
from mutmut.utils.format_utils import get_mutant_name, mangled_name_from_mutant_name

ROOT: Final = Path(__file__).parent.parent
FOLDER: Final = ROOT / "build" / "mutants"
SOURCE: Final = Path("src/penstock")

WORKER: Final = "PENSTOCK_MUTANTS_WORKER"
"""Environment variable: the one module that a process runs."""

MEMORY: Final = 4 << 30
"""Bytes that the process of one mutant may allocate."""

PR_SET_PDEATHSIG: Final = 1
"""Linux: send a signal to this process when its parent ends."""

KILLED, SURVIVED, TIMEOUT, NOT_COVERED = "killed", "survived", "timeout", "not covered"


@dataclass(frozen=True, slots=True)
class Module:
    """Source files, and the tests to run on their mutants."""

    sources: tuple[str, ...]
    tests: tuple[str, ...]
    deselect: str = ""
    """A pytest `-k` expression that leaves out tests too slow to run on each mutant."""

    postgres: bool = False
    """Use of the shared Postgres server by the tests."""


MODULES: Final = {
    "reclock": Module(("reclock/*.py",), ("tests/reclock",)),
    "persist-state": Module(("persist/state.py",), ("tests/persist/test_state.py",)),
    "persist-machine": Module(
        ("persist/machine.py",),
        (
            *("tests/persist/test_machine.py", "tests/persist/test_collection_change.py"),
            *("tests/persist/test_write.py", "tests/persist/test_vectors.py"),
        ),
    ),
    "recovery-log": Module(
        ("materialize/recovery_log.py",),
        (
            "tests/materialize/test_recovery_log.py",
            "tests/materialize/test_errored_collections.py",
        ),
    ),
    "materialization-loop": Module(
        ("materialize/loop.py",),
        (
            *(
                "tests/materialize/test_lifecycle.py",
                "tests/materialize/test_errored_collections.py",
            ),
            *(
                "tests/materialize/test_replacement.py",
                "tests/materialize/test_connector_deadlines.py",
            ),
            *("tests/materialize/test_readable_history.py", "tests/materialize/test_layout.py"),
        ),
        deselect="not shared_out_anew and not crash_at_any_step and not test_once_with",
    ),
    "fence": Module(
        ("sdk/sql/fence.py",),
        ("tests/connectors/test_fences.py",),
        deselect="not postgres",
    ),
    "fence-sqlite": Module(
        ("connectors/sqlite/transactor.py",),
        ("tests/connectors/test_sqlite.py",),
        deselect="not is_synced",  # It runs without mutations, in another process.
    ),
    "fence-postgres": Module(
        (
            "connectors/postgres/older_sessions.py",
            "connectors/postgres/identity.py",
            "connectors/postgres/transactor.py",
        ),
        (
            "tests/connectors/postgres/test_open.py",
            "tests/connectors/postgres/test_transactor.py",
            "tests/connectors/test_recreation.py",
        ),
        deselect="not sqlite",
        postgres=True,
    ),
    "ingest": Module(
        (
            *("ingest/loop.py", "ingest/tick_transaction.py", "ingest/snapshot_loader.py"),
            *("ingest/progress_views.py", "ingest/tasks.py", "ingest/scan_task.py"),
        ),
        (
            *("tests/ingest/test_loop.py", "tests/ingest/test_tick.py"),
            *("tests/ingest/test_snapshot_loader.py", "tests/ingest/test_relations.py"),
            *("tests/ingest/test_scan_task.py", "tests/ingest/test_tasks.py"),
        ),
    ),
    "drift-actions": Module(
        ("sources/postgres/drift_actions.py",), ("tests/sources/postgres/test_drift_actions.py",)
    ),
    "drift": Module(
        ("sources/postgres/drift.py",),
        ("tests/sources/postgres/test_drift.py", "tests/sources/postgres/test_fingerprint.py"),
        deselect="not database18",
        postgres=True,
    ),
    "table-life": Module(
        (
            *("sources/postgres/table_state.py", "sources/postgres/table_set.py"),
            *("sources/postgres/drift_repair.py", "sources/postgres/resync.py"),
        ),
        (
            *("tests/ingest/test_resync.py", "tests/ingest/test_untracked_tables.py"),
            *("tests/ingest/test_meanwhile.py", "tests/sources/postgres/test_table_set.py"),
            *("tests/sources/postgres/test_table_state.py", "tests/sources/postgres/test_state.py"),
        ),
        # They run the command line without mutations, in another process.
        deselect="not only_rows_that_differ and not once_ends_though",
        postgres=True,
    ),
}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one function."""

    name: str
    diff: str

    @property
    def function(self) -> str:
        """Name of the changed function, as mutmut records calls of it."""
        return mangled_name_from_mutant_name(self.name)


@dataclass(frozen=True, slots=True)
class Score:
    """Outcome of one module."""

    total: int
    outcomes: Mapping[str, str]

    @property
    def percent(self) -> float:
        """Share of the sample that tests reject, by failing or by not ending."""
        counts = Counter(self.outcomes.values())
        return round(100 * (counts[KILLED] + counts[TIMEOUT]) / max(1, counts.total()), 1)

    def line(self, name: str) -> str:
        """Return one line of text."""
        counts = Counter(self.outcomes.values())
        parts = [
            f"{status} {counts[status]:>3}" for status in (KILLED, SURVIVED, TIMEOUT, NOT_COVERED)
        ]
        return f"{name:<16} mutants {self.total:>4}  run {counts.total():>4}  " + "  ".join(
            [*parts, f"score {self.percent:>5} %"]
        )


def write_mutants(module: Module, folder: Path) -> list[Mutant]:
    """Copy all sources to a folder, and change the sources of one module. Return its mutants."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    mutants: list[Mutant] = []
    for path in (path for pattern in module.sources for path in sorted(SOURCE.glob(pattern))):
        mutated = mutate_file_contents(str(path), path.read_text())
        (folder / path).write_text(mutated.code)
        lines = mutated.code.splitlines()
        spans = mutated.line_span_by_function_name
        for function in mutated.mutant_names:
            original = mangled_name_from_mutant_name(function) + "__mutmut_orig"
            texts = []
            for name in (original, function):
                span = spans[name]
                texts.append(lines[span.start - 1 : span.end])
            diff = difflib.unified_diff(*texts, str(path), str(path), "", "", 1, "")
            mutants.append(Mutant(get_mutant_name(path, function), "\n".join(diff)))
    return mutants


@dataclass
class Loop:
    """A pytest plugin that runs the collected tests on one mutant after the other."""

    mutants: Sequence[Mutant]
    jobs: int
    seconds: float
    """After so long no further mutant is started."""

    results: Path
    """File with a line for each outcome, written at once: a crash loses none."""

    failing: list[str] = field(default_factory=list)
    """Tests that fail without a mutation."""

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run mutants in place of the tests."""
        if session.testsfailed:
            raise session.Failed("collection failed")
        recorded = FOLDER / f"calls-{os.getpid()}.json"
        child = _fork(lambda: _record(session, recorded), seconds=900)
        if _wait(child) != 0:
            raise session.Failed("the tests could not be run without a mutation")
        calls: dict[str, dict[str, float]]
        calls, self.failing, modules = json.loads(recorded.read_text())
        recorded.unlink()
        for module in modules:
            # Here and not in the process of each mutant: it takes seconds.
            with suppress(Exception):
                importlib.import_module(module)
        self._write({"failing": self.failing})
        tests = {item.nodeid: item for item in session.items}
        running: dict[int, Mutant] = {}
        until = time.monotonic() + self.seconds
        for mutant in self.mutants:
            if time.monotonic() > until:
                break
            costs = calls.get(mutant.function, {})
            if not costs:
                self._write({mutant.name: NOT_COVERED})
                continue
            if len(running) == self.jobs:
                self._await_one(running)
            chosen = [tests[name] for name in sorted(costs, key=costs.__getitem__)]
            # CPU seconds were measured; the machine may be shared.
            seconds = 60 + 10 * sum(costs.values())
            pid = _fork(lambda: _try(session, mutant, chosen), seconds=seconds)  # noqa: B023
            running[pid] = mutant
        while running:
            self._await_one(running)
        return True

    def _await_one(self, running: dict[int, Mutant]) -> None:
        while (pid := _ended_child()) not in running:
            os.waitpid(pid, 0)  # A child of a plugin.
        outcome = {0: SURVIVED, -signal.SIGALRM: TIMEOUT}.get(_wait(pid), KILLED)
        self._write({running.pop(pid).name: outcome})

    def _write(self, result: Mapping[str, object]) -> None:
        with self.results.open("a") as file:
            file.write(json.dumps(result) + "\n")


def _ended_child() -> int:
    info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
    assert info is not None
    return info.si_pid


def _wait(pid: int) -> int:
    """Return the exit code of a child, and end the processes that it left."""
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _fork(work: Callable[[], int], *, seconds: float) -> int:
    pid = os.fork()
    if pid:
        with suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)  # The child does the same; either may be first.
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        _end_with_parent()
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # Without a handler the alarm ends the process with all its threads.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        code = work()
    finally:
        os._exit(code)


def _record(session: pytest.Session, path: Path) -> int:
    set_mutant_under_test("stats")
    calls: dict[str, dict[str, float]] = defaultdict(dict)
    failing: list[str] = []
    loaded = {*sys.modules}
    for item in session.items:
        state()._stats.clear()
        session.testsfailed = 0
        began = time.process_time()
        _run(session, [item])
        seconds = time.process_time() - began
        if session.testsfailed:
            failing.append(item.nodeid)
            continue
        for function in tuple(state()._stats):
            calls[function][item.nodeid] = seconds
    modules = sorted({*sys.modules} - loaded)
    path.write_text(json.dumps([calls, failing, modules]))
    return 0


def _try(session: pytest.Session, mutant: Mutant, items: Sequence[pytest.Item]) -> int:
    set_mutant_under_test(mutant.name)
    _run(session, items)
    return int(bool(session.testsfailed))


def _run(session: pytest.Session, items: Sequence[pytest.Item]) -> None:
    for item, following in zip(items, [*items[1:], None], strict=True):
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.testsfailed:
            with suppress(Exception):
                session._setupstate.teardown_exact(None)
            return


def run_module(
    name: str, mutants: Sequence[Mutant], *, jobs: int, seconds: float
) -> tuple[dict[str, str], list[str]]:
    """Run mutants in a child process. Return the outcome of each, and reasons for doubt."""
    module = MODULES[name]
    results, log = FOLDER / f"{name}.jsonl", FOLDER / f"{name}.log"
    results.write_text("")
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            _end_with_parent()
            with log.open("w") as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            arguments = ["-m", "not long and not spark", "--timeout=0", "--hypothesis-seed=0"]
            arguments += [
                "--hypothesis-profile=mutants",
                "-p",
                "no:cacheprovider",
                "-p",
                "no:xdist",
                *module.tests,
            ]
            if module.deselect:
                arguments += ["-k", module.deselect]
            code = pytest.main(arguments, plugins=[Loop(mutants, jobs, seconds, results)])
        except BaseException:  # noqa: BLE001 the process ends here
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    doubts = [] if code == 0 else [f"ended with status {code}: see {log.relative_to(ROOT)}"]
    outcomes: dict[str, str] = {}
    for line in results.read_text().splitlines():
        outcomes |= json.loads(line)
    doubts += [f"fails without a mutation: {test}" for test in outcomes.pop("failing", ())]
    with (FOLDER / f"{name}.diff").open("w") as file:
        for mutant in mutants:
            outcome = outcomes.get(mutant.name)
            if outcome in (SURVIVED, NOT_COVERED):
                file.write(f"# {mutant.name}: {outcome}\n{mutant.diff}\n\n")
    return outcomes, doubts


def main() -> None:
    """Run the modules and print their scores."""
    parser = argparse.ArgumentParser(description="Run mutants of the modules that hold data.")
    parser.add_argument("--module", choices=MODULES, action="append", help="only this one")
    parser.add_argument("--sample", type=int, default=100, help="mutants per module; 0 is all")
    parser.add_argument("--minutes", type=float, default=math.inf, help="per module")
    parser.add_argument("--seed", type=int, default=1, help="choose the sample")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants at a time")
    parser.add_argument("--mutant", default="*", help="of the sample, only names that match")
    given = parser.parse_args()
    os.chdir(ROOT)
    if worker := os.environ.get(WORKER):
        _end_with_parent()
        sys.exit(int(not score_module(worker, given)))
    names: list[str] = given.module or list(MODULES)
    print(f"seed {given.seed}, at most {given.sample or 'all'} mutants of a module", flush=True)
    failed = [name for name in names if _spawn(name, given.seed) != 0]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def _spawn(name: str, seed: int) -> int:
    """Run one module in its own process: a failure ends this module only."""
    environment = {
        **os.environ,
        WORKER: name,
        "PENSTOCK_TEST_SEED": str(seed),
        "PYTHONHASHSEED": "0",  # The order of sets decides which inputs some tests make.
    }
    command = [sys.executable, "-m", "tests.mutants", *sys.argv[1:]]
    return subprocess.run(command, env=environment, check=False).returncode


def score_module(name: str, given: argparse.Namespace) -> bool:
    """Run a sample of the mutants of one module. Print its score, and return whether all ran."""
    total = write_mutants(MODULES[name], FOLDER / name)
    sys.path.insert(0, str(FOLDER / name / "src"))
    # Only now: it imports Penstock.
    from tests.shared_postgres import share

    count = min(given.sample or len(total), len(total))
    chosen = random.Random(f"{given.seed} {name}").sample(total, count)
    chosen = [mutant for mutant in chosen if fnmatch.fnmatch(mutant.name, given.mutant)]
    with share() if MODULES[name].postgres else nullcontext():
        outcomes, doubts = run_module(name, chosen, jobs=given.jobs, seconds=60 * given.minutes)
    print(Score(len(total), outcomes).line(name), flush=True)
    for doubt in doubts:
        print(f"{name:<16} {doubt}", flush=True)
    return not doubts


if __name__ == "__main__":
    main()
