"""A pipeline file is loaded, or rejected with the line of each problem."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import UsageError
from penstock.pipeline import load, load_unresolved
from penstock.pipeline.units import parse_duration_ms, parse_size
from penstock.pipeline.yaml_text import UnsetVariable, escape, substitute
from penstock.sources.postgres.names import TableName

GOOD = """\
location: file:./penstock-data
writer: laptop-1
tick: 250ms
retain: 24h
sources:
  shop:
    postgres:
      url: postgresql://penstock:${SHOP_PASSWORD}@db.example/shop
      publication: penstock
      tables: [public.orders, {name: public.customers, exclude: [photo], text: [odd]}]
    progress: shop_progress
"""


LAUGHS = (
    "{c0: &c0 [x]"
    + "".join(f", c{n + 1}: &c{n + 1} [{', '.join([f'*c{n}'] * 9)}]" for n in range(30))
    + "}"
)
"""Anchors that each stand for nine of the previous one."""


def write_file(folder: Path, text: str) -> Path:
    path = folder / "shop.yaml"
    path.write_text(text)
    return path


def test_load_reads_the_file_of_the_readme(tmp_path):
    pipeline = load(write_file(tmp_path, GOOD), {"SHOP_PASSWORD": "s3cr3t"})
    shop = pipeline.sources["shop"]
    assert (pipeline.writer, pipeline.tick, pipeline.retain) == ("laptop-1", 250, 86_400_000)
    assert shop.progress == "shop_progress"
    assert shop.postgres.parameters["password"] == "s3cr3t"
    assert shop.postgres.tables is not None
    assert [table.name for table in shop.postgres.tables] == [
        TableName("public", "orders"),
        TableName("public", "customers"),
    ]
    assert shop.postgres.tables[1].exclude == ("photo",)
    assert "s3cr3t" not in repr(pipeline)


def test_load_applies_defaults(tmp_path):
    text = "location: memory:x\nsources: {s: {postgres: {url: 'postgresql://h/d'}}}\n"
    pipeline = load(write_file(tmp_path, text), {})
    assert (pipeline.writer, pipeline.tick, pipeline.retain) == (None, 1_000, 86_400_000)
    assert pipeline.sources["s"].postgres.tables is None


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("tick: 250ms", "tick: fast", "line 3, tick: this is not a length of time; write a whole"),
        ("tick: 250ms", "tick: 0s", "line 3, tick: this value is not accepted; give more than 0"),
        ("tick: 250ms", f"tick: {'9' * 23}d", "line 3, tick: this is too much; give 36500d at"),
        (
            "retain: 24h",
            f"retain: {'9' * 5_000}ms",
            "line 4, retain: this is too much; give 36500d",
        ),
        (
            "publication: penstock",
            f"slot_warning: '{'9' * 5_000}'",
            "a number of 18 digits at most",
        ),
        ("laptop-1", "''", "line 2, writer: this value is not accepted; give some text"),
        ("publication: penstock", f"publication: {'s3cr3t' * 20}", "publication has 120 bytes"),
        (
            "tick: 250ms",
            f"collections: {'[' * 3_000}{']' * 3_000}",
            "line 3, the file: this is more",
        ),
        ("tick: 250ms", f"collections: {LAUGHS}", "collections.c6: its anchors stand for more"),
        (
            "retain: 24h",
            "retian: 24h",
            'there is no such key here; did you mean "retain"? Valid keys are:',
        ),
        ("publication: penstock", "slot: mine", "line 9, sources.shop.postgres.slot: there is no"),
        (
            "publication: penstock",
            "slot: mine",
            "; valid keys are: url, connection, publication, tables,",
        ),
        (
            "publication: penstock",
            "slot_warning: [1]",
            "slot_warning: this value is not accepted; give a whole number",
        ),
        ("  shop:", "  1shop!:", "line 6, sources.1shop!"),
        ("location: file:./penstock-data\n", "", "line 1, location: this key is missing"),
        (
            "exclude: [photo]",
            "exclude: photo",
            "postgres.tables.1.exclude: this value is not accepted; give a list",
        ),
        ("text: [odd]", "text: [photo]", 'line 10, sources.shop.postgres.tables.1: column "photo"'),
        ("public.orders,", "a.b.c,", 'postgres.tables.0: table name "a.b.c" cannot be understood'),
        ("public.orders,", "7,", "write a name such as public.orders, or a mapping"),
        ("    postgres:", "    kafka:", "there is no such key here"),
        ("location: file:./penstock-data", "location: [", "is not YAML Line"),
        ("tick: 250ms", "location: x", "line 3, location: this key exists already at line 1"),
        (
            "tick: 250ms",
            "collections: {c: {key: 5}}",
            "collections.c.key: this value is not accepted; give a list or 'row'",
        ),
        (
            "tick: 250ms",
            "collections: {c: {key: [5]}}",
            "collections.c.key.0: this value is not accepted; give text",
        ),
        ("tick: 250ms", "collections: &c [*c]", "an anchor contains itself"),
        (
            "tick: 250ms",
            "materializations: {m: {connector: {grpc: {adress: x}}, bindings: []}}",
            'materializations.m.connector.grpc.adress: there is no such key here; did you mean "a',
        ),
        (
            "tick: 250ms",
            "materializations: {m: {connector: sqlite, bindings: [\n{delete: s3cr3t}]}}",
            "bindings.0.delete: this value is not accepted; give 'hard', 'soft' or 'ignore'",
        ),
    ],
)
def test_invalid_value_is_reported_with_line_and_key(tmp_path, old, new, expected):
    assert old in GOOD
    with pytest.raises(UsageError) as caught:
        load(write_file(tmp_path, GOOD.replace(old, new)), {"SHOP_PASSWORD": "s3cr3t"})
    problems = caught.value.problems
    texts = [
        f"{problem.message}; {problem.hint[:1].lower()}{problem.hint[1:]}" for problem in problems
    ]
    texts.append(f"{caught.value} {caught.value.detail} {caught.value.hint}")
    assert any(expected in text for text in texts), texts
    assert "s3cr3t" not in " ".join(texts)


def test_unset_variable_is_reported_with_its_key(tmp_path):
    with pytest.raises(
        UsageError, match=r"SHOP_PASSWORD. at line 8, sources\.shop\.post"
    ) as caught:
        load(write_file(tmp_path, GOOD.replace("laptop-1", "${HOST}-1")), {})
    assert caught.value.detail.splitlines() == [
        "${HOST} at line 2, writer",
        "${SHOP_PASSWORD} at line 8, sources.shop.postgres.url",
    ]
    assert "export HOST=… SHOP_PASSWORD=…" in caught.value.hint


def test_all_problems_are_reported_together(tmp_path):
    text = GOOD.replace("tick: 250ms", "tick: 5").replace("tables:", "table:")
    with pytest.raises(UsageError, match=r"wrong at line 3, tick: .*, and 1 more") as caught:
        load(write_file(tmp_path, text), {"SHOP_PASSWORD": "s3cr3t"})
    heading, first, first_hint, second, second_hint = caught.value.detail.splitlines()
    assert heading == "2 problems:"
    assert first.startswith("1. line 3, tick: ")
    assert first_hint.startswith("   hint: ")
    assert second == "2. line 10, sources.shop.postgres.table: there is no such key here"
    assert second_hint.startswith('   hint: Did you mean "tables"? Valid keys are: url, connection')


def test_anchor_is_expanded(tmp_path):
    text = """\
location: memory:x
sources:
  a: {postgres: &server {url: "postgresql://h/a", publication: p}}
  b: {postgres: {<<: *server, url: "postgresql://h/b"}}
"""
    sources = load(write_file(tmp_path, text), {}).sources
    assert [problem.postgres.parameters["dbname"] for problem in sources.values()] == ["a", "b"]
    assert sources["b"].postgres.publication == "p"
    with pytest.raises(UsageError, match=r"line 4, sources\.b\.postgres\.url: this value"):
        load(write_file(tmp_path, text.replace('"postgresql://h/b"', "5")), {})


def test_double_dollar_is_literal(tmp_path):
    text = 'location: memory:x\nwriter: "$${A}-${A}-$$${A}-$A"\n'
    assert load(write_file(tmp_path, text), {"A": "1"}).writer == "${A}-1-$${A}-$A"


@given(st.text(alphabet="$${}{}AB_1 "))
def test_substitute_inverts_escape(text):
    missing: list[UnsetVariable] = []
    assert substitute(escape({"k": [text]}), {}, missing) == {"k": [text]}
    assert missing == []


@pytest.mark.parametrize("schema", ["[" * 3_000, LAUGHS, "&a [*a]"], ids=["deep", "much", "itself"])
def test_schema_beyond_limits_raises_usage_error(tmp_path, schema):
    (tmp_path / "c.yaml").write_text(schema)
    text = GOOD + "collections: {c: {key: [/id], schema: c.yaml}}\n"
    with pytest.raises(UsageError, match='of collection "c" cannot be read'):
        load(write_file(tmp_path, text), {"SHOP_PASSWORD": "s3cr3t"})


def test_unresolved_file_has_no_values_and_loads_equally(tmp_path):
    (tmp_path / "c.yaml").write_text("{type: object, title: '${SHOP_PASSWORD}'}")
    text = GOOD + "collections: {c: {key: [/id], schema: '${NAME}.yaml'}}\n"
    environment = {"SHOP_PASSWORD": "s3cr3t", "NAME": "c"}
    unresolved = load_unresolved(write_file(tmp_path, text), environment)
    assert "s3cr3t" not in repr(unresolved)
    assert "${SHOP_PASSWORD}" in unresolved["sources"]["shop"]["postgres"]["url"]
    assert unresolved["collections"]["c"]["schema"]["type"] == "object"
    pipeline = load(write_file(tmp_path, text), environment)
    assert pipeline.collections["c"].documents == {"type": "object", "title": "${SHOP_PASSWORD}"}
    (tmp_path / "c.yaml").unlink()
    again = write_file(tmp_path, yaml.safe_dump(unresolved))
    assert load(again, environment) == pipeline


@pytest.mark.parametrize(
    ("text", "expected"),
    [("'${N}'", 3), ("3", 3), ("'3'", 3), ("3.0", None), ("true", None), ("'${WORD}'", None)],
)
def test_variable_can_be_a_number(tmp_path, text, expected):
    section = f"{{connector: sqlite, bindings: [], consistency: per-shard, shards: {text}}}"
    path = write_file(tmp_path, f"location: memory:x\nmaterializations: {{m: {section}}}\n")
    if expected is None:
        with pytest.raises(UsageError, match=r"(?s)m\.shards: .*Give a whole number"):
            load(path, {"WORD": "s3cr3t"})
    else:
        assert load(path, {"N": "3"}).materializations["m"].shards == expected


def test_variable_value_cannot_change_the_structure(tmp_path):
    pipeline = load(write_file(tmp_path, GOOD), {"SHOP_PASSWORD": "a%20b"})
    assert pipeline.sources["shop"].postgres.parameters["password"] == "a b"
    with pytest.raises(UsageError) as caught:
        load(write_file(tmp_path, GOOD), {"SHOP_PASSWORD": "x/y\n: [z"})
    assert "x/y" not in f"{caught.value} {caught.value.detail}"


def test_missing_file_is_named_in_the_error(tmp_path):
    with pytest.raises(UsageError, match=r"gone\.yaml.*cannot be read"):
        load(tmp_path / "gone.yaml")


@pytest.mark.parametrize(
    ("text", "expected"), [("250ms", 250), ("1s", 1_000), ("5m", 300_000), ("2 h", 7_200_000)]
)
def test_duration_is_parsed_to_milliseconds(text, expected):
    assert parse_duration_ms(text) == expected


@pytest.mark.parametrize("text", ["", "1", "s", "1.5s", "-1s", "1w", None, 5])
def test_invalid_duration_raises_usage_error(text):
    with pytest.raises(UsageError, match="not a length of time"):
        parse_duration_ms(text)


@pytest.mark.parametrize(("text", "expected"), [("64KiB", 1 << 16), (" 1 TiB ", 1 << 40)])
def test_size_is_parsed_to_bytes(text, expected):
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "1", "1GB", "1gib", "-1GiB", "1.5GiB", None, 5])
def test_invalid_size_raises_usage_error(text):
    with pytest.raises(UsageError, match="not a size"):
        parse_size(text)
