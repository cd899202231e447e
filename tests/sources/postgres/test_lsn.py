import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import UsageError
from penstock.sources.postgres.lsn import Lsn

positions = st.integers(0, 2**64 - 1)


@given(positions)
def test_lsn_text_round_trips(position: int) -> None:
    assert Lsn.parse(str(Lsn(position))) == Lsn(position)


@given(positions, positions)
def test_lsn_order_equals_position_order(one: int, other: int) -> None:
    assert (Lsn(one) < Lsn(other)) == (one < other)


def test_lsn_renders_as_postgres_does() -> None:
    assert str(Lsn.parse("16/b374d848")) == "16/B374D848"
    assert Lsn.parse("1/00000002").position == 2**32 + 2


@pytest.mark.parametrize(
    "text", ["", "/", "1", "-1/2", "1_0/2", "123456789/0", "0/123456789", " 1/2", "1/2\n", "0x1/2"]
)
def test_lsn_parse_of_malformed_text_raises_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="malformed"):
        Lsn.parse(text)


@pytest.mark.parametrize("position", [-1, 2**64])
def test_lsn_outside_64_bits_raises_usage_error(position: int) -> None:
    with pytest.raises(UsageError, match="out of range"):
        Lsn(position)


def test_lsn_text_has_the_integer_of_vector_x11() -> None:
    vectors = Path(__file__).parents[2] / "vectors" / "materialize.json"
    (case,) = [case for case in json.loads(vectors.read_text())["cases"] if case["id"] == "X11"]
    assert [int(Lsn.parse(text)) for text in case["given"]["pairs"]] == case["expect"]["ints"]
    assert [str(Lsn(position)) for position in case["expect"]["ints"]] == case["given"]["pairs"]
