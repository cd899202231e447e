"""Connector description files and their validation errors."""

from pathlib import Path
from typing import Any

import pytest

from penstock.errors import UsageError
from penstock.testing.conformance import Pattern, load, parse
from penstock.testing.conformance.config import filled

GOOD: dict[str, Any] = {
    "endpoint": {"url": "postgresql://me:hidden-word@db/x"},
    "resource": {"table": "{name}"},
    "pattern": "remote-authoritative",
    "accepts_delete": True,
}


def test_parse_with_required_keys_only_uses_defaults() -> None:
    config = parse(GOOD)
    assert config.pattern is Pattern.REMOTE_AUTHORITATIVE
    assert (config.command, config.read, config.delta_resource) == ((), (), None)
    assert not config.security.tls


def test_load_parses_yaml_and_fills_placeholders(tmp_path: Path) -> None:
    path = tmp_path / "connector.yaml"
    path.write_text(
        "endpoint: {path: x}\nresource: {table: 'a_{name}'}\npattern: push-only\n"
        "accepts_delete: false\ncommand: [serve, '{address}', '{port}']\n"
        "read: [show, '{name}', '{{}}']\ntoken: hidden-word\ntls: {ca: ca.pem}\n"
    )
    config = load(path)
    assert filled(config.read, name="t") == ["show", "t", "{}"]
    assert filled(config.resource, name="t") == {"table": "a_t"}
    assert config.security.tls
    assert config.security.metadata == (("authorization", "Bearer hidden-word"),)
    assert "hidden-word" not in repr(config)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"pattern": "authoritative"}, "pattern"),
        ({"resource": {"table": "same"}}, r"resource: no string contains \{name\}"),
        ({"resource": {"table": "{table}"}}, r"no placeholder \{table\}"),
        ({"command": ["serve", "{adress}"]}, r"command: there is no placeholder \{adress\}"),
        ({"read": ["show", "{address}"]}, r"read: there is no placeholder \{address\}"),
        ({"read": "show {name}"}, "read"),
        ({"acepts_delete": True}, "acepts_delete: there is no such key"),
        ({"accepts_delete": None}, "accepts_delete"),
        ({"endpoint": None}, "endpoint"),
        ({"patience_s": 0}, "patience_s"),
        ({"tls": {"cert": "x"}}, "tls.cert: there is no such key"),
    ],
    ids=lambda each: "-".join(each) if isinstance(each, dict) else "",
)
def test_parse_with_invalid_key_raises_usage_error_naming_the_key(
    change: dict[str, Any], says: str
) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        parse({**GOOD, **change})
    assert "hidden-word" not in f"{caught.value}{caught.value.detail}{caught.value.hint}"


@pytest.mark.parametrize("text", ["- a\n", "a: [\n", ""], ids=["list", "broken", "empty"])
def test_load_config_without_mapping_raises_usage_error(text: str, tmp_path: Path) -> None:
    path = tmp_path / "connector.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"is not a mapping|is not YAML"):
        load(path)


def test_load_config_with_missing_file_raises_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="could not read conformance file"):
        load(tmp_path / "nothing.yaml")
