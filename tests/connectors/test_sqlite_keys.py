"""Lookup of documents by key in SQLite, for every key type."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.connectors.sqlite import connector
from tests.connectors.stream_client import (
    Driven,
    Row,
    Wanted,
    collection,
    commit,
    loaded,
    projection,
)

TEXTS = st.text(max_size=4) | st.sampled_from(["", "\0", "a\0b", "\\u0000", '"', "1", "01", "💧"])
KINDS = {
    "integer": (("integer",), st.integers(-(2**63), 2**63 - 1)),
    "string": (("string",), TEXTS),
    "boolean": (("boolean",), st.booleans()),
}
"""Types and values of a key column, by name. Each can be the only key column."""

keys = st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=3).flatmap(
    lambda kinds: st.tuples(
        st.just(kinds),
        st.lists(st.tuples(*(KINDS[each][1] for each in kinds)), unique=True, min_size=1),
    )
)


@settings(
    max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(keys, st.data())
def test_load_by_composite_key_returns_exactly_the_stored_documents(tmp_path_factory, drawn, data):
    kinds, found = drawn
    parts = [projection(f"k{at}", *KINDS[kind][0], must=True) for at, kind in enumerate(kinds)]
    wanted = Wanted(collection(*parts, key=[each.ptr for each in parts]))
    stored = [key for key in found if data.draw(st.booleans())]
    driven = Driven(connector(), {"path": str(tmp_path_factory.mktemp("keys") / "x.db")})
    driven.apply("v", wanted)
    with driven.open("v", wanted) as (writer, [binding]):
        commit(writer, binding, [Row(key, (), [*key]) for key in stored])
        assert loaded(writer, binding, found) == loaded(writer, binding, stored)
        assert len(loaded(writer, binding, found)) == len(stored)


def test_load_by_keys_with_integers_beyond_64_bits_returns_documents(tmp_path):
    parts = [projection("i", "integer", must=True), projection("j", "integer", must=True)]
    wanted = Wanted(collection(*parts, key=["/i", "/j"]))
    keys = [(2**64, 1), (1, 2**64), (1, 1), (2**63, -(2**63))]
    driven = Driven(connector(), {"path": str(tmp_path / "x.db")})
    driven.apply("v", wanted)
    with driven.open("v", wanted) as (writer, [binding]):
        commit(writer, binding, [Row(key, (), [*key]) for key in keys])
        assert sorted(loaded(writer, binding, keys)) == sorted(map(list, keys))
