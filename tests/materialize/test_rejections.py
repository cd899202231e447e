"""Errors of Validate, Apply and Open: rejections are permanent, outages are transient."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.connectors import built_in
from penstock.errors import Corruption, TransientError, UsageError
from penstock.materialize.errors import ConnectorRefused
from penstock.sdk import Refused
from tests.materialize.lake import Endpoint, Table, materializing, once


@pytest.mark.parametrize(
    ("step", "error"),
    [
        ("validate", Refused("no such schema")),
        ("validate", ValueError("no such schema")),
        ("apply", Refused("no such schema")),
        ("apply", ValueError("no such schema")),
        ("open", Refused("no such schema")),
        ("open", Corruption("no such schema", where="staged", detail="It is damaged.")),
    ],
)
def test_connector_rejection_raises_connector_refused_that_names_step(
    lake: str,
    table: Table,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    error: Exception,
) -> None:
    connector, calls = built_in("sqlite"), []

    def reject(*_: Any) -> None:
        calls.append(step)
        raise error

    monkeypatch.setattr(connector, step, reject)
    with (
        materializing(
            lake, Endpoint("sqlite", tmp_path), tmp_path, connector=connector
        ) as rejected,
        pytest.raises(ConnectorRefused, match=f'"local" rejected {step.capitalize()}') as raised,
    ):
        once(rejected)
    assert "no such schema" in str(raised.value)
    assert "penstock resume" in raised.value.hint
    assert len(calls) == 1


@pytest.mark.parametrize("step", ["validate", "apply", "open"])
def test_connector_outage_is_retried_and_log_names_step(
    lake: str,
    table: Table,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    step: str,
) -> None:
    connector, calls = built_in("sqlite"), []
    works = getattr(connector, step)

    def fail_once(*given: Any) -> Any:
        calls.append(step)
        if len(calls) == 1:
            raise TransientError("server is restarting")
        return works(*given)

    monkeypatch.setattr(connector, step, fail_once)
    endpoint = Endpoint("sqlite", tmp_path)
    with (
        caplog.at_level(logging.WARNING, "penstock"),
        materializing(lake, endpoint, tmp_path, connector=connector) as materialization,
    ):
        once(materialization)
    assert endpoint.rows() == table.contents()
    (record,) = [each for each in caplog.records if "retrying" in each.getMessage()]
    assert f"'step': '{step}'" in str(record.__dict__)
    assert "server is restarting" in str(record.__dict__)


def test_hard_deletes_without_connector_support_raise_usage_error_before_apply(
    lake: str, table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connector = built_in("sqlite")
    validate = connector.validate

    def without_deletes(request: Any) -> Any:
        return [replace(answer, accepts_delete=False) for answer in validate(request)]

    monkeypatch.setattr(connector, "validate", without_deletes)
    endpoint = Endpoint("sqlite", tmp_path)
    with (
        materializing(lake, endpoint, tmp_path, connector=connector) as rejected,
        pytest.raises(UsageError, match='cannot delete from resource "t"') as raised,
    ):
        once(rejected)
    assert "delete: ignore" in raised.value.hint
    assert not (tmp_path / "t.db").exists()
    with materializing(
        lake, endpoint, tmp_path, connector=connector, delete="ignore"
    ) as materialization:
        once(materialization)
    assert {row["id"] for row in endpoint.rows()} >= table.rows.keys()
