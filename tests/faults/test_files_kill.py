"""A killed writer leaves complete objects and temporary files, which are swept."""

import os
import signal
from pathlib import Path

from penstock.durable.files import FileBlob
from penstock.durable.location import open_blob
from penstock.durable.temp_names import new_name
from tests.durable.children import contents_of, line_of, names_in, started
from tests.durable.eager_clock import EagerClock
from tests.process_pipes import stdout_of


def test_killed_file_writer_leaves_all_acknowledged_objects_complete(tmp_path: Path) -> None:
    url = f"file:{tmp_path}/store"
    for target in (1, 7, 30):
        child = started("write", url, "1000000")
        acknowledged: set[int] = set()
        while len(acknowledged) < target:
            word, _, rest = line_of(child.stdout).partition(" ")
            if word == "acknowledged":
                acknowledged.add(int(rest))
        child.kill()
        # SUBTLE: not `communicate`, which skips output that was read ahead of the last line.
        said = stdout_of(child).read()
        child.communicate()
        acknowledged |= {
            int(line.split()[1]) for line in said.splitlines() if line.startswith("acknowledged ")
        }
        blob = open_blob(url, writing=True)
        found = {int(listed.key.split("/")[1]) for listed in blob.list("log/")}
        assert acknowledged <= found <= acknowledged | {max(acknowledged) + 1}
        for number in found:
            assert blob.get(f"log/{number}") == contents_of(number)
        assert names_in(tmp_path / "store" / "tmp") == set()
        for number in found:
            blob.delete(f"log/{number}")
        blob.close()


def test_file_sweep_deletes_temporary_files_of_dead_writers_only(tmp_path: Path) -> None:
    child = started("write", f"file:{tmp_path}", "0")
    assert line_of(child.stdout) == "ready"
    living = _name_of(child.pid)
    child.communicate()
    own = _name_of(os.getpid())
    reused = f"{own.split('~')[0]}~{os.getpid()}~1~0"
    foreign = "00000000~1~1~1"
    (tmp_path / "tmp").mkdir()
    for name in (living, own, reused, foreign, "stray"):
        (tmp_path / "tmp" / name).write_bytes(b"half")
    blob = open_blob(f"file:{tmp_path}", writing=True)
    assert names_in(tmp_path / "tmp") == {own, foreign, "stray"}
    blob.close()
    mtime_ms = (tmp_path / "tmp" / foreign).stat().st_mtime_ns // 1_000_000
    later = FileBlob(str(tmp_path), clock=EagerClock(mtime_ms + 61 * 60 * 1_000))
    assert later.sweep() == 2
    assert names_in(tmp_path / "tmp") == {own}
    later.close()


def _name_of(pid: int) -> str:
    """Return a temporary name as process `pid` of this boot would create it."""
    boot = new_name().split("~")[0]
    birth = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return f"{boot}~{pid}~{birth}~99"


def test_stopped_file_writer_keeps_its_temporary_file_and_resumes(tmp_path: Path) -> None:
    child = started("write", f"file:{tmp_path}", "1000000")
    while not line_of(child.stdout).startswith("acknowledged"):
        pass
    os.kill(child.pid, signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    before = names_in(tmp_path / "tmp")
    blob = open_blob(f"file:{tmp_path}", writing=True)
    assert names_in(tmp_path / "tmp") == before
    os.kill(child.pid, signal.SIGCONT)
    said = [line_of(child.stdout) for _ in range(20)]
    child.kill()
    child.communicate()
    for line in said:
        if line.startswith("acknowledged "):
            number = int(line.split()[1])
            assert blob.get(f"log/{number}") == contents_of(number)
    assert any(line.startswith("acknowledged ") for line in said)
    blob.close()
