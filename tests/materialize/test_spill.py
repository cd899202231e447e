"""Documents of one transaction that exceed the memory limit."""

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.data.packed.elements import pack_row
from penstock.errors import DefiniteError, InternalError
from penstock.materialize.errors import ConnectorRefused
from penstock.materialize.spill import SpillingCombiner
from penstock.reduce import COMBINED, REDUCED, Reducer, combine_rows, encode, reduce_rows
from tests.reduce.documents import EVERYTHING, LIFE, LIVES, WITH_EVERYTHING

LOG = Reducer(
    {
        "type": "object",
        "reduce": {"strategy": "merge"},
        "properties": {"log": {"reduce": {"strategy": "append"}}},
    },
    "logs",
)
HISTORY = Reducer(  # Every document is kept.
    {
        "reduce": {"strategy": "merge"},
        "properties": {"n": {"reduce": {"strategy": "lastWriteWins", "associative": False}}},
    },
    "history",
)
KEYS = st.integers(0, 9).map(lambda n: pack_row((n,)))
SMALL = st.sampled_from([0, 1, 100, 1000, 1 << 20])
SOURCES = pytest.mark.parametrize(
    ("schema", "documents"), [(EVERYTHING, WITH_EVERYTHING), (LIFE, LIVES)], ids=["all", "life"]
)


def key(n: int) -> bytes:
    return pack_row((n,))


def table(rows: Iterable[tuple[bytes, Any]]) -> pa.Table:
    rows = list(rows)
    columns = [[key for key, _ in rows], [encode(document) for _, document in rows]]
    return pa.table(columns, schema=COMBINED)


def read(batches: Iterable[pa.RecordBatch]) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for batch in batches for row in batch.to_pylist()]


def load(combining: SpillingCombiner, rows: Iterable[tuple[bytes, Any]]) -> None:
    rows = list(rows)
    keys = pa.array([key for key, _ in rows], pa.binary())
    combining.loaded(keys, pa.array([encode(document) for _, document in rows], pa.binary()))


def listed(keys: Iterable[pa.BinaryArray]) -> list[bytes]:
    return [key for array in keys for key in array.to_pylist()]


def cut(data: Any, rows: list[Any]) -> list[list[Any]]:
    """Split `rows` into up to seven parts."""
    ends = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=6)))
    return [rows[start:end] for start, end in zip([0, *ends], [*ends, len(rows)], strict=True)]


def open_files(folder: Path) -> list[str]:
    """Return the open or mapped files of this process in `folder`, unlinked files included."""
    links = []
    for each in Path("/proc/self/fd").iterdir():
        try:
            links.append(str(each.readlink()))
        except FileNotFoundError:  # The descriptor of the listing.
            continue
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in (*links, *maps) if str(folder) in line]


@SOURCES
@settings(max_examples=40)
@given(data=st.data())
def test_spilled_reduction_equals_reduction_in_memory(
    schema: Any, documents: st.SearchStrategy[Any], data: Any
) -> None:
    reducer = Reducer(schema, "c")
    rows = data.draw(st.lists(st.tuples(KEYS, documents), max_size=12))
    rows.sort(key=lambda row: row[0])
    keys = sorted({key for key, _ in rows})
    stored = [(key, data.draw(documents)) for key in keys if data.draw(st.booleans())]
    keep = data.draw(st.booleans())
    with SpillingCombiner(reducer, memory_bytes=data.draw(SMALL)) as combining:
        asked = [array for part in cut(data, rows) for array in combining.add(table(part))]
        asked += combining.finish()
        assert listed(asked) == keys
        for part in cut(data, data.draw(st.permutations(stored))):
            load(combining, part)
        combined = list(combining.combined())
        batches = list(combining.reduced(keep_deleted=keep))
    assert all(batch.schema == REDUCED for batch in batches)
    expected = read(reduce_rows(reducer, table(rows), loaded=table(stored), keep_deleted=keep))
    found = read(batches)
    # The contents of a deleted document may differ.
    assert [(*row[:1], *row[2:]) for row in found] == [(*row[:1], *row[2:]) for row in expected]
    assert [row for row in found if not row[3]] == [row for row in expected if not row[3]]
    again = reduce_rows(reducer, pa.Table.from_batches(combined, COMBINED), loaded=table(stored))
    plain = reduce_rows(reducer, table(rows), loaded=table(stored))
    assert [row for row in read(again) if not row[3]] == [row for row in read(plain) if not row[3]]
    ends = [(batch["key"][0].as_py(), batch["key"][-1].as_py()) for batch in combined]
    assert all(before[1] < after[0] for before, after in pairwise(ends))


@given(data=st.data())
def test_spilled_combination_equals_combination_in_memory(data: Any) -> None:
    rows = data.draw(st.lists(st.tuples(KEYS, st.integers(0, 3)), max_size=30))
    rows = [(key, {"log": [n]}) for key, n in sorted(rows, key=lambda row: row[0])]
    with SpillingCombiner(LOG, memory_bytes=data.draw(SMALL)) as combining:
        for part in cut(data, rows):
            combining.add(table(part))
        combining.finish()
        assert read(combining.combined()) == read(combine_rows(LOG, table(rows)))


def test_combining_many_documents_stays_within_memory_bound(tmp_path: Path) -> None:
    bound, part = 64 << 10, 8 << 10
    text = "x" * 1000
    with SpillingCombiner(LOG, memory_bytes=bound, folder=tmp_path) as combining:
        for start in range(0, 1000, 5):
            # Each key has two documents, possibly in consecutive tables.
            rows = [(key(n // 2), {"log": [n], "text": text}) for n in range(start, start + 5)]
            keys = listed(combining.add(table(rows)))
            assert combining.held_bytes <= bound + part
            load(combining, [(key, {"log": [-1], "text": text}) for key in reversed(keys)])
            assert combining.held_bytes <= bound + part
        load(combining, [(key, {"log": [-1]}) for key in listed(combining.finish())])
        assert combining.spilled_bytes > 500_000  # Runs are not compressed.
        assert list(tmp_path.iterdir()) == []
        sizes = [batch.nbytes for batch in combining.combined()]
        assert max(sizes) <= bound // 4
        reduced = read(combining.reduced())
        assert combining.held_bytes <= bound + part
    assert [row[0] for row in reduced] == [key(n) for n in range(500)]
    assert reduced[7][1:] == (encode({"log": [-1, 14, 15], "text": text}), True, False)


def test_many_documents_of_one_key_are_combined_without_spilling() -> None:
    counter = Reducer(
        {"reduce": {"strategy": "merge"}, "properties": {"n": {"reduce": {"strategy": "sum"}}}},
        "counts",
    )
    rows = table([(key(1), {"n": 1, "text": "x" * 100})] * 100)
    with SpillingCombiner(counter, memory_bytes=32 << 10) as combining:
        for _ in range(50):
            assert combining.add(rows) == []
            assert combining.held_bytes <= (4 << 10) + rows.nbytes
        assert listed(combining.finish()) == [key(1)]
        assert combining.spilled_bytes == 0
        assert read(combining.combined()) == [(key(1), encode({"n": 5000, "text": "x" * 100}))]


def test_uncombinable_changes_of_one_key_are_loaded_once_and_stay_in_one_batch() -> None:
    rows = [(key(n), {"n": each}) for n in range(3) for each in range(3000)]
    with SpillingCombiner(HISTORY, memory_bytes=1000) as combining:
        asked = []
        for start in range(0, len(rows), 1000):
            asked += combining.add(table(rows[start : start + 1000]))
        asked += combining.finish()
        assert listed(asked) == [key(0), key(1), key(2)]
        batches = list(combining.combined())
        assert [batch.num_rows for batch in batches] == [3000, 3000, 3000]
        load(combining, [(key(1), {"n": 5})])
        assert read(combining.reduced()) == read(
            reduce_rows(HISTORY, table(rows), loaded=table([(key(1), {"n": 5})]))
        )


def test_combining_documents_of_16_mib_holds_one_in_memory(tmp_path: Path) -> None:
    text = "x" * (16 << 20)
    with SpillingCombiner(LOG, memory_bytes=1 << 20, folder=tmp_path) as combining:
        keys = []
        for n in range(3):
            keys += listed(combining.add(table([(key(n), {"text": text, "log": [n]})])))
            assert combining.held_bytes < 17 << 20
        keys += listed(combining.finish())
        for each in reversed(keys):
            load(combining, [(each, {"text": text, "log": [-1]})])
            assert combining.held_bytes < 17 << 20
        assert combining.spilled_bytes > 48 << 20
        done = 0
        for batch in combining.reduced():
            assert batch.num_rows == 1
            document = encode({"text": text, "log": [-1, done]})
            assert len(batch["document"][0].as_py()) == len(document)
            done += 1
        assert done == 3


def test_small_changes_to_large_documents_are_reduced_in_small_batches() -> None:
    loaded = [(key(n), {"text": "x" * 100_000}) for n in range(40)]
    # The first key has most of the rows.
    rows = [(key(0), {"n": n}) for n in range(100)] + [(key(n), {"n": 1}) for n in range(1, 40)]
    with SpillingCombiner(HISTORY, memory_bytes=4 << 20) as combining:
        combining.add(table(rows))
        combining.finish()
        load(combining, loaded)
        assert sum(batch.num_rows for batch in combining.combined()) == 139
        sizes = [batch.num_rows for batch in combining.reduced()]
    assert sum(sizes) == 40
    assert max(sizes) <= 5


def test_spill_files_are_released_at_exit(tmp_path: Path) -> None:
    rows = [(key(n), {"text": "x" * 100}) for n in range(100)]
    with SpillingCombiner(LOG, memory_bytes=100, folder=tmp_path) as combining:
        combining.add(table(rows))
        combining.finish()
        load(combining, rows)
        batches = list(combining.reduced())
        assert open_files(tmp_path) != []
        assert list(tmp_path.iterdir()) == []
    assert open_files(tmp_path) == []
    assert len(read(batches)) == 100
    assert combining.held_bytes == combining.spilled_bytes == 0


def test_spill_files_are_released_after_error(tmp_path: Path) -> None:
    rows = [(key(n), {"log": "wrong" if n == 99 else []}) for n in range(100)]
    loaded = [(each, {"log": [1]}) for each, _ in rows]

    def fail() -> None:
        with SpillingCombiner(LOG, memory_bytes=100, folder=tmp_path) as combining:
            combining.add(table(rows))
            combining.finish()
            load(combining, loaded)
            list(combining.reduced())

    with pytest.raises(DefiniteError, match="append"):
        fail()
    assert open_files(tmp_path) == []


@pytest.mark.parametrize("stray", [0, 4, 10], ids=["before", "between", "behind"])
@pytest.mark.parametrize("memory", [10, 1 << 20], ids=["aside", "in-memory"])
def test_loaded_document_of_key_not_requested_raises_connector_refused(
    stray: int, memory: int
) -> None:
    # Vector life-13.
    with SpillingCombiner(LOG, memory_bytes=memory) as combining:
        combining.add(table([(key(n), {}) for n in (1, 3, 5)]))
        combining.finish()
        load(combining, [(key(5), {}), (key(stray), {})])
        with pytest.raises(ConnectorRefused) as raised:
            list(combining.reduced())
    assert str(raised.value) == (f"connector loaded a document of key ({stray},) without a request")
    assert raised.value.detail == 'The loaded document is a document of collection "logs".'


def test_loaded_document_without_any_request_raises_connector_refused() -> None:
    with SpillingCombiner(LOG) as combining:
        assert combining.finish() == []
        load(combining, [(key(1), {})])
        with pytest.raises(ConnectorRefused, match="without a request"):
            list(combining.reduced())


@pytest.mark.parametrize("memory", [10, 1 << 20], ids=["aside", "in-memory"])
def test_document_loaded_twice_raises_connector_refused(memory: int) -> None:
    with SpillingCombiner(LOG, memory_bytes=memory) as combining:
        combining.add(table([(key(n), {}) for n in range(5)]))
        combining.finish()
        for n in (3, 1, 3):
            load(combining, [(key(n), {})])
        with pytest.raises(ConnectorRefused, match=r"a document of key \(3,\) twice"):
            list(combining.reduced())


def test_combining_empty_input_returns_nothing() -> None:
    with SpillingCombiner(LOG, memory_bytes=0) as combining:
        assert combining.add(COMBINED.empty_table()) == []
        assert combining.finish() == []
        load(combining, [])
        assert list(combining.combined()) == []
        assert list(combining.reduced()) == []


def test_combining_keys_out_of_order_raises_internal_error() -> None:
    with SpillingCombiner(LOG, memory_bytes=0) as combining:
        combining.add(table([(key(2), {}), (key(3), {})]))
        with pytest.raises(InternalError, match="arrived after a later key"):
            combining.add(table([(key(1), {}), (key(4), {})]))


def test_reduced_before_finish_raises_internal_error() -> None:
    with SpillingCombiner(LOG) as combining:
        combining.add(table([(key(1), {})]))
        with pytest.raises(InternalError, match="before all were added"):
            list(combining.reduced())


@pytest.mark.parametrize(
    ("keep", "document"), [(False, {"op": "c"}), (True, {"op": "c", "x": 1})], ids=["hard", "soft"]
)
def test_insert_after_delete_starts_from_loaded_document_only_if_deletes_are_kept(
    keep: bool, document: Any
) -> None:
    with SpillingCombiner(Reducer(LIFE, "lives"), memory_bytes=0) as combining:
        combining.add(table([(key(1), {"op": "d"}), (key(1), {"op": "c"})]))
        combining.finish()
        load(combining, [(key(1), {"op": "c", "x": 1})])
        reduced = read(combining.reduced(keep_deleted=keep))
    assert reduced == [(key(1), encode(document), True, False)]
