"""First copies told: how far, how fast, how long still."""

from penstock.cli.copying import Copies
from penstock.testing.clocks import ManualClock


def told(rows, about, phase="loading"):
    table = {"collection": "shop.public.t", "phase": phase, "rows": rows, "estimated_rows": about}
    return {"shop": {"tables": [table]}, "desk": {}}


def test_rows_rate_and_estimate():
    clock = ManualClock()
    copies = Copies(clock)
    assert copies.lines(told(0, 50_000)) == ["shop.public.t: copying, 0 of about 50,000 rows"]
    clock.move_ms(10_000)
    assert copies.lines(told(20_000, 50_000)) == [
        "shop.public.t: copying, 20,000 of about 50,000 rows, 2,000 rows/s, about 15 s left"
    ]


def test_a_table_that_was_never_counted_is_not_full_before_it_is():
    clock = ManualClock()
    copies = Copies(clock)
    assert copies.lines(told(70, -1)) == ["shop.public.t: copying, 70 of about 70 rows"]


def test_nothing_is_said_of_what_is_not_copied():
    assert Copies(ManualClock()).lines(told(5, 5, phase="live")) == []
