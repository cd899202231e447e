"""Lookup of documents by key in SQLite, for every key type."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.connectors.sqlite import connector
from tests.connectors.connector_client import (
    ConnectorClient,
    Row,
    TableBinding,
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
        st.lists(st.tuples(*(KINDS[kind][1] for kind in kinds)), unique=True, min_size=1),
    )
)


@settings(
    max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(keys, st.data())
def test_load_by_composite_key_returns_exactly_the_stored_documents(
    tmp_path_factory, key_types_and_keys, data
):
    kinds, keys = key_types_and_keys
    parts = [
        projection(f"k{index}", *KINDS[kind][0], must=True) for index, kind in enumerate(kinds)
    ]
    table_binding = TableBinding(collection(*parts, key=[part.ptr for part in parts]))
    stored = [key for key in keys if data.draw(st.booleans())]
    client = ConnectorClient(connector(), {"path": str(tmp_path_factory.mktemp("keys") / "x.db")})
    client.apply("v", table_binding)
    with client.open("v", table_binding) as (writer, [binding]):
        commit(writer, binding, [Row(key, (), [*key]) for key in stored])
        assert loaded(writer, binding, keys) == loaded(writer, binding, stored)
        assert len(loaded(writer, binding, keys)) == len(stored)


def test_load_by_keys_with_integers_beyond_64_bits_returns_documents(tmp_path):
    parts = [projection("i", "integer", must=True), projection("j", "integer", must=True)]
    table_binding = TableBinding(collection(*parts, key=["/i", "/j"]))
    keys = [(2**64, 1), (1, 2**64), (1, 1), (2**63, -(2**63))]
    client = ConnectorClient(connector(), {"path": str(tmp_path / "x.db")})
    client.apply("v", table_binding)
    with client.open("v", table_binding) as (writer, [binding]):
        commit(writer, binding, [Row(key, (), [*key]) for key in keys])
        assert sorted(loaded(writer, binding, keys)) == sorted(map(list, keys))
