"""Tasks of a scan, in this process: rows in, files of collections out."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from penstock.data import DIFF
from penstock.errors import DefiniteError, DeterminateError, PenstockError, UsageError
from penstock.ingest.scan_task import Cut, Scanned, ScanTask
from penstock.ingest.snapshot_loader import LoadWatch
from penstock.persist.append.task import Share
from penstock.sources.context import ScanOutput, SideRows
from penstock.testing.sources import SCHEMA, ScriptedSource
from tests.ingest.test_loop import turn

__all__ = ["turn"]

SCANNED = 100
"""Offsets from here on are read by scans."""

SIDE = 200
"""Rows of offsets from here on are put into the side state."""


class WordScan:
    """Rows of the collection `words`; rows with large offsets go to a side state."""

    into = {"words": "words"}  # noqa: RUF012 a property of the protocol
    side_rows = {"side": SideRows("side", SCHEMA)}  # noqa: RUF012 a property of the protocol

    def __init__(self, error: PenstockError | None = None) -> None:
        self.error = error
        self.stored: list[str] = []

    def prepare(self, rows: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
        for batch in rows:
            if self.error is not None:
                raise self.error
            yield pa.Table.from_batches([batch])

    def places(self, rows: pa.Table, count: int) -> pa.Array:
        return pa.array([offset % count for offset in rows.column("offset").to_pylist()])

    def finish(self, rows: Iterable[pa.Table], out: ScanOutput) -> int:
        count = 0
        for table in rows:
            stored = out.stored("words", table.select(["partition", "offset"]))
            assert DIFF not in stored.column_names
            self.stored += stored.column("word").to_pylist()
            is_side = pc.greater_equal(table.column("offset"), SIDE)
            out.put("side", table.filter(is_side))
            out.put("words", table.filter(pc.invert(is_side)))
            count += table.num_rows
        return count


class LocalTasks:
    """Runs the tasks of a scan in this process; each reads its own batches."""

    def __init__(self, *tasks: Sequence[pa.RecordBatch]) -> None:
        self.tasks = [iter(batches) for batches in tasks]
        self.part_bytes: int | None = None
        self.meeting = False
        self.results: list[Scanned] = []
        self.cuts: list[tuple[int, Cut]] = []

    def merges(self, url: str) -> None:
        return None

    def scan(self, task: ScanTask, watch: LoadWatch) -> list[Scanned]:
        assert watch.is_active()
        if self.part_bytes is not None:
            shares = {
                output: replace(share, part_bytes=self.part_bytes)
                for output, share in task.shares.items()
            }
            task = replace(task, shares=shares)
        if self.meeting:
            self.cuts = [cut for rows in self.tasks for cut in task.cut(rows, 2)]
            self.results = [
                task.finish(cut for at, cut in self.cuts if at == place) for place in range(2)
            ]
        else:
            self.results = [task.run(rows) for rows in self.tasks]
        return self.results


class ScanningSource(ScriptedSource):
    """A source whose next tick runs a scan, and records what its tasks returned."""

    def __init__(self) -> None:
        super().__init__("kafka")
        self.scan: WordScan | None = None
        self.returned: list[Any] = []
        self.rows = self.bytes = 0

    def read_into(self, tick: Any, up_to: Any) -> Any:
        reached = super().read_into(tick, up_to)
        if self.scan is not None:
            scan, self.scan = self.scan, None
            before = tick.rows, tick.bytes
            self.returned = tick.scan(scan)
            self.rows, self.bytes = tick.rows - before[0], tick.bytes - before[1]
        return reached


class Scans:
    """A source with a stored word, whose ticks run scans."""

    def __init__(self, turn: Callable[..., Any], tasks: LocalTasks | None) -> None:
        self.source = ScanningSource()
        self.run = turn(self.source, jobs=tasks)
        self.source.append(0, "stored")
        self.run.ticks(1)

    def tick(self, scan: WordScan) -> None:
        self.source.scan = scan
        self.run.ticks(1)

    def words(self) -> list[str]:
        words = self.run.client.collection("words")
        return sorted(data["word"] for data, _, _ in words.snapshot(words.upper - 1))

    def side_state(self) -> list[str]:
        if "src/pending/side" not in self.run.client.collections(hidden=True):
            return []
        parts = self.run.client.collection("src/pending/side").parts()
        return sorted(word for part in parts for word in part.column("word").to_pylist())


def batch_of(*offsets: int) -> pa.RecordBatch:
    rows = [{"partition": "0", "offset": offset, "word": f"word {offset}"} for offset in offsets]
    return pa.RecordBatch.from_pylist(rows, SCHEMA)


@pytest.mark.parametrize("meeting", [False, True], ids=["each alone", "by key"])
@pytest.mark.parametrize("part_bytes", [None, 1], ids=["one part", "many parts"])
def test_scan_writes_each_row_once_and_returns_the_result_of_each_task(
    turn: Callable[..., Any], part_bytes: int | None, meeting: bool
) -> None:
    tasks = LocalTasks(
        [batch_of(0, 101, 102), batch_of(103), batch_of(201, 202)], [batch_of(104, 203)], []
    )
    tasks.part_bytes, tasks.meeting = part_bytes, meeting
    scans, scan = Scans(turn, tasks), WordScan()
    scans.tick(scan)
    assert scans.words() == sorted(["stored", "word 0", *(f"word {n}" for n in range(101, 105))])
    assert scans.side_state() == ["word 201", "word 202", "word 203"]
    assert scan.stored == ["stored"]
    assert scans.source.rows == 5, "side state is not counted"
    assert scans.source.bytes > 0
    batches = [batch for each in tasks.results if (batch := each.batch("words")) is not None]
    if meeting:
        assert scans.source.returned == [4, 4]
        assert {at: sorted(_offsets(tasks, at)) for at in range(2)} == {
            0: [0, 102, 104, 202],
            1: [101, 103, 201, 203],
        }
    else:
        assert scans.source.returned == [6, 2, 0]
        assert [batch.rows for batch in batches] == [4, 1]
        assert [len(batch.parts) for batch in batches] == ([1, 1] if part_bytes is None else [2, 1])


def _offsets(tasks: LocalTasks, place: int) -> list[int]:
    return [
        offset
        for at, cut in tasks.cuts
        if at == place and isinstance(cut, pa.Table)
        for offset in cut.column("offset").to_pylist()
    ]


@pytest.mark.parametrize(("more_bytes", "written"), [(0, [2, 2, 1]), (1, [3, 2])])
def test_task_writes_its_rows_as_soon_as_they_reach_the_size_of_a_part(
    turn: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    more_bytes: int,
    written: list[int],
) -> None:
    """Memory is bounded by the size of a part."""
    batches = [batch_of(offset) for offset in range(101, 106)]
    tasks = LocalTasks(batches)
    tasks.part_bytes = 2 * batches[0].nbytes + more_bytes
    stage, counts = Share.stage, []

    def count(share: Share, rows: Iterable[pa.RecordBatch]) -> Any:
        staged = [*rows]
        counts.append(sum(batch.num_rows for batch in staged))
        return stage(share, staged)

    def put_all(scan: WordScan, rows: Iterable[pa.Table], out: ScanOutput) -> None:
        for table in rows:
            out.put("words", table)

    monkeypatch.setattr(Share, "stage", count)
    monkeypatch.setattr(WordScan, "finish", put_all)
    scans = Scans(turn, tasks)
    scans.tick(WordScan())
    assert counts == written
    assert len(scans.words()) == 6


def test_scan_without_rows_writes_nothing(turn: Callable[..., Any]) -> None:
    tasks = LocalTasks([], [batch_of()])
    scans = Scans(turn, tasks)
    scans.tick(WordScan())
    assert scans.words() == ["stored"]
    assert scans.source.returned == [0, 0]
    assert [each.batches for each in tasks.results] == [{}, {}]


@pytest.mark.parametrize("meeting", [False, True], ids=["each alone", "by key"])
def test_scan_whose_task_reports_an_error_raises_it_and_writes_nothing(
    turn: Callable[..., Any], meeting: bool
) -> None:
    tasks = LocalTasks([batch_of(101), batch_of(102)])
    tasks.meeting = meeting
    scans = Scans(turn, tasks)
    error = DefiniteError("record is not readable")
    with pytest.raises(DefiniteError) as caught:
        scans.tick(WordScan(error))
    assert caught.value is error
    assert [*tasks.tasks[0]] == [], "Spark loses a worker that leaves rows unread"
    assert scans.words() == ["stored"]


@pytest.mark.parametrize("meeting", [False, True], ids=["each alone", "by key"])
def test_task_that_could_not_reach_the_store_raises_so_that_spark_retries_it(
    turn: Callable[..., Any], meeting: bool
) -> None:
    tasks = LocalTasks([batch_of(101)])
    tasks.meeting = meeting
    scans, error = Scans(turn, tasks), DeterminateError("store is away")
    with pytest.raises(DeterminateError) as caught:
        scans.tick(WordScan(error))
    assert caught.value is error
    assert tasks.results == []


def test_scan_without_spark_raises_usage_error(turn: Callable[..., Any]) -> None:
    scans = Scans(turn, None)
    with pytest.raises(UsageError, match='source "src" needs a Spark session'):
        scans.tick(WordScan())
