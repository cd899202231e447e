"""A pipeline's file is read as it says, or refused at the line that is wrong."""

from pathlib import Path

import pytest

from penstock.errors import UsageError
from penstock.pipeline import load
from penstock.pipeline.durations import milliseconds
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
        ("tick: 250ms", "tick: fast", "line 3, tick: 'fast' is not a length of time"),
        ("retain: 24h", "retention: 24h", "line 4, retention: there is no such key here"),
        ("      publication: penstock", "      slot: mine", 'has no option "slot"'),
        ("  shop:", "  1shop!:", "line 6, sources.1shop!"),
        ("location: file:./penstock-data\n", "", "location: Field required"),
        ("exclude: [photo]", "exclude: photo", '"exclude" of table public.customers is not a list'),
        ("public.orders,", "a.b.c,", 'table name "a.b.c" cannot be understood'),
        ("    postgres:", "    kafka:", "there is no such key here"),
        ("location: file:./penstock-data", "location: [", "is not YAML"),
    ],
)
def test_what_is_wrong_is_told_at_its_line(tmp_path, was, now, told):
    assert was in GOOD
    with pytest.raises(UsageError) as caught:
        load(written(tmp_path, GOOD.replace(was, now)), {"SHOP_PASSWORD": "s3cr3t"})
    message = f"{caught.value} {caught.value.detail}"
    assert told in message
    assert "s3cr3t" not in message + caught.value.hint


def test_a_variable_that_is_not_set_is_named_with_its_key(tmp_path):
    with pytest.raises(UsageError, match=r"SHOP_PASSWORD.* at sources.shop.postgres.url") as caught:
        load(written(tmp_path, GOOD), {})
    assert "export SHOP_PASSWORD" in caught.value.hint


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
