"""Log lines as text and as JSON."""

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


def test_json_log_format_writes_one_object_per_line_with_all_fields():
    line = JsonFormatter().format(record(**fields(source="a\nb", pause_ms=5, what=("x",))))
    assert "\n" not in line
    line = json.loads(line)
    assert line.pop("time_ms") > 0
    assert line == {
        "source": "a\nb",
        "pause_ms": 5,
        "what": "('x',)",
        "level": "warning",
        "logger": "penstock.ingest",
        "message": "it failed",
    }


def test_json_log_format_ignores_fields_that_shadow_standard_keys():
    line = json.loads(JsonFormatter().format(record(**fields(message="other", level=3))))
    assert (line["message"], line["level"]) == ("it failed", "warning")


@pytest.mark.parametrize("variable", ["PENSTOCK_LOG_FORMAT", "PENSTOCK_LOG_LEVEL"])
def test_log_setup_with_invalid_environment_variable_raises_usage_error(variable, monkeypatch):
    monkeypatch.setenv(variable, "loud")
    with pytest.raises(UsageError, match=f'value "loud" of variable {variable} is invalid'):
        log_to_stderr()
