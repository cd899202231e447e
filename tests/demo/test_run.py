"""Progress lines of the demo."""

from penstock.demo.run import _lag_text
from penstock.materialize.status import Status


def test_demo_progress_before_first_transaction_reports_unknown_lag() -> None:
    status = Status(["shop.public.orders"], 0)
    assert _lag_text(status.snapshot()) == "the lag of SQLite is unknown"
    status.lag_ms = 1_500
    assert _lag_text(status.snapshot()) == "SQLite is 1.5 s behind the collections"
