"""Progress lines of an initial snapshot."""

from penstock.cli.snapshot_progress import SnapshotProgress
from penstock.supervisor.status import SourceStatus, State, TableStatus, TaskStatus
from penstock.testing.clocks import ManualClock


def statuses(rows, estimate, phase="loading"):
    table = TableStatus(collection="shop.public.t", phase=phase, rows=rows, estimated_rows=estimate)
    source = SourceStatus.of(tables=(table,))
    return {
        "shop": TaskStatus("source", State.RUNNING, 0, None, source),
        "desk": TaskStatus("materialization", State.STARTING, 0, None, None),
    }


def test_snapshot_progress_line_reports_rows_rate_and_time_left():
    clock = ManualClock()
    progress = SnapshotProgress(clock)
    assert progress.lines(statuses(0, 50_000)) == [
        "shop.public.t: initial snapshot, 0 of about 50,000 rows"
    ]
    clock.move_ms(10_000)
    (line,) = progress.lines(statuses(20_000, 50_000))
    assert line.endswith("20,000 of about 50,000 rows, 2,000 rows/s, about 15 s left")


def test_snapshot_progress_without_row_estimate_reports_rows_read_as_total():
    clock = ManualClock()
    progress = SnapshotProgress(clock)
    assert progress.lines(statuses(70, -1)) == [
        "shop.public.t: initial snapshot, 70 of about 70 rows"
    ]


def test_snapshot_progress_of_live_table_prints_no_line():
    assert SnapshotProgress(ManualClock()).lines(statuses(5, 5, phase="live")) == []
