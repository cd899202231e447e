"""Status table."""

import pytest

from penstock.catalog import LocationStatus, StoredTask
from penstock.cli.status_table import _lag, render
from penstock.supervisor.status import ErrorStatus, SourceStatus


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


def test_status_table_escapes_control_characters_of_names_and_errors():
    error = ErrorStatus(message='table "a\x1b[31m"')
    task = StoredTask("source", "shop\x07", SourceStatus.parse({}), error)
    location = LocationStatus("file:/lake", error, "id", 1, 1, None, [], [task], [], 0)
    printed = render([location])
    assert printed.count("a\\x1b[31m") == 2
    assert "shop\\x07" in printed
    assert all(char == "\n" or char.isprintable() for char in printed)
