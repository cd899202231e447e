"""Status as people read it."""

import pytest

from penstock.cli.status_table import _behind


@pytest.mark.parametrize(
    ("source", "lag"),
    [
        ({"lag_bytes": 0, "lag_ms": 0}, "0 bytes, 0.0 s"),
        ({"lag_records": 3, "lag_ms": None}, "3 records"),
        ({"lag_bytes": None, "lag_ms": 5_000}, "unknown"),
        ({"lag_records": None, "lag_ms": 5_000}, "unknown"),
    ],
)
def test_lag_of_source_that_does_not_answer_is_unknown(source, lag):
    assert _behind(source) == lag
