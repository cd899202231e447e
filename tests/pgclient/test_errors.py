import pytest

from penstock.errors import TransientError
from penstock.pgclient.errors import connection_error

REJECTED = (
    'connection to server at "127.0.0.1", port 1 failed: FATAL:  28000: no entry for "x"\n'
    "LOCATION:  ClientAuthentication, auth.c:543\n"
)
WRONG_PASSWORD = "failed: FATAL:  28P01: password is wrong\nLOCATION:  auth_failed, auth.c:1\n"


@pytest.mark.parametrize(
    ("message", "sqlstate"),
    [
        (REJECTED, "28000"),
        (REJECTED + WRONG_PASSWORD, "28P01"),
        ("connection refused", TransientError.sqlstate),
        ("FATAL:  password authentication failed", TransientError.sqlstate),
    ],
)
def test_connection_error_has_last_sqlstate_of_verbose_message(message: str, sqlstate: str) -> None:
    error = connection_error("could not connect", message)
    assert error.sqlstate == sqlstate
    assert sqlstate not in error.detail
    assert "LOCATION" not in error.detail
