"""Progress lines of an initial snapshot."""

from penstock.cli.copying import Copies
from penstock.testing.clocks import ManualClock


def told(rows, about, phase="loading"):
    table = {"collection": "shop.public.t", "phase": phase, "rows": rows, "estimated_rows": about}
    return {"shop": {"tables": [table]}, "desk": {}}


def test_snapshot_progress_line_reports_rows_rate_and_time_left():
    clock = ManualClock()
    copies = Copies(clock)
    assert copies.lines(told(0, 50_000)) == ["shop.public.t: copying, 0 of about 50,000 rows"]
    clock.move_ms(10_000)
    assert copies.lines(told(20_000, 50_000)) == [
        "shop.public.t: copying, 20,000 of about 50,000 rows, 2,000 rows/s, about 15 s left"
    ]


def test_snapshot_progress_without_row_estimate_reports_rows_read_as_total():
    clock = ManualClock()
    copies = Copies(clock)
    assert copies.lines(told(70, -1)) == ["shop.public.t: copying, 70 of about 70 rows"]


def test_snapshot_progress_of_live_table_prints_no_line():
    assert Copies(ManualClock()).lines(told(5, 5, phase="live")) == []
