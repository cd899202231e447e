"""Columns found in a sample: never narrower than what the sample holds."""

import json
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import UsageError
from penstock.sources.formats import infer, inferred_words
from tests.sources.formats.given import column, decoded, values

WIDENING = [
    (["1", "-2", "null"], "bigint"),
    (["9223372036854775807"], "bigint"),
    (["9223372036854775808"], "json"),
    (["1.5", "2.0", "1e3"], "double"),
    (["1", "1.5"], "double"),
    (["9007199254740992", "1.5"], "double"),
    (["9007199254740993", "1.5"], "json"),
    (["0.1234567890123456789"], "json"),
    (["1e400"], "json"),
    (["true", "false"], "boolean"),
    (["true", "1"], "json"),
    (['"x"', '""'], "text"),
    (['"x"', "1"], "json"),
    (['"2026-01-01"'], "text"),
    (["[1]"], "json"),
    (["{}", "null"], "json"),
    (["null"], "json"),
]


@pytest.mark.parametrize(("members", "word"), WIDENING)
def test_a_member_is_what_all_its_values_are(members: list[str], word: str):
    for order in (members, members[::-1]):
        sample = values(*(f'{{"a":{each}}}'.encode() for each in order))
        assert inferred_words(sample) == {"a": word}


def test_members_come_in_the_order_of_their_first_appearance():
    sample = values(b'{"b":1}', None, b"no json", b'{"a":1,"b":2}', b"\xff", b"[]", b"{}")
    assert list(inferred_words(sample)) == ["b", "a"]


@pytest.mark.parametrize("records", [(), (None,), (b"[]", b"x", b"1")])
def test_a_sample_without_objects_says_nothing(records: tuple[bytes | None, ...]):
    with pytest.raises(UsageError, match="holds no JSON object"):
        infer(values(*records))


def test_members_that_cannot_be_columns_are_refused():
    with pytest.raises(UsageError, match='"id" and "ID"'):
        infer(values(b'{"id":1}', b'{"ID":1}'))


documents = st.dictionaries(
    st.sampled_from("abc"),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.integers(-(2**54), 2**54)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(st.characters(codec="utf-8")),
        lambda inner: st.lists(inner) | st.dictionaries(st.text("xy"), inner),
        max_leaves=4,
    ),
    min_size=1,
)


@given(st.lists(documents, min_size=1))
def test_every_record_of_the_sample_is_read_without_loss(rows: list[dict[str, Any]]):
    records = [json.dumps(row).encode() for row in rows]
    a_format = infer(values(*records))
    found = decoded(a_format, *records)
    assert found.bad == ()
    for each in a_format.columns or ():
        read = column(found, each.name)
        for row, value in zip(rows, read, strict=True):
            said = row.get(each.name)
            if each.word == "json" and said is not None:
                assert json.loads(value) == said
            elif isinstance(said, int | float):
                assert Decimal(value) == Decimal(said)
            else:
                assert value == said
