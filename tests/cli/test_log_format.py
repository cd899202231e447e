"""Log lines for people and for machines."""

import json
import logging

import pytest

from penstock.cli.log_format import JsonFormatter, log_to_stderr
from penstock.errors import UsageError
from penstock.telemetry import fields


def record(**extra):
    made = logging.LogRecord("penstock.ingest", logging.WARNING, "f", 1, "it failed", (), None)
    for name, value in extra.items():
        setattr(made, name, value)
    return made


def test_a_machine_gets_one_object_a_line_with_every_field():
    line = JsonFormatter().format(record(**fields(source="a\nb", pause_ms=5, what=("x",))))
    assert "\n" not in line
    said = json.loads(line)
    assert said.pop("time_ms") > 0
    assert said == {
        "source": "a\nb",
        "pause_ms": 5,
        "what": "('x',)",
        "level": "warning",
        "logger": "penstock.ingest",
        "message": "it failed",
    }


def test_a_field_never_hides_what_every_line_has():
    said = json.loads(JsonFormatter().format(record(**fields(message="other", level=3))))
    assert (said["message"], said["level"]) == ("it failed", "warning")


@pytest.mark.parametrize("variable", ["PENSTOCK_LOG_FORMAT", "PENSTOCK_LOG_LEVEL"])
def test_a_choice_that_does_not_exist_is_refused(variable, monkeypatch):
    monkeypatch.setenv(variable, "loud")
    with pytest.raises(UsageError, match=f'{variable} is "loud"'):
        log_to_stderr()
