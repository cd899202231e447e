"""A pipeline's file is read as it says, or refused at the line that is wrong."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import UsageError
from penstock.pipeline import load, load_written
from penstock.pipeline.measures import bytes_of, milliseconds
from penstock.pipeline.written import Missing, escaped, interpolated
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
"""A line of anchors that each stand for nine of the one before."""


def written(folder: Path, text: str) -> Path:
    path = folder / "shop.yaml"
    path.write_text(text)
    return path


def test_the_file_of_the_readme_is_read(tmp_path):
    pipeline = load(written(tmp_path, GOOD), {"SHOP_PASSWORD": "s3cr3t"})
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


def test_what_is_left_out_has_a_default(tmp_path):
    text = "location: memory:x\nsources: {s: {postgres: {url: 'postgresql://h/d'}}}\n"
    pipeline = load(written(tmp_path, text), {})
    assert (pipeline.writer, pipeline.tick, pipeline.retain) == (None, 1_000, 86_400_000)
    assert pipeline.sources["s"].postgres.tables is None


@pytest.mark.parametrize(
    ("was", "now", "told"),
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
        ("public.orders,", "7,", "give a name like public.orders, or a mapping"),
        ("    postgres:", "    kafka:", "there is no such key here"),
        ("location: file:./penstock-data", "location: [", "is not YAML Line"),
        ("tick: 250ms", "location: x", "line 3, location: this key is there already, at line 1"),
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
        ("tick: 250ms", "collections: &c [*c]", "an anchor holds itself"),
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
def test_what_is_wrong_is_told_at_its_line(tmp_path, was, now, told):
    assert was in GOOD
    with pytest.raises(UsageError) as caught:
        load(written(tmp_path, GOOD.replace(was, now)), {"SHOP_PASSWORD": "s3cr3t"})
    problems = caught.value.problems
    texts = [f"{each.message}; {each.hint[:1].lower()}{each.hint[1:]}" for each in problems]
    texts.append(f"{caught.value} {caught.value.detail} {caught.value.hint}")
    assert any(told in text for text in texts), texts
    assert "s3cr3t" not in " ".join(texts)


def test_a_variable_that_is_not_set_is_named_with_its_key(tmp_path):
    with pytest.raises(
        UsageError, match=r"SHOP_PASSWORD. at line 8, sources\.shop\.post"
    ) as caught:
        load(written(tmp_path, GOOD.replace("laptop-1", "${HOST}-1")), {})
    assert caught.value.detail.splitlines() == [
        "${HOST} at line 2, writer",
        "${SHOP_PASSWORD} at line 8, sources.shop.postgres.url",
    ]
    assert "export HOST=… SHOP_PASSWORD=…" in caught.value.hint


def test_all_that_is_wrong_is_told_each_on_its_line(tmp_path):
    text = GOOD.replace("tick: 250ms", "tick: 5").replace("tables:", "table:")
    with pytest.raises(UsageError, match=r"wrong at line 3, tick: .*, and 1 more") as caught:
        load(written(tmp_path, text), {"SHOP_PASSWORD": "s3cr3t"})
    heading, first, first_hint, second, second_hint = caught.value.detail.splitlines()
    assert heading == "2 problems:"
    assert first.startswith("1. line 3, tick: ")
    assert first_hint.startswith("   hint: ")
    assert second == "2. line 10, sources.shop.postgres.table: there is no such key here"
    assert second_hint.startswith('   hint: Did you mean "tables"? Valid keys are: url, connection')


def test_an_anchor_is_what_it_stands_for(tmp_path):
    text = """\
location: memory:x
sources:
  a: {postgres: &server {url: "postgresql://h/a", publication: p}}
  b: {postgres: {<<: *server, url: "postgresql://h/b"}}
"""
    sources = load(written(tmp_path, text), {}).sources
    assert [each.postgres.parameters["dbname"] for each in sources.values()] == ["a", "b"]
    assert sources["b"].postgres.publication == "p"
    with pytest.raises(UsageError, match=r"line 4, sources\.b\.postgres\.url: this value"):
        load(written(tmp_path, text.replace('"postgresql://h/b"', "5")), {})


def test_two_dollars_are_one(tmp_path):
    text = 'location: memory:x\nwriter: "$${A}-${A}-$$${A}-$A"\n'
    assert load(written(tmp_path, text), {"A": "1"}).writer == "${A}-1-$${A}-$A"


@given(st.text(alphabet="$${}{}AB_1 "))
def test_what_is_escaped_comes_back(text):
    missing: list[Missing] = []
    assert interpolated(escaped({"k": [text]}), {}, missing) == {"k": [text]}
    assert missing == []


@pytest.mark.parametrize("schema", ["[" * 3_000, LAUGHS, "&a [*a]"], ids=["deep", "much", "itself"])
def test_a_schema_that_is_too_much_is_refused(tmp_path, schema):
    (tmp_path / "c.yaml").write_text(schema)
    text = GOOD + "collections: {c: {key: [/id], schema: c.yaml}}\n"
    with pytest.raises(UsageError, match='of collection "c" cannot be read'):
        load(written(tmp_path, text), {"SHOP_PASSWORD": "s3cr3t"})


def test_what_was_written_holds_no_values_and_means_the_same(tmp_path):
    (tmp_path / "c.yaml").write_text("{type: object, title: '${SHOP_PASSWORD}'}")
    text = GOOD + "collections: {c: {key: [/id], schema: '${NAME}.yaml'}}\n"
    environment = {"SHOP_PASSWORD": "s3cr3t", "NAME": "c"}
    said = load_written(written(tmp_path, text), environment)
    assert "s3cr3t" not in repr(said)
    assert "${SHOP_PASSWORD}" in said["sources"]["shop"]["postgres"]["url"]
    assert said["collections"]["c"]["schema"]["type"] == "object"
    pipeline = load(written(tmp_path, text), environment)
    assert pipeline.collections["c"].documents == {"type": "object", "title": "${SHOP_PASSWORD}"}
    (tmp_path / "c.yaml").unlink()
    again = written(tmp_path, yaml.safe_dump(said))
    assert load(again, environment) == pipeline


@pytest.mark.parametrize(
    ("text", "expected"),
    [("'${N}'", 3), ("3", 3), ("'3'", 3), ("3.0", None), ("true", None), ("'${WORD}'", None)],
)
def test_a_variable_may_be_a_number(tmp_path, text, expected):
    section = f"{{connector: sqlite, bindings: [], consistency: per-shard, shards: {text}}}"
    path = written(tmp_path, f"location: memory:x\nmaterializations: {{m: {section}}}\n")
    if expected is None:
        with pytest.raises(UsageError, match=r"(?s)m\.shards: .*Give a whole number"):
            load(path, {"WORD": "s3cr3t"})
    else:
        assert load(path, {"N": "3"}).materializations["m"].shards == expected


def test_a_secret_cannot_change_what_the_file_means(tmp_path):
    pipeline = load(written(tmp_path, GOOD), {"SHOP_PASSWORD": "a%20b"})
    assert pipeline.sources["shop"].postgres.parameters["password"] == "a b"
    with pytest.raises(UsageError) as caught:
        load(written(tmp_path, GOOD), {"SHOP_PASSWORD": "x/y\n: [z"})
    assert "x/y" not in f"{caught.value} {caught.value.detail}"


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"gone\.yaml.*cannot be read"):
        load(tmp_path / "gone.yaml")


@pytest.mark.parametrize(
    ("text", "expected"), [("250ms", 250), ("1s", 1_000), ("5m", 300_000), ("2 h", 7_200_000)]
)
def test_lengths_of_time(text, expected):
    assert milliseconds(text) == expected


@pytest.mark.parametrize("text", ["", "1", "s", "1.5s", "-1s", "1w", None, 5])
def test_what_is_no_length_of_time(text):
    with pytest.raises(UsageError, match="not a length of time"):
        milliseconds(text)


@pytest.mark.parametrize(("text", "expected"), [("64KiB", 1 << 16), (" 1 TiB ", 1 << 40)])
def test_sizes(text, expected):
    assert bytes_of(text) == expected


@pytest.mark.parametrize("text", ["", "1", "1GB", "1gib", "-1GiB", "1.5GiB", None, 5])
def test_what_is_no_size(text):
    with pytest.raises(UsageError, match="not a size"):
        bytes_of(text)
