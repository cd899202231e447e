"""The test run of `make test`: all tests, then failed tests marked `timing` once more, alone.

    python -m tests.run [pytest options]

A test marked `timing` waits on a real scheduler, such as Spark's limit for the start of a worker,
and can fail on a loaded machine without a defect. If it passes alone, the run prints `FLAKY` and
its name, and the failure does not count. All other failures are final.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

FAILURES: Final = "PENSTOCK_TEST_FAILURES"
"""Environment variable with the file that `tests.fix_timing` writes."""

FAILED: Final = 1
"""Exit status of pytest if tests failed and nothing else went wrong."""


def main(options: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="penstock-tests-") as folder:
        report = Path(folder) / "failures.json"
        status = run_pytest(options, report)
        if status != FAILED or not report.exists():
            return status
        failures = json.loads(report.read_text())
        if failures["final"] or not failures["timing"]:
            return status
        names = failures["timing"]
        sys.stdout.write(f"running alone: {' '.join(names)}\n")
        sys.stdout.flush()
        again = run_pytest(["-n", "0", *names], Path(folder) / "again.json")
    if again == 0:
        for name in names:
            sys.stdout.write(f"FLAKY {name}\n")
    return again


def run_pytest(options: list[str], report: Path) -> int:
    command = [sys.executable, "-m", "pytest", *options]
    environment = {**os.environ, FAILURES: str(report)}
    # Tests start hundreds of processes. Without bytecode on disk, each compiles every module
    # that it imports, which takes longer than the imports themselves.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
