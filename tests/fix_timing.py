"""Tests marked `timing`: the names of failed tests, for `tests.run`."""

import json
import os
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.run import FAILURES

_failed: dict[str, bool] = {}
"""Failed tests by name; True for those marked `timing`."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if any(marker.kwargs.get("reason") for marker in item.iter_markers("timing")):
        report.user_properties.append(("timing", True))
    return report


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("timing"):
        if not marker.kwargs.get("reason"):
            pytest.fail("the marker needs a reason: timing(reason=…)", pytrace=False)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _failed[report.nodeid] = ("timing", True) in map(tuple, report.user_properties)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _failed[report.nodeid] = False


def pytest_sessionfinish(session: pytest.Session) -> None:
    file = os.environ.get(FAILURES)
    if file and not hasattr(session.config, "workerinput"):
        failures = {
            "timing": [name for name, is_timing in _failed.items() if is_timing],
            "final": [name for name, is_timing in _failed.items() if not is_timing],
        }
        Path(file).write_text(json.dumps(failures))
