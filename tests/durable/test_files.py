import errno
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.durable.children import SOURCE, names_in
from tests.durable.eager_clock import EagerClock

from penstock.durable.blob import Blob
from penstock.durable.disk import OsDisk
from penstock.durable.files import FileBlob
from penstock.durable.location import children, open_blob
from penstock.durable.retrying_blob import RetryingBlob
from penstock.errors import (
    DeterminateError,
    DurabilityLost,
    IndeterminateError,
    StoreRefused,
    UsageError,
)
from penstock.retry import Policy, policy_of


def handles_open() -> int:
    return len(names_in(Path("/proc/self/fd")))


class BrokenDisk(OsDisk):
    """Real disk on which one kind of call fails."""

    def __init__(self, call: str, number: int) -> None:
        self._call = call
        self._number = number

    def _fail(self, call: str) -> None:
        if call == self._call:
            raise OSError(self._number, os.strerror(self._number))

    def write_new(self, folder: int, name: str, data: bytes) -> int:
        file = super().write_new(folder, name, data)
        try:
            self._fail("write")
        except OSError:
            os.close(file)
            raise
        return file

    def link(self, source: int, name: str, target: int, as_name: str) -> None:
        self._fail("link")
        super().link(source, name, target, as_name)

    def replace(self, source: int, name: str, target: int, as_name: str) -> None:
        self._fail("replace")
        super().replace(source, name, target, as_name)

    def read(self, path: str, start: int = 0) -> bytes:
        self._fail("read")
        return super().read(path, start)


@pytest.mark.parametrize(
    "number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT, errno.EFBIG, errno.EXDEV]
)
@pytest.mark.parametrize("call", ["write", "link"])
def test_file_create_on_permanent_os_error_raises_store_refused_with_hint(
    tmp_path: Path, call: str, number: int
) -> None:
    blob = FileBlob(str(tmp_path), disk=BrokenDisk(call, number))
    with pytest.raises(StoreRefused, match='could not write object "log/0"') as refused:
        blob.create("log/0", b"x")
    assert refused.value.hint
    assert blob.list("") == []
    assert names_in(tmp_path / "tmp") == set()
    blob.close()


def test_file_create_with_write_error_before_link_raises_determinate_error(tmp_path: Path) -> None:
    blob = FileBlob(str(tmp_path), disk=BrokenDisk("write", errno.EIO))
    with pytest.raises(DeterminateError):
        blob.create("log/0", b"x")
    blob.close()


@pytest.mark.parametrize(
    ("number", "policy"),
    [
        *((number, Policy.REPEAT) for number in (errno.EMFILE, errno.EIO, errno.ESTALE)),
        *((number, Policy.RESTART) for number in (errno.EFBIG, errno.EUCLEAN, errno.ENODEV)),
    ],
)
def test_file_create_retries_only_transient_os_errors(
    tmp_path: Path, number: int, policy: Policy
) -> None:
    blob = FileBlob(str(tmp_path), disk=BrokenDisk("write", number))
    with pytest.raises(DeterminateError) as raised:
        blob.create("log/0", b"x")
    assert policy_of(raised.value) is policy
    blob.close()


@pytest.mark.parametrize("call", ["link", "replace"])
def test_file_write_with_link_error_raises_indeterminate_error(tmp_path: Path, call: str) -> None:
    blob = FileBlob(str(tmp_path), disk=BrokenDisk(call, errno.EIO))
    with pytest.raises(IndeterminateError):
        blob.create("k", b"x") if call == "link" else blob.put("k", b"x")
    blob.close()


def test_file_create_with_swept_temporary_file_raises_retryable_determinate_error(
    tmp_path: Path,
) -> None:
    class Swept(OsDisk):
        swept = False

        def link(self, source: int, name: str, target: int, as_name: str) -> None:
            if not self.swept:
                self.swept = True
                os.unlink(name, dir_fd=source)
            super().link(source, name, target, as_name)

    blob = FileBlob(str(tmp_path), disk=Swept())
    with pytest.raises(DeterminateError) as raised:
        blob.create("log/0", b"x")
    assert policy_of(raised.value) is Policy.REPEAT
    assert blob.create("log/0", b"x")
    blob.close()


def test_file_get_with_read_error_raises_determinate_error(tmp_path: Path) -> None:
    blob = FileBlob(str(tmp_path), disk=BrokenDisk("read", errno.EIO))
    with pytest.raises(DeterminateError, match="could not read"):
        blob.get("k")
    blob.close()


def test_file_create_after_open_folder_was_removed_recreates_it(tmp_path: Path) -> None:
    blob = FileBlob(str(tmp_path / "store"))
    assert blob.create("log/0", b"x")
    (tmp_path / "store" / "log" / "0").unlink()
    (tmp_path / "store" / "log").rmdir()
    with pytest.raises(DeterminateError):
        blob.create("log/0", b"y")
    assert blob.create("log/0", b"y")
    assert blob.get("log/0") == b"y"
    blob.close()


def used_by_writing(url: str) -> Blob:
    blob = open_blob(url, writing=True)
    blob.put("log/0", b"x")
    return blob


def used_by_reading(url: str) -> Blob:
    used_by_writing(url).close()
    return open_blob(url)


def used_by_finding_what_was_written(url: str) -> Blob:
    used_by_writing(url).close()
    blob = open_blob(url, writing=True)
    assert blob.get("log/0") == b"x"
    return blob


@pytest.mark.parametrize(
    "used", [used_by_writing, used_by_reading, used_by_finding_what_was_written]
)
def test_file_create_in_removed_location_raises_store_refused(
    tmp_path: Path, used: Callable[[str], Blob]
) -> None:
    folder = tmp_path / "store"
    blob = RetryingBlob(used(f"file:{folder}"), EagerClock(), random.Random(1))
    shutil.rmtree(folder)
    with pytest.raises(StoreRefused, match=f'folder "{folder}" of location .* has disappeared'):
        blob.create("log/1", b"y")
    assert not folder.exists()
    blob.close()


def test_file_create_below_a_regular_file_raises_store_refused(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"")
    blob = FileBlob(str(tmp_path))
    with pytest.raises(StoreRefused, match="log/0"):
        blob.create("log/0", b"")
    assert blob.get("log/0") is None
    blob.close()


def test_file_location_opened_for_reading_creates_no_files(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    blob = open_blob(f"file:{tmp_path}/store")
    assert blob.list("") == []
    assert blob.get("log/0") is None
    assert names_in(tmp_path / "store") == set()
    blob.close()


def test_file_list_omits_foreign_files(tmp_path: Path) -> None:
    for name in ("lost+found", "a~b", "half~1~2~3", ".DS_Store", ".nfs0001", "notes"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / ".snapshot").mkdir()
    (tmp_path / ".snapshot" / "notes").write_bytes(b"")
    blob = open_blob(f"file:{tmp_path}")
    assert [listed.key for listed in blob.list("")] == ["notes"]
    assert children(f"file:{tmp_path}") == []
    blob.close()


def test_file_blob_keeps_at_most_64_folder_handles_open(tmp_path: Path) -> None:
    blob = FileBlob(str(tmp_path))
    before = handles_open()
    for number in range(150):
        assert blob.create(f"part/{number}/x", b"")
    assert handles_open() - before <= 64
    assert len(blob.list("part/")) == 150
    blob.close()
    assert handles_open() <= before


@pytest.mark.skipif(os.geteuid() != 0, reason="changes to another user, which only root may")
def test_file_reader_without_write_permission_reads_and_settles_but_cannot_put(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PENSTOCK_UMASK", "022")
    with tempfile.TemporaryDirectory() as folder:  # Other users cannot enter the folder of pytest.
        Path(folder).chmod(0o755)
        writer = open_blob(f"file:{folder}/store", writing=True)
        writer.create("log/0", b"entry")
        writer.close()
        story = (
            "import os\n"
            "from penstock.durable.location import open_blob\n"
            "from penstock.errors import StoreRefused\n"
            "os.setgid(65534); os.setuid(65534)\n"
            f"blob = open_blob('file:{folder}/store')\n"
            "assert blob.get('log/0') == b'entry'\n"
            "blob.settle(['log/0'])\n"
            "try: blob.put('log/1', b'')\n"
            "except StoreRefused as refused: print(refused.hint)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", story],
            env={**os.environ, "PYTHONPATH": str(SOURCE / "src")},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.stdout == "Give this user permission to read and write the folder.\n", done.stderr


def test_file_blob_close_releases_file_handles(tmp_path: Path) -> None:
    before = handles_open()
    for _ in range(5):
        blob = FileBlob(str(tmp_path))
        blob.put("a/b", b"")
        assert blob.close()
        with pytest.raises(UsageError):
            blob.sweep()
    assert handles_open() == before


def test_file_create_after_closed_folder_was_removed_recreates_it(tmp_path: Path) -> None:
    blob = FileBlob(str(tmp_path))
    assert blob.create("log/0", b"x")
    for number in range(70):  # More than the handle limit, which closes log/.
        assert blob.create(f"part/{number}/x", b"")
    (tmp_path / "log" / "0").unlink()
    (tmp_path / "log").rmdir()
    with pytest.raises(DeterminateError):
        blob.create("log/0", b"y")
    assert blob.create("log/0", b"y")
    blob.close()


class SharedErrorDisk(OsDisk):
    """Disk that reports an fsync error to one caller of a shared handle, as the kernel does."""

    def __init__(self) -> None:
        self.armed = False
        self.both_linked = threading.Barrier(2)
        self._told = threading.Lock()

    def link(self, source: int, name: str, target: int, as_name: str) -> None:
        super().link(source, name, target, as_name)
        if self.armed:
            self.both_linked.wait(10)

    def sync_folder(self, folder: int) -> None:
        if self.armed and self._told.acquire(blocking=False):
            raise OSError(errno.EIO, "once")
        super().sync_folder(folder)


def test_file_create_after_failed_folder_fsync_raises_durability_lost_in_all_threads(
    tmp_path: Path,
) -> None:
    disk = SharedErrorDisk()
    blob = FileBlob(str(tmp_path), disk=disk)
    assert blob.create("log/0", b"")
    disk.armed = True
    with ThreadPoolExecutor(2) as threads:
        writes = [threads.submit(blob.create, f"log/{number}", b"") for number in (1, 2)]
        for write in writes:
            with pytest.raises(DurabilityLost):
                write.result(10)
    blob.close()


def test_file_create_in_progress_finishes_when_blob_is_closed(tmp_path: Path) -> None:
    class ClosedUnderWay(OsDisk):
        def link(self, source: int, name: str, target: int, as_name: str) -> None:
            super().link(source, name, target, as_name)
            assert blob.close()

    before = handles_open()
    blob = FileBlob(str(tmp_path), disk=ClosedUnderWay())
    assert blob.create("log/0", b"whole")
    assert handles_open() == before
    assert (tmp_path / "log" / "0").read_bytes() == b"whole"
    assert names_in(tmp_path / "tmp") == set()


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def modes(folder: Path) -> set[tuple[bool, int]]:
    """Return, for each path, whether it is a folder, and its permissions."""
    return {(path.is_dir(), path.stat().st_mode & 0o777) for path in (folder, *folder.rglob("*"))}


@pytest.mark.usefixtures("open_umask")
@pytest.mark.parametrize(("value", "folders", "files"), [("", 0o700, 0o600), ("027", 0o750, 0o640)])
def test_lake_files_are_private_to_owner_unless_umask_is_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, folders: int, files: int
) -> None:
    monkeypatch.setenv("PENSTOCK_UMASK", value)
    blob = open_blob(f"file:{tmp_path}/lake", writing=True)
    blob.put("a/b", b"x")
    assert blob.create("log/0", b"y")
    blob.close()
    assert modes(tmp_path / "lake") == {(True, folders), (False, files)}


@pytest.mark.parametrize("value", ["77x", "0777", "-1", "9"])
def test_open_blob_with_malformed_umask_raises_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("PENSTOCK_UMASK", value)
    with pytest.raises(UsageError, match="variable PENSTOCK_UMASK is"):
        open_blob(f"file:{tmp_path}/lake", writing=True).put("a", b"x")


@pytest.mark.usefixtures("open_umask")
def test_lake_folder_with_wider_permissions_is_writable(tmp_path: Path) -> None:
    (tmp_path / "lake" / "a").mkdir(parents=True, mode=0o755)
    (tmp_path / "lake" / "a" / "old").write_bytes(b"old")
    blob = open_blob(f"file:{tmp_path}/lake", writing=True)
    blob.put("a/old", b"new")
    assert blob.get("a/old") == b"new"
    blob.close()
