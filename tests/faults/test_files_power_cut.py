"""After a power cut, what was acknowledged is there and nothing is there in part (hazard A5)."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.durable.disk import Disk
from penstock.durable.files import FileBlob
from penstock.durable.log import Log, entry_key
from penstock.errors import DurabilityLost, StoreError
from penstock.testing.stores import CarelessDisk, PlantedBug, PowerCut, PowerCutDisk, Step

ROOT = "/srv/lake"

writes = st.lists(
    st.tuples(st.sampled_from(["put", "create"]), st.sampled_from(["log/0", "log/1", "part/x"])),
    max_size=6,
)


@dataclass
class Promises:
    """What a checker may hold a disk to."""

    written: dict[str, set[bytes]] = field(default_factory=dict)
    """Everything ever tried, by key."""

    promised: dict[str, set[bytes]] = field(default_factory=dict)
    """What was acknowledged and whatever was tried after it, by key."""

    def write(self, blob: FileBlob, verb: str, key: str, data: bytes) -> None:
        self.written.setdefault(key, set()).add(data)
        if verb == "put":
            self.promised.get(key, set()).add(data)
            blob.put(key, data)
            self.promised[key] = {data}
        elif blob.create(key, data):
            self.promised[key] = {data}

    def broken(self, found: FileBlob) -> str:
        """How a disk that was found breaks them; empty if it does not."""
        for listed in found.list(""):
            if found.get(listed.key) not in self.written.get(listed.key, ()):
                return f"{listed.key} is there in part"
        for key, possible in self.promised.items():
            if found.get(key) not in possible:
                return f"{key} was acknowledged and is not there"
        return ""


def run(
    program: list[tuple[str, str]],
    seed: int,
    *,
    cut_before: int | None,
    failing_sync: int | None,
    over: Callable[[Disk], Disk] = lambda disk: disk,
) -> str:
    """Run a program until it ends or the power does; how the promises were broken."""
    disk = PowerCutDisk(
        cut_before=cut_before, failing_syncs=() if failing_sync is None else (failing_sync,)
    )
    blob = FileBlob(ROOT, disk=over(disk))
    promises = Promises()
    try:
        for number, (verb, key) in enumerate(program):
            promises.write(blob, verb, key, f"{number} {verb} {key}".encode() * 3)
    except (PowerCut, StoreError):
        pass  # A writer that lost a sync stops.
    return promises.broken(FileBlob(ROOT, disk=disk.after_power_cut(random.Random(seed))))


@settings(deadline=None)  # Two cores, shared.
@given(
    program=writes,
    seed=st.integers(0, 2**32),
    cut_before=st.none() | st.integers(0, 60),
    failing_sync=st.none() | st.integers(0, 30),
)
def test_what_was_acknowledged_is_whole_after_a_power_cut(
    program: list[tuple[str, str]], seed: int, cut_before: int | None, failing_sync: int | None
) -> None:
    assert run(program, seed, cut_before=cut_before, failing_sync=failing_sync) == ""


def outcomes(bug: PlantedBug) -> Iterator[str]:
    program = [("put", "part/x"), ("create", "log/0"), ("create", "log/1")]
    for seed in range(6):
        for cut_before in [None, *range(40)]:
            for failing_sync in [None, *range(16)]:
                yield run(
                    program,
                    seed,
                    cut_before=cut_before,
                    failing_sync=failing_sync,
                    over=lambda disk: CarelessDisk(disk, bug),
                )


@pytest.mark.parametrize("bug", list(PlantedBug))
def test_the_checker_catches_a_planted_bug(bug: PlantedBug) -> None:
    assert any(outcomes(bug))


def test_a_batch_is_synced_before_the_entry_that_links_it() -> None:
    def half_linked(disk: PowerCutDisk, over: Disk, seed: int) -> bool:
        try:
            blob = FileBlob(ROOT, disk=over)
            blob.put("part/x", b"a batch")
            Log(blob).create(0, b"links part/x")
        except PowerCut:
            pass
        found = FileBlob(ROOT, disk=disk.after_power_cut(random.Random(seed)))
        return Log(found).read(0) == b"links part/x" and found.get("part/x") != b"a batch"

    cases = [(cut, seed) for cut in range(30) for seed in range(50)]
    disks = [(PowerCutDisk(cut_before=cut), seed) for cut, seed in cases]
    assert not any(half_linked(disk, disk, seed) for disk, seed in disks)
    disks = [(PowerCutDisk(cut_before=cut), seed) for cut, seed in cases]
    assert any(
        half_linked(disk, CarelessDisk(disk, PlantedBug.LINK_BEFORE_SYNC), seed)
        for disk, seed in disks
    )


def visible_and_unsynced() -> PowerCutDisk:
    """A disk on which a writer in another process has linked entry 1 and no more."""
    whole = PowerCutDisk()
    _two_entries(whole)
    at_link = max(number for number, step in enumerate(whole.steps) if step.deed == "link")
    disk = PowerCutDisk(cut_before=at_link + 1)
    with pytest.raises(PowerCut):
        _two_entries(disk)
    disk.restore_power()
    return disk


def _two_entries(disk: PowerCutDisk) -> None:
    log = Log(FileBlob(ROOT, disk=disk))
    log.create(0, b"zero")
    log.create(1, b"one")


def test_an_entry_that_a_reader_has_settled_survives() -> None:
    disk = visible_and_unsynced()
    assert Log(FileBlob(ROOT, disk=disk)).read(1) == b"one"
    for seed in range(30):
        found = FileBlob(ROOT, disk=disk.after_power_cut(random.Random(seed)))
        assert Log(found).read(1) == b"one"


def test_an_entry_that_a_reader_has_merely_seen_may_be_gone() -> None:
    disk = visible_and_unsynced()
    assert FileBlob(ROOT, disk=disk).get(entry_key(1)) == b"one"
    found = {
        Log(FileBlob(ROOT, disk=disk.after_power_cut(random.Random(seed)))).read(1)
        for seed in range(30)
    }
    assert found == {b"one", None}


def test_a_create_does_its_steps_in_order_and_no_others() -> None:
    disk = PowerCutDisk()
    blob = FileBlob(ROOT, disk=disk)
    blob.create("log/0", b"")
    first = len(disk.steps)
    blob.create("log/1", b"")
    assert [step.deed for step in disk.steps[first:]] == [
        "write",
        "sync file",
        "link",
        "sync folder",
        "unlink",
    ]
    assert Step("link", "1") in disk.steps[first:]


@pytest.mark.parametrize("number", range(8))
def test_after_a_failed_sync_nothing_is_written_or_synced_again(number: int) -> None:
    disk = PowerCutDisk(failing_syncs=[number])
    blob = FileBlob(ROOT, disk=disk)
    with pytest.raises(DurabilityLost):
        _create_all(blob, [f"log/{key}" for key in range(8)])
    steps = len(disk.steps)
    for attempt in (
        lambda: blob.create("log/9", b""),
        lambda: blob.put("log/9", b""),
        lambda: blob.delete("log/0"),
        lambda: blob.settle(["log/0"]),
    ):
        with pytest.raises(DurabilityLost, match="takes no more writes"):
            attempt()
    assert len(disk.steps) == steps
    assert blob.get("log/9") is None


def _create_all(blob: FileBlob, keys: list[str]) -> None:
    for key in keys:
        blob.create(key, b"x")


def test_a_failed_sync_while_settling_is_final_too() -> None:
    disk = PowerCutDisk()
    FileBlob(ROOT, disk=disk).create("log/0", b"")
    syncs = sum(step.deed.startswith("sync") for step in disk.steps)
    disk.fail_sync(syncs)
    reader = FileBlob(ROOT, disk=disk)
    for _ in range(2):
        with pytest.raises(DurabilityLost):
            reader.settle(["log/0"])
    assert reader.get("log/0") == b""
