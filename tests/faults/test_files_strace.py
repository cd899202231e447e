"""Real system calls fail, or kill the process, under strace."""

from pathlib import Path

import pytest

from penstock.durable.location import open_blob
from tests.durable.children import contents_of, line_of, names_in, started

COUNT = 4


def lines_of(strace: str, url: str, *, inject: str) -> tuple[list[str], int]:
    """Return the output and the exit status of a child under `inject`."""
    calls = inject.partition(":")[0]
    before = (
        strace,
        "-f",
        "-qq",
        "-o",
        "/dev/null",
        "-e",
        f"trace={calls}",
        "-e",
        f"inject={inject}",
    )
    child = started("write", url, str(COUNT), before=before)
    said: list[str] = []
    while line := line_of(child.stdout):
        said.append(line)
    child.communicate()
    return said, child.returncode


# The first create makes and syncs folders, up to the root of the file system;
# each later create syncs a file and a folder.
@pytest.mark.parametrize("when", [1, 2, 3, 5, 8, 9, 10, 11])
def test_file_create_with_failed_fsync_is_not_acknowledged_and_ends_all_writes(
    strace: str, tmp_path: Path, when: int
) -> None:
    said, _ = lines_of(
        strace, f"file:{tmp_path}/s", inject=f"fsync,fdatasync:error=EIO:when={when}"
    )
    lost = [line for line in said if line.startswith("lost")]
    acknowledged = [line for line in said if line.startswith("acknowledged")]
    assert len(lost) == 1
    assert len(acknowledged) < COUNT
    assert lost[0].split()[1] == str(len(acknowledged))
    at = said.index(lost[0])
    assert said[at + 1 : at + 4] == ["refused"] * 3
    assert said[at + 4].startswith("reads ")
    found = open_blob(f"file:{tmp_path}", writing=False)
    for number in range(len(acknowledged)):
        assert found.get(f"s/log/{number}") == contents_of(number)
    found.close()


@pytest.mark.parametrize("when", [1, 2, 3])
def test_file_writer_killed_at_link_leaves_object_absent_or_complete(
    strace: str, tmp_path: Path, when: int
) -> None:
    url = f"file:{tmp_path}/s"
    said, status = lines_of(strace, url, inject=f"link,linkat:signal=SIGKILL:when={when}")
    assert status != 0
    assert "end" not in said
    acknowledged = sum(line.startswith("acknowledged") for line in said)
    assert acknowledged == when - 1
    blob = open_blob(url, writing=True)
    for number in range(acknowledged):
        assert blob.get(f"log/{number}") == contents_of(number)
    assert blob.get(f"log/{acknowledged}") in (None, contents_of(acknowledged))
    assert names_in(tmp_path / "s" / "tmp") == set()
    blob.close()
