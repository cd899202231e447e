"""Hand-encoded messages of the suite, and its JSON comparison."""

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.errors import RemoteProtocolError
from penstock.protocol.key_range import KeyRange
from penstock.protocol.messages import Acknowledge, Load, Open, Store
from penstock.protocol.specs import MaterializationSpec
from penstock.protocol.wire import decode_request, encode
from penstock.testing.conformance import raw_messages as raw
from penstock.testing.conformance.check import CHECKS
from penstock.testing.conformance.documents import PLAIN, document, same_json

parts = st.lists(st.binary(max_size=9), min_size=1, max_size=9)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=9,
)


def scattered(content: list[bytes]) -> tuple[bytes, list[tuple[int, int]]]:
    """Return an arena with all parts in reverse order, and their slices."""
    arena = b"".join(reversed(content))
    ends = [len(arena) - sum(map(len, content[:n])) for n in range(len(content))]
    return arena, [(end - len(part), end) for end, part in zip(ends, content, strict=True)]


@given(parts, st.integers(0, 2**32 - 1))
def test_raw_load_decodes_to_load(content: list[bytes], binding: int) -> None:
    found = decode_request(raw.load(binding, *scattered(content)))
    assert isinstance(found, Load)
    assert (found.binding, found.packed_keys.to_pylist()) == (binding, content)


@given(parts)
def test_raw_store_decodes_to_store(content: list[bytes]) -> None:
    arena, slices = scattered(content)
    flags = [bool(n % 2) for n in range(len(content))]
    found = decode_request(raw.store(3, arena, slices, slices[::-1], slices, flags, flags[::-1]))
    assert isinstance(found, Store)
    assert found.packed_keys.to_pylist() == content
    assert found.packed_values.to_pylist() == content[::-1]
    assert found.exists.to_pylist() == flags
    assert found.deletes is not None
    assert found.deletes.to_pylist() == flags[::-1]


def test_raw_open_decodes_to_open() -> None:
    spec = MaterializationSpec("a/b", "{}")
    found = decode_request(raw.open_request(encode(spec), "v1", 3, 2**32 - 1))
    assert found == Open(spec, "v1", KeyRange(3, 2**32 - 1), b"{}")
    assert decode_request(raw.message(raw.ACKNOWLEDGE)) == Acknowledge()
    with pytest.raises(RemoteProtocolError, match="no version"):
        decode_request(raw.open_request(encode(spec), "", 0, 1))


@given(st.integers(0, 2**40), st.integers(0, 2**40))
def test_raw_checkpoints_are_distinct_and_not_utf8(one: int, other: int) -> None:
    assert (raw.checkpoint(one) == raw.checkpoint(other)) is (one == other)
    with pytest.raises(UnicodeDecodeError):
        raw.checkpoint(one).decode()


@given(values)
def test_same_json_after_round_trip_is_true(value: Any) -> None:
    assert same_json(value, json.loads(json.dumps(value)))
    assert same_json(copy.deepcopy(value), value)


@given(values, values)
def test_same_json_of_differently_encoded_values_is_false(one: Any, other: Any) -> None:
    written = json.dumps(one, sort_keys=True), json.dumps(other, sort_keys=True)
    if written[0] == written[1]:
        assert same_json(one, other)
    elif not _has_floats(one) and not _has_floats(other):
        assert not same_json(one, other)


def _has_floats(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_floats, value.values()))
    if isinstance(value, list):
        return any(map(_has_floats, value))
    return isinstance(value, float)


def test_same_json_distinguishes_booleans_from_numbers() -> None:
    assert not same_json(True, 1)
    assert not same_json({"a": [0]}, {"a": [False]})
    assert same_json(1, 1.0)
    assert PLAIN.key(document("1", "")) != PLAIN.key({"id": 1})


def test_each_check_has_rule_and_protocol_section() -> None:
    sections = {
        *("Spec", "Validate", "Apply", "Open", "Acknowledge", "Load", "Flush", "Store"),
        *("StartCommit", "Fencing", "Messages"),
    }
    for name, each in CHECKS.items():
        assert name == name.lower()
        assert " " not in name
        assert each.rule
        assert not each.rule.endswith(".")
        assert each.source.removeprefix("protocol, ") in sections, name
        assert each.otherwise or len(each.patterns) == 4, name
