"""A writer resumes after a stop during which its successor ran (hazards A1, A3, A7).

Real processes and real signals. Settings make entries old in a fraction of a
second. The log is therefore truncated past the head that the stopped writer knows.
"""

import signal
from pathlib import Path

import pytest

from penstock.clock import SYSTEM_CLOCK
from penstock.durable import Log, open_blob
from tests.faults.actors import FENCED, Child
from tests.faults.history import read_history
from tests.faults.inspect import inspected
from tests.faults.validator import Invariant, violations


@pytest.mark.parametrize("bug", ["no_floor_check", None], ids=["planted", "clean"])
def test_writer_stopped_across_truncation_is_fenced_and_acknowledges_nothing(
    tmp_path: Path, bug: str | None
) -> None:
    url, folder = f"file:{tmp_path / 'data'}", tmp_path / "history"
    folder.mkdir()
    children: list[Child] = []
    try:
        first = Child("puppet", "w1", url, folder, writer="a", bug=bug, settings=NO_UPKEEP)
        children.append(first)
        assert first.receive() == "ready"
        assert first.request("append") == "acknowledged"
        blob = open_blob(url)
        head = max(Log(blob).entries()) + 1

        first.process.send_signal(signal.SIGSTOP)
        second = Child("puppet", "w2", url, folder, writer="a", settings=NO_UPKEEP)
        children.append(second)
        assert second.receive() == "ready"
        deadline = SYSTEM_CLOCK.boot_ms() + 30_000
        while Log(blob).marks().floor <= head and SYSTEM_CLOCK.boot_ms() < deadline:
            assert second.request("append") == "acknowledged"
            assert second.request("compact") == "acknowledged"
        assert Log(blob).marks().floor > head

        first.process.send_signal(signal.SIGCONT)
        answer = first.request("append")
        if bug is None:
            assert answer == "fenced"
            assert first.wait() == FENCED
        assert second.request("append") == "acknowledged"
        assert second.request("close") == "done"
    finally:
        for child in children:
            child.end()
    found = violations([*read_history(folder), *inspected(url)])
    if bug is None:
        assert not found, "\n".join(map(str, found))
    else:
        assert Invariant.ACKNOWLEDGED in {each.invariant for each in found}


NO_UPKEEP = '{"young_ms":300,"proof_ms":100,"background":false}'
"""Settings without background compaction: the test decides where the log is truncated."""
