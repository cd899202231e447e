"""Move of a name to a new collection at a time: reads, listeners, holds and retention."""

from collections import Counter

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.compat import reader
from tests.persist.shop import SCHEMA, by_hand, next_changes, opened, rows

from penstock import persist
from penstock.durable.memory import Shelf
from penstock.errors import UsageError
from penstock.persist import (
    AppendTo,
    Begin,
    CollectionErrored,
    CollectionReplaced,
    Fail,
    Replace,
    SinceError,
    StoredError,
)
from penstock.persist.encoding import decode_rollup, encode_entry, encode_rollup
from penstock.persist.lake import find_generation
from penstock.persist.state import Entry
from penstock.persist.state import ReplaceCollection as ReplaceOperation

TEXTS = pa.schema([("k", pa.string()), ("n", pa.string())])
CHANGED = StoredError("SchemaChanged", "column n is text now", "", "Resync it.")


@pytest.fixture
def shelf():
    return Shelf()


@pytest.fixture
def client(shelf):
    with opened(shelf, inline_bytes=200, part_bytes=300, fan_in=2) as client:
        yield client


@pytest.fixture
def old(client):
    old = client.create_or_load("shop", schema=SCHEMA, key_columns=["k"], owner="s")
    old.compare_and_append(rows(("a", 1, 10, 1), ("b", 2, 10, 1)), 0, 20)
    return old


def texts(*updates):
    columns = list(zip(*updates, strict=True)) or [(), (), (), ()]
    names = ("k", "n", "mz_timestamp", "mz_diff")
    types = (pa.string(), pa.string(), pa.int64(), pa.int64())
    arrays = [pa.array(column, kind) for column, kind in zip(columns, types, strict=True)]
    return pa.table(arrays, names=names)


def replaced(client, old, at, updates=None, *, schema=TEXTS, key=("n",)):
    """Replace a collection in the entry that also fills and seals the new one."""
    new = client.create_or_load("s/next/shop", schema=schema, key_columns=key, owner="s")
    client.append_all(
        [AppendTo(new, texts() if updates is None else updates, 0, at + 1)],
        [Begin(new, at), Replace(old, new, at)],
    )
    return new


def contents(collection, as_of):
    return Counter({tuple(u.data.values()): u.diff for u in collection.snapshot(as_of)})


def test_replaced_name_resolves_to_old_collection_below_time_and_new_from_it(client, old):
    new = replaced(client, old, 30, texts(("a", "x", 30, 1)))
    assert client.collection("shop").id == new.id != old.id
    assert client.collections(hidden=True) == ["shop"]
    assert contents(client.collection("shop", as_of=29), 29) == {("a", 1): 1, ("b", 2): 1}
    assert contents(client.collection("shop", as_of=30), 30) == {("a", "x"): 1}
    assert (old.state.upper, old.state.successor) == (30, new.id)
    assert client.collection("shop").state.schemas[-1].key == ("n",)
    found, as_of = find_generation(client.collection("shop"), "earliest")
    assert (found.id, as_of) == (old.id, 0)


def test_replaced_errored_collection_keeps_its_error_until_the_time(client, old):
    client.append_all([AppendTo(old, [], 20, 26)], [Fail(old, 25, CHANGED)])
    replaced(client, old, 30, texts(("a", "x", 30, 1)))
    assert contents(client.collection("shop", as_of=24), 24) == {("a", 1): 1, ("b", 2): 1}
    for time in (25, 29):
        with pytest.raises(CollectionErrored, match="column n is text now") as failed:
            client.collection("shop", as_of=time).snapshot(time)
        assert failed.value.until == 30
    assert contents(client.collection("shop", as_of=30), 30) == {("a", "x"): 1}


def test_replaced_collection_rejects_updates_and_second_replacement(client, old):
    replaced(client, old, 30)
    before = client.state
    again = client.create_or_load("s/next/shop", schema=TEXTS, key_columns=["n"], owner="s")
    with pytest.raises(UsageError, match="cannot be replaced at 40"):
        client.append_all([AppendTo(again, [], 0, 41)], [Begin(again, 40), Replace(old, again, 40)])
    with pytest.raises(UsageError, match='collection "shop" was replaced at 30'):
        old.seal(31).result()
    assert client.state.collections[old.id] is before.collections[old.id]


@pytest.mark.parametrize("wrong", ["earlier", "unsealed", "itself", "begun otherwise", "foreign"])
def test_replace_that_changes_readable_contents_raises_usage_error(client, old, wrong):
    owner = "other" if wrong == "foreign" else "s"
    new = client.create_or_load(f"{owner}/next/shop", schema=TEXTS, owner=owner)
    time = 15 if wrong == "earlier" else 30
    begin = 31 if wrong == "begun otherwise" else time
    if wrong == "unsealed":
        old.write(rows(("c", 3, 25, 1))).result()
    by = old if wrong == "itself" else new
    before = client.state
    with pytest.raises(UsageError, match=f"cannot be replaced at {time}"):
        client.append_all([], [Begin(new, begin), Replace(old, by, time)])
    assert client.state is before


def test_listener_of_replaced_collection_raises_collection_replaced_at_the_time(shelf, client, old):
    with (
        opened(shelf, writer=None, lease_ms=60_000) as reader,
        old.listen(5) as near,
        reader.collection("shop").listen(5) as far,
    ):
        replaced(client, old, 30, texts(("a", "x", 30, 1)))
        for listener in (near, far):
            changes = next_changes(listener)
            assert (changes.lower, changes.upper, len(changes)) == (6, 30, 2)
            with pytest.raises(CollectionReplaced, match="replaced at 30"):
                listener.next_changes(timeout_ms=0)


def test_listener_of_replaced_errored_collection_raises_error_with_its_end(client, old):
    client.append_all([AppendTo(old, [], 20, 26)], [Fail(old, 25, CHANGED)])
    replaced(client, old, 30)
    with old.listen(5) as listener:
        assert listener.next_changes(timeout_ms=0).upper == 25
        with pytest.raises(CollectionErrored, match="column n is text now") as failed:
            listener.next_changes(timeout_ms=0)
        assert failed.value.until == 30


def test_replaced_collection_is_destroyed_when_since_passes_its_upper(client, old):
    old.compare_and_append(rows(*((f"k{n}", n, 21, 1) for n in range(90))), 20, 25)
    new = replaced(client, old, 30, texts(("a", "x", 30, 1)))
    old.allow_compaction(29).result()
    assert old.since == 29
    files = client.state.linked()
    assert files
    client.collection("shop", as_of=0).allow_compaction(30).result()
    assert list(client.state.collections) == [new.id]
    client.compact()
    listed = {each.key for each in client.reader.machine.blob.list("batch/")}
    assert listed == client.state.linked()
    with pytest.raises(SinceError, match="as of 29") as failed:
        client.collection("shop", as_of=29).snapshot(29)
    assert failed.value.detail.startswith("Its since is 30")


def test_hold_below_replacement_time_keeps_both_collections(client, old):
    new = replaced(client, old, 30)
    hold = client.hold("reader")
    hold.move({"shop": 25})
    assert hold.sinces() == {"shop": 25}
    for each in (old, client.collection("shop")):
        each.allow_compaction(100).result()
    assert (old.since, new.since) == (25, 30)
    hold.move({"shop": 40})
    client.compact()
    assert new.since == 40
    assert old.id not in client.state.collections


def test_hold_on_oldest_generation_keeps_it_when_later_one_is_destroyed(client, old):
    hold = client.hold("reader")
    hold.move({"shop": 15})
    second = replaced(client, old, 30)
    third = replaced(client, client.collection("shop"), 50)
    for each in client.state.generations("shop"):
        client.collection("shop", as_of=each.upper - 1).allow_compaction(60).result()
    client.compact()
    assert second.id not in client.state.collections
    assert contents(client.collection("shop", as_of=15), 15) == {("a", 1): 1, ("b", 2): 1}
    hold.move({"shop": 60})
    client.compact()
    assert list(client.state.collections) == [third.id]


def test_destroy_of_name_destroys_all_its_generations(client, old):
    replaced(client, old, 30)
    assert client.destroy("shop")
    assert not client.state.collections
    assert not client.state.names


def test_replaced_name_resolves_equally_in_other_process_and_from_rollup(shelf, client, old):
    new = replaced(client, old, 30, texts(("a", "x", 30, 1)))
    client.compact()
    with opened(shelf, writer=None) as reader:
        assert reader.state.names == client.state.names
        assert reader.collection("shop", as_of=29).id == old.id
        assert reader.collection("shop").id == new.id
    frame = encode_rollup(client.state)
    assert decode_rollup(frame, key="rollup/1", where="l").names == client.state.names


def test_only_frames_with_a_replacement_have_encoding_version_2(client, old):
    assert encode_rollup(client.state)[5] == 1
    moved = Entry("l", 1, "t", 0, (ReplaceOperation(1, 2, 30),))
    assert (encode_entry(moved)[5], encode_entry(Entry("l", 1, "t", 0, ()))[5]) == (2, 1)
    replaced(client, old, 30)
    assert encode_rollup(client.state)[5] == 2


@given(st.lists(st.tuples(st.sampled_from(["append", "replace", "forget"]), st.integers(1, 9))))
def test_replaced_name_contents_as_of_every_retained_time_match_writes(steps):
    with opened(Shelf()) as client:
        client.create_or_load("shop", schema=TEXTS, owner="s")
        written: dict[int, Counter[tuple[str, str]]] = {}
        now: Counter[tuple[str, str]] = Counter()
        upper = 0
        for number, (step, by) in enumerate(steps):
            current, time = client.collection("shop"), upper + by
            written |= dict.fromkeys(range(upper, time), now)
            row = (f"k{number}", str(number))
            if step == "append":
                now = now + Counter([row])
                current.compare_and_append(texts((*row, time, 1)), upper, time + 1)
            elif step == "replace":
                now = Counter([row])
                replaced(client, current, time, texts((*row, time, 1)), key=())
            else:
                for each in client.state.generations("shop"):
                    client.collection("shop", as_of=each.since).allow_compaction(time).result()
                current.compare_and_append([], upper, time + 1)
            written[time] = now
            upper = time + 1
        generations = client.state.generations("shop")
        ends = [each.upper for each in generations]
        assert ends == sorted(set(ends))
        assert [each.begins for each in generations[1:]] == ends[:-1]
        for time in range(generations[0].since, upper):
            assert contents(client.collection("shop", as_of=time), time) == written[time]
        again = decode_rollup(encode_rollup(client.state), key="rollup/1", where="l")
        assert (again.names, again.collections) == (client.state.names, client.state.collections)


def test_reader_from_format_page_resolves_replaced_name_equally(tmp_path):
    folder = tmp_path / "location"
    with persist.open(f"file:{folder}", writer="w", settings=by_hand()) as client:
        old = client.create_or_load("shop", schema=SCHEMA, key_columns=["k"], owner="s")
        old.compare_and_append(rows(("a", 1, 10, 1)), 0, 20)
        replaced(client, old, 30, texts(("a", "x", 30, 1)))
        found = [reader.Location(folder)]
        client.compact()
        found.append(reader.Location(folder))
        for location in found:
            assert location.names() == ["shop"]
            for time in (0, 10, 29, 30):
                there = client.collection("shop", as_of=time)
                expected = {reader.render(u.data): u.diff for u in there.snapshot(time)}
                assert location.as_of("shop", time) == expected
        client.destroy("shop")
        assert not reader.Location(folder).state["collections"]
