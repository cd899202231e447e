"""Status table."""

import pytest

from penstock.cli.status_table import _lag
from penstock.supervisor.status import SourceStatus


@pytest.mark.parametrize(
    ("source", "lag"),
    [
        ({"lag_bytes": 0, "lag_ms": 0}, "0 bytes, 0.0 s"),
        ({"lag_records": 3, "lag_ms": None}, "3 records"),
        ({"lag_bytes": None, "lag_ms": 5_000}, "unknown"),
        ({"lag_records": None, "lag_ms": 5_000}, "unknown"),
    ],
)
def test_status_table_without_known_lag_prints_unknown(source, lag):
    assert _lag(SourceStatus.parse(source)) == lag
