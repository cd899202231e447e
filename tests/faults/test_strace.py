"""The system's own calls fail under a writer of collections, or are its last.

A sync fails once, as the kernel reports it, and would succeed if it were tried
again; or the process dies exactly at the link that would make an entry be.
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
    """What a writer answered while `inject` was in force, and how it ended."""
    url, folder = f"file:{tmp_path / 'data'}", tmp_path / "history"
    folder.mkdir()
    # The store is probed and the collections are there: what fails below is the work itself.
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
        answers.append(child.hear())
        for command in SCRIPT:
            if answers[-1] in ("", "DurabilityLost"):
                break
            answers.append(child.ask(command))
        child.tell("close")
        status = child.wait()
    finally:
        child.end()
    found = violations([*read_history(folder), *inspected(url)])
    assert not found, "\n".join(map(str, found))
    return answers, status


# Strace counts by thread: the one that opens, the one that commits, those that upload.
@pytest.mark.parametrize("when", [1, 2, 4, 5, 6, 9])
def test_after_a_failed_fsync_a_writer_acknowledges_nothing_more(
    strace: str, tmp_path: Path, when: int
) -> None:
    answers, _ = played(strace, tmp_path, f"fsync:error=EIO:when={when}")
    failed = [i for i, answer in enumerate(answers) if answer in ("doubt", "DurabilityLost")]
    assert failed, answers
    assert "acknowledged" not in answers[failed[0] :], answers


@pytest.mark.parametrize("when", [1, 2, 3, 5])
def test_a_writer_killed_at_the_link_of_an_entry_has_written_it_wholly_or_not(
    strace: str, tmp_path: Path, when: int
) -> None:
    answers, status = played(strace, tmp_path, f"link,linkat:signal=SIGKILL:when={when}")
    assert status != 0
    assert answers[-1] == "", answers
