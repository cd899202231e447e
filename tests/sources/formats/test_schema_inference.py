"""Column types inferred from a sample: never narrower than the sample's values."""

import json
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import UsageError
from penstock.sources.formats import JsonFormat, infer_columns
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
def test_inferred_type_covers_all_values_of_the_member(members: list[str], word: str):
    for order in (members, members[::-1]):
        sample = values(*(f'{{"a":{each}}}'.encode() for each in order))
        assert infer_columns(sample) == {"a": word}


def test_inferred_columns_are_in_order_of_first_appearance():
    sample = values(b'{"b":1}', None, b"no json", b'{"a":1,"b":2}', b"\xff", b"[]", b"{}")
    assert list(infer_columns(sample)) == ["b", "a"]


@pytest.mark.parametrize("records", [(), (None,), (b"[]", b"x", b"1")])
def test_infer_from_sample_without_objects_raises_usage_error(records: tuple[bytes | None, ...]):
    with pytest.raises(UsageError, match="holds no JSON object"):
        infer_columns(values(*records))


def test_infer_with_members_that_cannot_be_columns_raises_usage_error():
    with pytest.raises(UsageError, match='"id" and "ID"'):
        JsonFormat.of(infer_columns(values(b'{"id":1}', b'{"ID":1}')))


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
def test_inferred_format_reads_every_sample_record_without_loss(rows: list[dict[str, Any]]):
    records = [json.dumps(row).encode() for row in rows]
    a_format = JsonFormat.of(infer_columns(values(*records)))
    found = decoded(a_format, *records)
    assert found.bad == ()
    for each in a_format.columns or ():
        read = column(found, each.name)
        for row, value in zip(rows, read, strict=True):
            said = row.get(each.name)
            if each.type_name == "json" and said is not None:
                assert json.loads(value) == said
            elif isinstance(said, int | float):
                assert Decimal(value) == Decimal(said)
            else:
                assert value == said
