"""Combination and reduction of documents of many keys, over Arrow."""

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import DefiniteError, UsageError
from penstock.reduce import COMBINED, REDUCED, Combiner, Reducer, combine_rows, encode, reduce_rows
from tests.reduce.documents import EVERYTHING, LIFE, LIVES, WITH_EVERYTHING

LOG = Reducer(
    {
        "type": "object",
        "reduce": {"strategy": "merge"},
        "properties": {"log": {"reduce": {"strategy": "append"}}},
    },
    "logs",
)
KEYS = st.sampled_from([b"a", b"a\x00", b"b", b"\xff", b""])


def table(rows: list[tuple[bytes, Any]]) -> pa.Table:
    columns = [[key for key, _ in rows], [encode(document) for _, document in rows]]
    return pa.table(columns, schema=COMBINED)


def read(batches: Any) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for batch in batches for row in batch.to_pylist()]


def logged(*items: int) -> bytes:
    return encode({"log": list(items)})


def test_combine_rows_sorts_by_key_and_keeps_source_order():
    rows = [(b"b", 1), (b"a", 2), (b"b", 3), (b"a", 4), (b"", 5)]
    added = table([(key, {"log": [n]}) for key, n in rows])
    assert read(combine_rows(LOG, added)) == [
        (b"", logged(5)),
        (b"a", logged(2, 4)),
        (b"b", logged(1, 3)),
    ]


def test_combine_rows_with_order_sorts_by_columns():
    added = table([(b"a", {"log": [n]}) for n in (1, 2, 3, 4)])
    added = added.append_column("time", pa.array([2, 1, 2, 1]))
    added = added.append_column("position", pa.array(["b", "b", "a", "a"]))
    assert read(combine_rows(LOG, added, order=["time", "position"])) == [
        (b"a", logged(4, 2, 3, 1))
    ]


def test_reduce_rows_starts_from_loaded_document():
    added = table([(b"new", {"log": [1]}), (b"old", {"log": [2]})])
    loaded = table([(b"untouched", {"log": [8]}), (b"old", {"log": [9]})])
    assert read(reduce_rows(LOG, added, loaded=loaded)) == [
        (b"new", logged(1), False, False),
        (b"old", logged(9, 2), True, False),
    ]


def test_reduce_rows_with_duplicate_loaded_key_raises_usage_error():
    loaded = table([(b"a", {"log": []}), (b"a", {"log": []})])
    with pytest.raises(UsageError, match="two stored documents for one key"):
        read(reduce_rows(LOG, table([(b"a", {"log": []})]), loaded=loaded))


def test_reduce_rows_omits_deletion_of_unstored_key():
    life = Reducer(LIFE, "lives")
    added = table([(b"new", {"op": "c"}), (b"new", {"op": "d"}), (b"old", {"op": "d"})])
    loaded = table([(b"old", {"op": "c", "x": 1})])
    assert read(reduce_rows(life, added, loaded=loaded)) == [
        (b"old", encode({"op": "d", "x": 1}), True, True)
    ]
    again = table([(b"old", {"op": "d"}), (b"old", {"op": "c"})])
    for keep, document in ((False, {"op": "c"}), (True, {"op": "c", "x": 1})):
        reduced = read(reduce_rows(life, again, loaded=loaded, keep_deleted=keep))
        assert reduced == [(b"old", encode(document), True, False)]


def test_combine_rows_keeps_text_of_single_document():
    text = b'{ "log" : [1.50] , "a" : 1e2 }'
    added = pa.table([[b"a"], [text]], schema=COMBINED)
    assert read(combine_rows(LOG, added)) == [(b"a", text)]


@pytest.mark.parametrize("kind", [pa.string(), pa.binary(), pa.large_string()], ids=str)
def test_combine_rows_accepts_text_and_bytes(kind: pa.DataType):
    added = table([(b"a", {"log": [1]}), (b"a", {"log": [2]})])
    added = added.set_column(1, "document", added.column(1).cast(kind))
    (batch,) = combine_rows(LOG, added)
    assert batch.schema == COMBINED
    assert read([batch]) == [(b"a", logged(1, 2))]


def test_combine_rows_with_null_raises_usage_error():
    added = pa.table({"key": pa.array([b"a"]), "document": pa.array([None], pa.binary())})
    with pytest.raises(UsageError, match="have a null"):
        read(combine_rows(LOG, added))


def test_combine_rows_with_invalid_json_raises_definite_error():
    added = pa.table([[b"a"], [b"{"]], schema=COMBINED)
    with pytest.raises(DefiniteError, match=r'^document of collection "logs" is not valid JSON'):
        read(combine_rows(LOG, added))


def test_combine_rows_without_rows_yields_nothing():
    assert read(combine_rows(LOG, table([]))) == []
    assert read(reduce_rows(LOG, table([]), loaded=table([(b"a", {})]))) == []
    assert REDUCED.names == ["key", "document", "exists", "deleted"]


def test_combine_rows_with_many_rows_yields_several_batches():
    added = table([(b"%06d" % n, {"log": [n]}) for n in range(10_000)])
    batches = list(combine_rows(LOG, added))
    assert len(batches) > 1
    assert pa.Table.from_batches(batches).equals(added)
    large = table([(b"%d" % n, {"text": "x" * (6 << 20)}) for n in range(3)])
    assert [batch.num_rows for batch in combine_rows(LOG, large)] == [2, 1]


@pytest.mark.parametrize(
    ("schema", "documents"), [(EVERYTHING, WITH_EVERYTHING), (LIFE, LIVES)], ids=["all", "life"]
)
@settings(max_examples=25)
@given(data=st.data())
def test_compaction_does_not_change_the_reduction(
    schema: Any, documents: st.SearchStrategy[Any], data: Any
):
    reducer = Reducer(schema, "c")
    batches = data.draw(st.lists(st.lists(st.tuples(KEYS, documents), max_size=4), max_size=4))
    loaded = table(
        data.draw(st.lists(st.tuples(KEYS, documents), max_size=3, unique_by=lambda it: it[0]))
    )
    plain, compacted = Combiner(reducer), Combiner(reducer)
    for rows in batches:
        plain.add(table(rows))
        compacted.add(table(rows))
        if data.draw(st.booleans()):
            rows_left = compacted.compact()
            assert compacted.held_bytes == rows_left.nbytes
    together = table([row for rows in batches for row in rows])
    expected = read(reduce_rows(reducer, together, loaded=loaded))
    assert read(plain.reduced(loaded)) == expected
    again = read(compacted.reduced(loaded))
    # The content of a tombstone is undefined: compare its key and flags only.
    assert [(*row[:1], *row[2:]) for row in again] == [(*row[:1], *row[2:]) for row in expected]
    assert [row for row in again if not row[3]] == [row for row in expected if not row[3]]


@settings(max_examples=25)
@given(st.lists(st.tuples(KEYS, WITH_EVERYTHING), max_size=6))
def test_compacted_rows_can_be_added_to_a_new_combiner(rows: list[tuple[bytes, Any]]):
    reducer = Reducer(EVERYTHING, "c")
    combiner = Combiner(reducer)
    for row in rows:
        compacted_rows = combiner.compact()
        combiner = Combiner(reducer)
        combiner.add(compacted_rows)
        combiner.add(table([row]))
    assert read(combiner.reduced()) == read(reduce_rows(reducer, table(rows)))
    assert read(combiner.combined()) == read(combine_rows(reducer, combiner.compact()))
