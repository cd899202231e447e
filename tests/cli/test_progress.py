"""Progress lines while tasks run; a closed stderr does not stop them."""

import io
import threading

import pytest

from penstock.cli import progress
from penstock.cli.progress import ProgressPrinter
from penstock.supervisor.status import MaterializationStatus, State, TaskStatus

STATUS = MaterializationStatus.of(phase="storing", documents=3, lag_ms=19_000)


class FakeSupervisor:
    def __init__(self) -> None:
        self.loop = STATUS
        self.polled = threading.Event()

    def fenced(self) -> None:
        return None

    def status(self) -> dict[str, TaskStatus]:
        self.polled.set()
        return {"local": TaskStatus("materialization", State.RUNNING, 0, None, self.loop)}


class ClosedPipe(io.StringIO):
    def write(self, _: str) -> int:
        raise BrokenPipeError


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PRINT_EVERY_MS", 10)


def test_progress_printer_with_closed_stderr_stops_run_at_time_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stderr", ClosedPipe())
    stop = threading.Event()
    ProgressPrinter(stop, 0, as_json=False).start(FakeSupervisor())  # type: ignore[arg-type]
    assert stop.wait(30)


def test_progress_printer_reports_when_materialization_has_caught_up(
    capsys: pytest.CaptureFixture[str],
) -> None:
    supervisor, stop = FakeSupervisor(), threading.Event()
    ProgressPrinter(stop, None, as_json=False).start(supervisor)  # type: ignore[arg-type]
    output = ""

    def wait_for(text: str) -> None:
        nonlocal output
        while text not in output:
            supervisor.polled.clear()
            assert supervisor.polled.wait(30)
            output += capsys.readouterr().err

    wait_for("storing, 3 documents, 19.0 s behind")
    supervisor.loop = STATUS.updated(phase="following", lag_ms=0)
    wait_for("local: following, 3 documents\n")
    stop.set()
