"""Redaction of secrets in all encodings."""

import base64
import json
from urllib.parse import quote

import pytest

from penstock.protocol.redaction import redact, secret_fields

SECRET = 'p@ss/w"ord~?>secret'


@pytest.mark.parametrize("before", ["", "a", "ab", "abc"])
@pytest.mark.parametrize("encode", [base64.b64encode, base64.urlsafe_b64encode])
def test_redact_removes_base64_at_every_alignment(before: str, encode: object) -> None:
    assert callable(encode)
    text = encode(f"{before}{SECRET}xyz".encode()).decode()
    middle = encode(SECRET[6:12].encode()).decode().rstrip("=")[1:-1]
    redacted = redact(text, {"password": SECRET})
    assert "***" in redacted
    assert middle not in redacted
    assert len(redacted) < len(text) - 12


@pytest.mark.parametrize(
    "text", [SECRET, quote(SECRET, ""), json.dumps(SECRET), SECRET.encode().hex()]
)
def test_redact_removes_other_encodings(text: str) -> None:
    assert redact(f"a {text} b", {"password": SECRET}).strip('"') in ("a *** b", 'a "***" b')
    url = f"postgresql://u:{quote(SECRET, '')}@host/db"
    assert SECRET not in redact(f"a {text} b", {"url": url})


@pytest.mark.parametrize(
    "mark",
    [{"secret": True}, {"writeOnly": True}, {"airbyte_secret": True}, {"format": "password"}],
)
def test_secret_fields_returns_marked_properties_at_every_depth(mark: dict[str, object]) -> None:
    schema = {
        "properties": {
            "host": {"type": "string"},
            "logins": {"items": {"anyOf": [{"$ref": "#/$defs/login"}, {"type": "null"}]}},
        },
        "$defs": {"login": {"properties": {"phrase": {"type": "string", **mark}}}},
    }
    assert secret_fields(json.dumps(schema), "no JSON") == {"phrase"}


@pytest.mark.parametrize(
    ("config", "secret"),
    [
        ({"phrase": "hunter-22"}, "hunter-22"),
        ({"phrase": 12345678}, "12345678"),
        ({"phrase": {"inner": ["hunter-22"]}}, "hunter-22"),
        ({"phrase": "x://u:hunter-22@host"}, "hunter-22"),
        ({"key": "AKIA-123456789"}, "AKIA-123456789"),
        ({"serviceKey": "AKIA-123456789"}, "AKIA-123456789"),
        ({"dsn": "me:hunter-22@tcp(host:3306)/db"}, "hunter-22"),
        ({"dsn": "host=x password='hunter-22' user=y"}, "hunter-22"),
        ({"connection_string": "Server=x;Pwd=hunter-22;Uid=y"}, "hunter-22"),
    ],
)
def test_redact_removes_marked_and_named_secrets(config: dict[str, object], secret: str) -> None:
    assert redact(f"that {secret} is wrong", config, {"phrase"}) == "that *** is wrong"


@pytest.mark.parametrize("config", [{"key": "customer_id"}, {"partition_key": "customer_identity"}])
def test_redact_leaves_names_of_key_columns(config: dict[str, str]) -> None:
    (column,) = config.values()
    assert redact(f"column {column} is missing", config) == f"column {column} is missing"


def test_redact_removes_logins_of_urls_that_are_not_in_the_configuration() -> None:
    assert (
        redact("no route to amqp://me:hunter-22@host/x", {}) == "no route to amqp://me:***@host/x"
    )
