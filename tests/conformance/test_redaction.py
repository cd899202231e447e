"""Redaction of secrets, always before truncation."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.messages import SpecResponse
from penstock.testing.conformance import Config, parse
from penstock.testing.conformance.check import Failed
from penstock.testing.conformance.documents import render
from penstock.testing.conformance.process import Connectors
from penstock.testing.conformance.redaction import hider


def described(**more: Any) -> Config:
    return parse(
        {
            "endpoint": {},
            "resource": {"table": "{name}"},
            "pattern": "remote-authoritative",
            "accepts_delete": True,
            **more,
        }
    )


@pytest.mark.parametrize(
    ("more", "secret"),
    [
        ({"endpoint": {"password": 12345678}}, "12345678"),
        ({"endpoint": {"pwd": "hunter22"}}, "hunter22"),
        ({"endpoint": {"aws_access_key": "AKIA1234"}}, "AKIA1234"),
        ({"endpoint": {"credentials": {"value": ["hunter22"]}}}, "hunter22"),
        ({"endpoint": {"dsn": "host=x password=hunter22 user=y"}}, "hunter22"),
        ({"endpoint": {"dsn": r"password = 'hunter\' 22' user=y"}}, "hunter' 22"),
        ({"endpoint": {"dsn": "Server=x;Pwd=hunter22;Uid=y"}}, "hunter22"),
        ({"endpoint": {"url": "postgres://h/db?password=hunter%2022&user=y"}}, "hunter 22"),
        ({"endpoint": {"url": "postgres://u:p@ssw0rd@h/db"}}, "p@ssw0rd"),
        ({"endpoint": {"url": "postgres://u:pass/word@h/db"}}, "pass/word"),
        ({"endpoint": {"url": "postgres://me@corp:hunter22@h/db?mail=a@b"}}, "hunter22"),
        ({"endpoint": {"urls": "x://u:first22@h/db,x://u:second22@h/db"}}, "second22"),
        ({"resource": {"table": "{name}", "token": "hunter22"}}, "hunter22"),
        ({"delta_resource": {"table": "{name}", "token": "hunter22"}}, "hunter22"),
        ({"command": ["serve", "--password", "hunter22", "{address}"]}, "hunter22"),
        ({"command": ["serve", "--db-password=hunter22", "{address}"]}, "hunter22"),
        ({"read": ["sh", "-c", "PGPASSWORD=hunter22 psql {name}"]}, "hunter22"),
        ({"read": ["psql", "postgres://u:hunter22@h/db", "{name}"]}, "hunter22"),
        ({"token": "hunter22"}, "hunter22"),
    ],
)
def test_hider_redacts_secret_anywhere_in_config(more: dict[str, Any], secret: str) -> None:
    assert hider(described(**more))(f"that {secret} is wrong") == "that *** is wrong"


@pytest.mark.parametrize("mark", [{"writeOnly": True}, {"format": "password"}, {"secret": True}])
@pytest.mark.parametrize("inner", [False, True], ids=["at the top", "by reference"])
def test_hider_redacts_values_marked_secret_in_schema(mark: dict[str, Any], inner: bool) -> None:
    login = {"anyOf": [{"type": "string", **mark}, {"type": "null"}]}
    schema: dict[str, Any] = {"properties": {"login": login, "next": {"$ref": "#"}}}
    if inner:
        schema = {"properties": {"to": {"$ref": "#/$defs/To"}}, "$defs": {"To": schema}}
    endpoint = {"login": "hunter22", "other": "is shown"}
    config = described(endpoint={"to": endpoint} if inner else endpoint)
    text = "hunter22 is shown"
    assert hider(config)(text) == text
    assert hider(config, SpecResponse(json.dumps(schema), "{"))(text) == "*** is shown"
    assert hider(config, SpecResponse("[]", json.dumps(schema)))(text) == "*** is shown"


def test_hider_keeps_short_and_non_secret_values() -> None:
    endpoint = {"password": "abc", "secure": True, "token": None, "secret": False, "port": 5432}
    text = "abcdef True None False 5432, http://host:80/path"
    assert hider(described(endpoint=endpoint))(text) == text


@given(st.integers(0, 300))
def test_render_redacts_before_truncating(before: int) -> None:
    hide = hider(described(token="0123456789"))
    assert "0123" not in render("x" * before + "0123456789" + "x" * 200, hide)


@pytest.mark.parametrize("before", range(1_985, 2_003, 3))
def test_stderr_of_failed_read_command_is_redacted_before_truncation(
    before: int, tmp_path: Path
) -> None:
    script = "import sys; sys.exit('0123456789' + 'x' * int(sys.argv[1]))"
    read = [sys.executable, "-S", "-E", "-c", script, str(before), "{name}"]
    connectors = Connectors(described(token="0123456789", read=read), "127.0.0.1:1", tmp_path)
    with pytest.raises(Failed, match="ended with status 1") as caught:
        connectors.rows("t")
    assert caught.value.detail.strip().endswith("xxx")
    assert "789" not in caught.value.detail


def test_invalid_row_of_read_command_is_redacted_before_truncation(tmp_path: Path) -> None:
    script = "print('x' * 195 + '0123456789')"
    read = [sys.executable, "-S", "-E", "-c", script, "{name}"]
    connectors = Connectors(described(token="0123456789", read=read), "127.0.0.1:1", tmp_path)
    with pytest.raises(Failed, match="not a JSON object") as caught:
        connectors.rows("t")
    assert "xxx" in caught.value.detail
    assert "012" not in caught.value.detail


@pytest.mark.parametrize("after", [19_995, 19_999, 20_003])
def test_last_lines_of_connector_log_are_complete_and_redacted(after: int, tmp_path: Path) -> None:
    connectors = Connectors(described(token="0123456789"), "127.0.0.1:1", tmp_path)
    log = tmp_path / "log"
    connectors._logs.append(log)
    log.write_text(f"of before\n0123456789{'x' * (after - 10)}\nlast\n")
    assert connectors.last_lines({}) == ["last"]
    log.write_text("of before\nfirst 0123456789\nlast")
    assert connectors.last_lines({log: len("of before\n")}) == ["first ***", "last"]
    assert connectors.last_lines({log: len("of before\nfirst 01234")}) == ["last"]
    assert connectors.last_lines({}) == ["of before", "first ***", "last"]
