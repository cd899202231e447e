"""Progress lines while tasks run; a closed stderr does not stop them."""

import io
import threading
from typing import Any

import pytest

from penstock.cli import progress
from penstock.cli.progress import Teller

STATUS = {
    "kind": "materialization",
    "state": "running",
    "phase": "storing",
    "documents": 3,
    "lag_ms": 19_000,
    "error": None,
}


class Runs:
    def __init__(self) -> None:
        self.told: dict[str, Any] = dict(STATUS)
        self.looked = threading.Event()

    def fenced(self) -> None:
        return None

    def status(self) -> dict[str, Any]:
        self.looked.set()
        return {"local": dict(self.told)}


class Gone(io.StringIO):
    def write(self, _: str) -> int:
        raise BrokenPipeError


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "TOLD_EVERY_MS", 10)


def test_progress_printer_with_closed_stderr_stops_run_at_time_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stderr", Gone())
    stop = threading.Event()
    Teller(stop, 0, as_json=False).start(Runs())  # type: ignore[arg-type]
    assert stop.wait(30)


def test_progress_printer_reports_when_materialization_has_caught_up(
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs, stop = Runs(), threading.Event()
    Teller(stop, None, as_json=False).start(runs)  # type: ignore[arg-type]
    said = ""

    def hear(words: str) -> None:
        nonlocal said
        while words not in said:
            runs.looked.clear()
            assert runs.looked.wait(30)
            said += capsys.readouterr().err

    hear("storing, 3 documents, 19.0 s behind")
    runs.told |= {"phase": "following", "lag_ms": 0}
    hear("local: following, 3 documents\n")
    stop.set()
