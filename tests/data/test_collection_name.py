"""Names of collections: composed, parsed, and never shared."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.data.collection_name import (
    compose_name,
    has_controls,
    parse_name,
    source_of,
    without_quoted,
)
from penstock.persist.schema_check import check_name
from penstock.persist.state import is_hidden
from penstock.sources.postgres.names import TableName

SOURCES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,62}", fullmatch=True)
HARD = st.text(st.sampled_from(".\"/ \\\n\x00\u2028aU&'%?#+0é"), min_size=1, max_size=8)
PARTS = HARD | st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=63)


@given(SOURCES, PARTS, PARTS)
def test_composed_name_parses_back_to_its_parts(source, schema, table):
    name = compose_name(source, schema, table)
    assert parse_name(name) == (source, schema, table)
    assert source_of(name, {source}) == source


@given(SOURCES, HARD, HARD, HARD, HARD)
def test_two_tables_never_share_a_name(source, schema, table, other_schema, other_table):
    first = compose_name(source, schema, table)
    second = compose_name(source, other_schema, other_table)
    assert (first == second) == ((schema, table) == (other_schema, other_table))


@given(SOURCES, PARTS, PARTS)
def test_composed_name_is_visible_and_may_be_used(source, schema, table):
    name = compose_name(source, schema, table)
    assert not is_hidden(name)
    assert not has_controls(name)
    check_name(name, "")


@given(PARTS.filter(lambda part: "\0" not in part), PARTS.filter(lambda part: "\0" not in part))
def test_table_of_a_collection_may_be_named_so_in_the_file(schema, table):
    schema, table = (part.encode()[:63].decode(errors="ignore").strip() for part in (schema, table))
    if schema and table:
        assert TableName.parse(compose_name(schema, table)) == TableName(schema, table)


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        (("shop", "public", "orders"), "shop.public.orders"),
        (("shop", "public", "Two Words"), "shop.public.Two Words"),
        (("app2", "weird", "dot.t"), 'app2.weird."dot.t"'),
        (("app2", "weird.dot", "t"), 'app2."weird.dot".t'),
        (("shop", "public", "a/b"), 'shop.public."a/b"'),
        (("shop", "public", '"q"'), 'shop.public."""q"""'),
        (("shop", "public", " end "), 'shop.public." end "'),
        (("shop", "public", 'a\n"\\'), 'shop.public.U&"a\\000A""\\\\"'),
    ],
)
def test_names_in_full(parts, name):
    assert compose_name(*parts) == name
    assert parse_name(name) == parts


@pytest.mark.parametrize(
    "name", ["", ".", "a.", "a..b", 'a."b', 'a"b"', '"a"b', 'a.""', 'a.U&"\\12"', 'U&"\\+110000"']
)
def test_malformed_names_have_no_parts(name):
    assert parse_name(name) is None


def test_escapes_of_sql_are_read_in_both_forms():
    assert parse_name('u&"d\\0061t\\+000061"') == ("data",)
    assert parse_name(' "a" . b ', strip=True) == ("a", "b")


@pytest.mark.parametrize(
    ("collection", "source"),
    [
        ("shop", "shop"),
        ("shop.a.b.c", "shop"),
        ("shop_errors", "shop"),
        ("shop_remap", "shop"),
        ("shop_remap.t", None),
        ("shopping.t", None),
        ("other", None),
    ],
)
def test_source_of_a_collection(collection, source):
    assert source_of(collection, {"shop"}) == source


def test_slash_hides_a_name_only_outside_of_quotes():
    assert is_hidden("shop/state")
    assert is_hidden('shop.public."a/b')
    assert not is_hidden('shop."a/b".c')
    assert without_quoted('shop."a/b".c') == "shop..c"
