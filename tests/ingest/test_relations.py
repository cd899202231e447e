"""Progress and remap collections of a source, read while the source runs."""

import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock import persist
from penstock.data import DIFF
from penstock.ingest.loop import IngestLoop
from penstock.ingest.progress_views import ProgressFollower, progress_views_in, source_states
from penstock.persist import Collection
from penstock.persist.state_store import StateStore
from penstock.testing.clocks import ManualClock
from penstock.testing.sources import ScriptedSource
from tests.cli.test_commands import lines, penstock
from tests.ingest.test_loop import turn

__all__ = ["turn"]

START = 1_700_000_000_000


def test_notes_that_go_on_between_two_looks_are_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file:{tmp_path}/shop"
    with persist.open(url, writer="w") as client:
        memory = StateStore(client, "shop")
        memory.put({"status": 1})
        snapshot, turns = Collection.snapshot, [2, 3]

        def overtaken(self: Collection, as_of: int) -> Any:
            if turns:
                memory.put({"status": turns.pop()})
                memory.collection.allow_compaction(memory.upper - 1)
                client.compact()
            return snapshot(self, as_of)

        with persist.open(url, hold=False) as elsewhere:
            monkeypatch.setattr(Collection, "snapshot", overtaken)
            assert source_states(elsewhere) == {"shop": {"status": 2}}


@pytest.fixture
def lake(tmp_path: Path) -> str:
    """A lake with a source that has been bound twice: at START and a second later."""
    source, clock = ScriptedSource("kafka"), ManualClock(START)
    with persist.open(f"file:{tmp_path}/src", writer="w") as client:
        ingest = IngestLoop(
            "src",
            source,
            client,
            tick_ms=1_000,
            retain_ms=3_600_000,
            clock=clock,
        )
        committed, stop = source.committed, threading.Event()

        def stop_after_commit(frontier: Any) -> None:
            committed(frontier)
            stop.set()

        monkeypatch = pytest.MonkeyPatch()
        monkeypatch.setattr(source, "committed", stop_after_commit)
        for words in (["one", "two"], ["three"]):
            source.append(0, *words)
            stop.clear()
            ingest.run(stop)
        monkeypatch.undo()
    return f"file:{tmp_path}"


def test_read_progress_as_of_earliest_prints_the_first_binding(lake: str) -> None:
    (earliest,) = lines(penstock("read", lake, "src_progress", "--as-of", "earliest"))
    (latest,) = lines(penstock("read", lake, "src_progress"))
    assert (earliest["offset"], latest["offset"]) == (2, 3)
    tail = ("tail", lake, "src_progress", "--as-of", "earliest", "--until", "latest")
    assert [line["offset"] for line in lines(penstock(*tail))][:1] == [2]


def test_earliest_of_progress_is_the_first_binding_and_of_an_unbound_source_is_since(
    lake: str, tmp_path: Path
) -> None:
    with persist.open(f"{lake}/src", hold=False) as client:
        for each in progress_views_in(client):
            earliest = each.time_of("earliest")
            assert START <= earliest < each.time_of("latest")
            assert each.as_of(earliest).num_rows == 1
    with persist.open(f"file:{tmp_path}/new", writer="w") as client:
        IngestLoop(
            "new",
            ScriptedSource("kafka"),
            client,
            tick_ms=1_000,
            retain_ms=3_600_000,
            clock=ManualClock(START),
        )
        assert [each.time_of("earliest") for each in progress_views_in(client)] == [0, 0]


@pytest.mark.parametrize("as_of", ["-1", "earliest"])
def test_followed_progress_renders_a_snapshot_and_then_each_binding(lake: str, as_of: str) -> None:
    with persist.open(f"{lake}/src", hold=False) as client:
        progress = progress_views_in(client)[0]
        first = progress.time_of("earliest")
        start = first if as_of == "earliest" else -1
        followed = ProgressFollower(progress, start)
        listening = progress.remap.listen(max(start, progress.remap.since), snapshot=start >= 0)
        rendered = []
        with listening as listener:
            while listener.frontier < progress.remap.upper:
                changes = listener.next_changes(timeout_ms=0)
                assert changes is not None
                table = followed.to_progress(changes)
                assert table.schema == progress.schema.append(pa.field(DIFF, pa.int64(), False))
                rendered += [tuple(row.values()) for row in table.to_pylist()]
    assert rendered == [(first, 0, 2, 1), (first + 1, 0, 3, 1)]


def test_followed_progress_adds_each_binding_to_the_offsets_before_it(turn: Any) -> None:
    source = ScriptedSource("kafka")
    source.append(0, "one", "two")
    run = turn(source)
    run.ticks(1)
    progress = progress_views_in(run.client)[0]
    first = progress.time_of("latest")
    followed, offsets = ProgressFollower(progress, first), []
    with progress.remap.listen(first, snapshot=True) as listener:
        for words in (["three"], ["four", "five"], ["six"]):
            changes = listener.next_changes(timeout_ms=0)
            assert changes is not None
            offsets += followed.to_progress(changes).column("offset").to_pylist()
            source.append(0, *words)
            run.ticks(1)
    assert offsets == [2, 3, 5]
