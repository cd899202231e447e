"""Secrets in text of others, whatever their encoding."""

import base64
import json
from urllib.parse import quote

import pytest

from penstock.pipeline.redaction import redact

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
