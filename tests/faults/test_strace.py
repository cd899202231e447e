"""Real system calls fail under a writer of collections, or kill it.

A sync fails once, as the kernel reports it, and a second attempt would succeed.
Or the process dies exactly at the link that would make an entry visible.
"""

import json
from pathlib import Path

import pytest

from penstock import persist
from penstock.persist import Settings
from tests.faults.actors import Child
from tests.faults.history import Recorder, Scribe, read_history
from tests.faults.inspect import inspected
from tests.faults.validator import violations

SCRIPT = ["append", "append words 100", "write", "seal", "all", "append", "append words 100"]
QUIET = json.dumps({"background": False, "notify": ""}).replace(" ", "")


def played(strace: str, tmp_path: Path, inject: str) -> tuple[list[str], int]:
    """Return the answers and the exit status of a writer under `inject`."""
    url, folder = f"file:{tmp_path / 'data'}", tmp_path / "history"
    folder.mkdir()
    # The store is probed and the collections exist: the fault hits only the work itself.
    recorder = Recorder("before", folder / "before.jsonl")
    with persist.open(url, writer="a", settings=Settings(background=False)) as client:
        scribe = Scribe(recorder, client)
        for name in ("words", "others"):
            each = client.create_or_load(name, key=persist.TEXT, value=persist.UNIT)
            scribe.append(each, [1], 0, 2)
    calls = inject.partition(":")[0]
    before = (
        *(strace, "-f", "-qq", "-o", "/dev/null"),
        *("-e", f"trace={calls}", "-e", f"inject={inject}"),
    )
    child = Child("puppet", "w", url, folder, writer="a", before=before, settings=QUIET)
    answers: list[str] = []
    try:
        answers.append(child.receive())
        for command in SCRIPT:
            if answers[-1] in ("", "DurabilityLost"):
                break
            answers.append(child.request(command))
        child.send("close")
        status = child.wait()
    finally:
        child.end()
    found = violations([*read_history(folder), *inspected(url)])
    assert not found, "\n".join(map(str, found))
    return answers, status


# Strace counts per thread: the opening, the committing and the uploading threads.
@pytest.mark.parametrize("when", [1, 2, 4, 5, 6, 9])
def test_writer_after_failed_fsync_acknowledges_nothing(
    strace: str, tmp_path: Path, when: int
) -> None:
    answers, _ = played(strace, tmp_path, f"fsync:error=EIO:when={when}")
    failed = [i for i, answer in enumerate(answers) if answer in ("doubt", "DurabilityLost")]
    assert failed, answers
    assert "acknowledged" not in answers[failed[0] :], answers


@pytest.mark.parametrize("when", [1, 2, 3, 5])
def test_writer_killed_at_link_of_entry_leaves_it_complete_or_absent(
    strace: str, tmp_path: Path, when: int
) -> None:
    answers, status = played(strace, tmp_path, f"link,linkat:signal=SIGKILL:when={when}")
    assert status != 0
    assert answers[-1] == "", answers
