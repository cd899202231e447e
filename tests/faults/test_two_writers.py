"""Two processes with one id (hazard A7): no data is lost, and one makes progress."""

from pathlib import Path

import pytest

from tests.faults.actors import FENCED, REFUSED, Child
from tests.faults.history import Event, boot_ns, read_history
from tests.faults.inspect import inspected
from tests.faults.validator import Invariant, violations


@pytest.mark.parametrize("bug", ["retake_after_fenced", None], ids=["planted", "clean"])
def test_two_writers_with_same_id_fenced_writer_exits_and_other_progresses(
    tmp_path: Path, bug: str | None
) -> None:
    url, folder = f"file:{tmp_path / 'data'}", tmp_path / "history"
    folder.mkdir()
    events: list[Event] = []
    first = Child("writer", "w1", url, folder, writer="a", seed=1, bug=bug)
    children = [first]
    try:
        assert first.receive() == "ready"
        begin = boot_ns()
        second = Child("writer", "w2", url, folder, writer="a", seed=2, bug=bug)
        children.append(second)
        assert second.receive() == "ready"
        assert first.receive() == "fenced"
        if bug is None:
            assert first.wait() == FENCED
        else:
            assert first.receive() == "ready"  # The first writer took the lock back.
        third = Child("writer", "w3", url, folder, writer="b", seed=3)
        children.append(third)
        assert third.wait() == REFUSED
        second.send("stop")
        first.send("stop")
        status = second.wait()
        if bug is None:
            assert status == 0
        events.append(_note("contest", begin=begin, end=boot_ns()))
        events += [_note("exit", of=c.who, status=c.wait()) for c in children]
    finally:
        for child in children:
            child.end()
    found = violations([*read_history(folder), *events, *inspected(url)])
    if bug is None:
        assert not found, "\n".join(map(str, found))
    else:
        assert Invariant.FENCED in {each.invariant for each in found}


def _note(event: str, **facts: object) -> Event:
    return {"at": boot_ns(), "who": "test", "event": event, **facts}
