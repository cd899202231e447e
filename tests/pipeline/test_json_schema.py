"""The schema for editors accepts every file that `load` accepts."""

import copy
import re
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from penstock.connectors import BUILT_IN, built_in
from penstock.errors import UsageError
from penstock.pipeline import load, load_unresolved
from penstock.pipeline.json_schema import file_schema

ROOT = Path(__file__).parents[2]
RULES = re.MULTILINE | re.DOTALL
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OWN_SOURCE = {"write-a-source.md"}
"""Pages whose examples use a source that is not built in; tests/test_source_how_to.py runs them."""

EXAMPLES = {
    f"{page.relative_to(ROOT)}:{page.read_text()[: match.start()].count(chr(10)) + 2}": match[1]
    for page in PAGES
    if page.name not in OWN_SOURCE
    for match in re.finditer(r"^```yaml\n(location:.*?)^```$", page.read_text(), RULES)
}
VARIABLES = {"SHOP_PASSWORD": "s3cr3t", "TEN": "10", "YES": "true", "WORD": "soft", "TIME": "5m"}


@cache
def validator() -> jsonschema.Draft202012Validator:
    connectors = {
        name: (match.endpoint.model_json_schema(), match.resource.model_json_schema())
        for name in BUILT_IN
        for match in [built_in(name)]
    }
    schema = file_schema(connectors)
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_pages_have_examples():
    assert len(EXAMPLES) >= 4


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES.keys())
def test_examples_of_pages_load_and_match_schema(example, tmp_path):
    path = tmp_path / "shop.yaml"
    path.write_text(example)
    load(path, dict.fromkeys(re.findall(r"\$\{(\w+)\}", example), "x"))
    validator().validate(load_unresolved(path))


def file(**changes: Any) -> dict[str, Any]:
    """Return a file with `changes` applied; __ separates keys, and None removes one."""
    made: dict[str, Any] = {
        "location": "file:./lake",
        "tick": "1s",
        "sources": {
            "shop": {"postgres": {"url": "postgresql://h/d", "tables": ["a", {"name": "b"}]}}
        },
        "collections": {"shop.public.b": {"key": "row"}},
        "materializations": {
            "local": {
                "connector": "sqlite",
                "endpoint": {"path": "x.db"},
                "bindings": [{"collection": "shop.public.a", "resource": {"table": "a"}}],
            }
        },
    }
    for keys, value in changes.items():
        *path, last = [int(key) if key.isdecimal() else key for key in keys.split("__")]
        inner: Any = made
        for key in path:
            inner = inner.setdefault(key, {}) if isinstance(inner, dict) else inner[key]
        if value == OUT:
            del inner[last]
        else:
            inner[last] = value
    return made


OUT = "taken out"
POSTGRES = "sources__shop__postgres"
LOCAL = "materializations__local"


@pytest.mark.parametrize(
    "changes",
    [
        {"location": OUT},
        {"location": 5},
        {"tick": 1},
        {"tick": "1 week"},
        {"retian": "24h"},
        {"sources__1x": {"postgres": {"url": "u"}}},
        {"sources__shop__kafka": {}},
        {f"{POSTGRES}__url": OUT},
        {f"{POSTGRES}__connection": {"host": "h"}},
        {f"{POSTGRES}__tables": "a"},
        {f"{POSTGRES}__tables__1__exlude": ["x"]},
        {f"{POSTGRES}__slot_warning": 0},
        {"collections__x": {"key": "rows"}},
        {f"{LOCAL}__size": "1GB"},
        {f"{LOCAL}__shards": 2},
        {f"{LOCAL}__bindings": OUT},
        {f"{LOCAL}__bindings__0__delete": "harder"},
        {f"{LOCAL}__bindings__0__backfill": -1},
        {f"{LOCAL}__connector": {"grpc": {"adress": "x"}}},
    ],
    ids=str,
)
def test_file_that_load_rejects_does_not_match_schema(changes, tmp_path):
    wrong = file(**changes)
    path = tmp_path / "wrong.yaml"
    path.write_text(yaml.safe_dump(wrong))
    with pytest.raises(UsageError):
        load(path, {})
    assert not validator().is_valid(wrong)


@pytest.mark.parametrize(
    "changes",
    [
        {f"{LOCAL}__connector": "sqlight"},
        {f"{LOCAL}__endpoint": OUT},
        {f"{LOCAL}__endpoint": {"pat": "x"}},
        {f"{LOCAL}__bindings__0__resource": {}},
        {f"{LOCAL}__bindings__0__resource__tabel": "x"},
    ],
    ids=str,
)
def test_invalid_connector_config_does_not_match_schema(changes):
    assert not validator().is_valid(file(**changes))


def test_remote_connector_accepts_any_config():
    elsewhere = {"grpc": {"address": "h:1", "tls": {"ca": "x"}, "plaintext": True}}
    validator().validate(
        file(**{f"{LOCAL}__connector": elsewhere, f"{LOCAL}__endpoint": {"any": [1]}})
    )


WORDS = [
    "x",
    "10",
    "true",
    "soft",
    "hard",
    "row",
    "5m",
    "1GiB",
    "per-shard",
    "stop",
    "${TEN}",
    "${YES}",
    "${WORD}",
    "${TIME}",
    "$${TEN}",
]
SCALARS = (None, True, False, 0, 1, 2, -1, 2.0, "", *WORDS)
LISTS = ([], ["x"], [1], [{"name": "t"}], ["t"])
MAPPINGS = (
    {},
    {"x": "y"},
    {"name": "t", "text": ["c"]},
    {"url": "postgresql://h/d"},
    {"type": "object"},
    {"host": "h", "port": 5432},
)
PLACES = {
    "": "location writer tick retain sources collections materializations nope",
    "sources__": "shop shop__progress shop__nope 9",
    f"{POSTGRES}__": "url connection publication tables tables__0 tables__1 snapshot_tasks nope",
    "collections__c__": "key schema document order projections",
    f"{LOCAL}__": "on_error pace size shards consistency nope",
    f"{LOCAL}__bindings__0__": "fields delete backfill delta_updates",
}
places = st.sampled_from([start + end for start, ends in PLACES.items() for end in ends.split()])
values = st.sampled_from((OUT, *SCALARS, *LISTS, *MAPPINGS))


@given(st.dictionaries(places, values, max_size=3))
def test_file_that_load_accepts_matches_schema(tmp_path_factory, changes):
    try:
        made = file(**copy.deepcopy(changes))
    except (LookupError, TypeError, AttributeError):
        return  # One change took away where another was to be.
    path = tmp_path_factory.getbasetemp() / "made.yaml"
    path.write_text(yaml.safe_dump(made))
    try:
        load(path, VARIABLES)
    except UsageError:
        return
    validator().validate(made)
