"""Lossless decoding and encoding of documents."""

from decimal import Decimal

import pytest

from penstock.errors import DefiniteError, UsageError
from penstock.reduce import ABSENT, decode, encode
from penstock.reduce.document import find, parse_pointer, show_pointer


@pytest.mark.parametrize(
    "text",
    [
        "18446744073709551616",
        "-170141183460469231731687303715884105729",
        "0.1000",
        "1E+400",
        "1E-400",
        "9" * 5000,
        '{"a":' + "1" * 4301 + ',"b":[0.10]}',
    ],
    ids=["beyond-64", "beyond-128", "zeros", "huge", "tiny", "5000-digits", "within"],
)
def test_number_round_trips_without_loss(text: str):
    assert encode(decode(text, what="document")).decode() == text


def test_encode_sorts_names():
    assert encode(decode(b'{"b": 1, "a": {"d": 2, "c": null}}', what="document")) == (
        b'{"a":{"c":null,"d":2},"b":1}'
    )


@pytest.mark.parametrize(
    "text",
    ['{"secret": hunter2}', "[1,", '"\\ud800"', "NaN", "1e99999999999999999999", "[" * 5000],
    ids=["word", "cut", "surrogate", "nan", "exponent", "deep"],
)
def test_decode_of_invalid_json_raises_without_the_text(text: str):
    with pytest.raises(
        DefiniteError, match=r'^document of collection "c" is not valid JSON'
    ) as caught:
        decode(text, what='document of collection "c"')
    assert "hunter2" not in f"{caught.value} {caught.value.detail}"


def test_pointer_resolves_to_value_or_absent():
    document = {"a": [{"b/c": 1, "~": 2}], "0": None}
    for text, expected in (
        ("", document),
        ("/a/0/b~1c", 1),
        ("/a/0/~0", 2),
        ("/0", None),
        ("/a/1", ABSENT),
        ("/a/00", ABSENT),
        ("/a/-", ABSENT),
        ("/a/b", ABSENT),
        ("/0/x", ABSENT),
        ("/x", ABSENT),
    ):
        pointer = parse_pointer(text, what="pointer")
        value = find(document, pointer)
        assert value is expected or value == expected
        assert show_pointer(pointer) == text
    with pytest.raises(UsageError, match=r"^pointer is not a JSON pointer\b"):
        parse_pointer("a/b", what="pointer")


def test_float_encodes_as_its_repr():
    assert decode(encode(0.1), what="document") == Decimal("0.1")
