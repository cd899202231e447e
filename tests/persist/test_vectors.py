"""The cases of tests/vectors/materialize.json that are about persist.

`ABOUT` says of each whether it holds here as it is, holds in another form that
we decided on, or says nothing about us. An upper or since of [] there, after
all times, is END here.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.persist.shop import opened

from penstock.durable.memory import MemoryBlob, Shelf
from penstock.errors import IndeterminateError, InternalError, StoreRefused, UsageError
from penstock.persist import (
    END,
    TEXT,
    UNIT,
    Appended,
    AppendTo,
    Closed,
    Collection,
    SinceError,
    UpperMismatch,
)
from penstock.persist.encoding import ENCODING_VERSIONS, checksum, encode_rollup
from penstock.persist.merge.spine import next_merge
from penstock.persist.state import State
from penstock.testing.stores import Fate, UnreliableBlob

ABOUT = {
    "P01": "decided: write and seal are the API; unsealed updates are invisible, not a second list",
    "P09": "decided: a destroyed name may be made again, as a new and empty collection; an unknown "
    "name is no error, since destroy returns whether it existed",
    "P11": "as is, without the number: an empty write succeeds and costs no entry",
    "P13": "as is",
    "P15": "decided: nothing is ever wiped; every version but our own is refused and kept",
    "P16": "as is, in tests/contracts/test_log_contract.py",
    "P17": "as is, in tests/contracts/test_blob_contract.py",
    "P18": "as is",
    "P19": "decided: durable entries are the state; the pending call gets the error and the next "
    "opening shows whether it happened",
    "S02": "as is",
    "S03": "as is, by compare_and_append: a gap is a mismatch",
    "S04": "decided: there is no append that trims, only compare_and_append, so the overlapping "
    "one is a mismatch and nothing is doubled",
    "S05": "as is",
    "S08": "as is, of merged batches; a batch may be written unsorted",
    "S09": "decided: a merge never advances rows past upper, for any since",
    "S10a": "as is",
    "S13d": "not applicable: the bounds of a merged batch are computed from its rows",
    "S13e": "not applicable: batches may overlap in time; only their sum counts",
    "S13f": "as is",
    "S17": "as is, with durable holds; after a hold ends, since advances at the next settling",
    "S19": "decided: destroy needs no empty frontiers; it is the owner's word",
    "S20": "as is",
    "S21": "as is",
    "S23": "as is, the versions being what holds still read",
    "S24": "as is",
    "S26": "decided: an empty interval makes no batch at all",
    "S29": "as is, by append_all: a closed time is a mismatch that returns the upper",
    "S31": "decided: one entry commits and applies, so nothing is ever committed and not applied; "
    "the inline rows are what upkeep moves out later",
}

CASES = {
    case["id"]: case
    for case in json.loads(
        (Path(__file__).parents[1] / "vectors" / "materialize.json").read_text()
    )["cases"]
}


@pytest.fixture
def shelf():
    return Shelf()


@pytest.fixture
def client(shelf):
    with opened(shelf) as client:
        yield client


@pytest.fixture
def collection(client):
    return client.create_or_load("0", key=TEXT, value=TEXT)


def pairs(updates: list[list[Any]]) -> list[Any]:
    return [((key, value), time, diff) for key, value, time, diff in updates]


def listed(read: Any) -> list[list[Any]]:
    return sorted([*update.data, update.time, update.diff] for update in read)


def obeyed(collection: Any, op: dict[str, Any]) -> Any:
    """The result of one operation of a shard, as the vectors write it."""
    ((verb, given),) = op.items()
    if verb == "snapshot":
        return listed(collection.snapshot(given))
    updates, lower, upper = given
    match collection.compare_and_append(pairs(updates), lower, upper):
        case Appended():
            return "ok"
        case UpperMismatch(current=current):
            return {"upper_mismatch": current}
        case outcome:
            raise AssertionError(outcome)


def test_every_case_of_families_p_and_s_is_spoken_of():
    assert set(ABOUT) == {id for id in CASES if id[0] in "PS"}
    assert all(
        text.split(":")[0].split(",")[0] in ("as is", "decided", "not applicable")
        for text in ABOUT.values()
    )


def test_p01_sealing_makes_readable_and_changes_nothing_else(client, collection):
    ops = CASES["P01"]["given"]["ops"]
    written = next(op["write"][1] for op in ops if "write" in op)
    collection.write(pairs(written)).result()
    assert client.unsealed()[0].updates == 2
    collection.seal(2).result()
    assert listed(collection.snapshot(1)) == [["1", "", 1, 1]]
    client.run_maintenance()
    collection.seal(3).result()
    client.run_maintenance()
    assert listed(collection.snapshot(2)) == [["1", "", 2, 1], ["2", "", 2, 1]]
    assert client.unsealed() == []


def test_p09_destroy_tells_whether_it_was_there_and_the_name_may_be_made_again(client):
    results = []
    for op in CASES["P09"]["given"]["ops"]:
        ((verb, name),) = op.items()
        if verb == "destroy":
            results.append(client.destroy(name))
        else:
            made = client.create_or_load(name, key=TEXT, value=UNIT)
            results.append(made.id)
    first, again = results[0], results[-1]
    assert results[1:4] == [True, False, False]
    assert first != again


def test_p11_an_empty_write_succeeds(client, collection):
    before = client.state.seqno
    assert collection.write([]).result() == Appended(0)
    assert client.state.seqno == before


def test_p13_listening_with_a_snapshot_neither_loses_nor_doubles(collection):
    collection.write([(("foo", ""), 1, +1), (("foo", ""), 100, -1)]).result()
    collection.seal(2).result()
    with collection.listen(1, snapshot=True) as listener:
        seen = list(listener.next_changes(timeout_ms=0))
        collection.seal(101).result()
        seen += list(listener.next_changes(timeout_ms=0))
        assert listener.next_changes(timeout_ms=0) is None
    expect = CASES["P13"]["expect"]
    assert sum(update.diff for update in seen) == expect["sum_of_diffs_seen"]
    assert len(seen) - len({(u.data, u.time) for u in seen}) == expect["duplicates"]


@pytest.mark.parametrize("stored", CASES["P15"]["given"]["stored"])
def test_p15_another_encoding_is_refused_and_kept(shelf, stored):
    if stored is not None:
        frame = bytearray(encode_rollup(State(seqno=1)))
        newest, oldest = max(ENCODING_VERSIONS), min(ENCODING_VERSIONS)
        frame[5] = {"cur": newest, "cur+1": newest + 1, "cur-1": oldest - 1}[stored]
        frame[-8:] = checksum(bytes(frame[:-8])).to_bytes(8, "little")
        MemoryBlob(shelf).put("rollup/00000000000000000001", bytes(frame))
    kept = dict(shelf.objects)
    if stored in (None, "cur"):
        opened(shelf, writer=None).close()
    else:
        with pytest.raises(StoreRefused, match="has encoding version"):
            opened(shelf)
        del shelf.objects["probe/passed-1"]
    assert shelf.objects == kept


def test_p18_closing_twice_is_fine_and_nothing_comes_after(client, collection):
    collection.write([(("a", ""), 0, 1)]).result()
    client.close()
    with pytest.raises(Closed):
        client.create_or_load("1", key=TEXT, value=TEXT)
    client.close()


def test_p18_a_client_that_is_forgotten_gives_the_lock_back(shelf):
    client = opened(shelf, writer="forgetful")
    client.create_or_load("0", key=TEXT, value=TEXT)
    del client
    opened(shelf, writer="another").close()


@pytest.mark.parametrize("happened", [True, False])
def test_p19_a_pending_write_errors_and_the_state_is_what_is_durable(shelf, happened):
    fates: Iterator[Fate] = iter(())
    client = opened(
        shelf,
        patience_ms=0,
        wrap=lambda blob: UnreliableBlob(
            blob, script=(f for f in iter(lambda: next(fates, Fate.ANSWERED), None))
        ),
    )
    collection = client.create_or_load("0", key=TEXT, value=TEXT)
    fates = iter([Fate.ANSWER_LOST if happened else Fate.REQUEST_LOST])
    with pytest.raises(IndeterminateError):
        collection.compare_and_append([(("a", ""), 0, 1)], 0, 1)
    with pytest.raises(IndeterminateError):
        collection.write([(("b", ""), 1, 1)])
    with opened(shelf) as again:
        found = again.collection("0")
        assert found.upper == happened
        if happened:
            assert listed(found.snapshot(0)) == [["a", "", 0, 1]]
    with pytest.raises(IndeterminateError):
        client.close()


@pytest.mark.parametrize("id", ["S02", "S03"])
def test_append_at_the_upper_or_learn_it(collection, id):
    case = CASES[id]
    assert [obeyed(collection, op) for op in case["given"]["ops"]] == case["expect"]["results"]


def test_s04_an_overlapping_append_is_a_mismatch_and_nothing_is_doubled(collection):
    first, overlapping, contiguous, snapshot = CASES["S04"]["given"]["ops"]
    assert obeyed(collection, first) == "ok"
    assert obeyed(collection, overlapping) == {"upper_mismatch": 3}
    assert obeyed(collection, contiguous) == "ok"
    assert obeyed(collection, snapshot) == CASES["S04"]["expect"]["results"][-1]


def test_s05_updates_outside_their_bounds_are_refused(client, collection):
    first, *wrong = CASES["S05"]["given"]["ops"]
    assert obeyed(collection, first) == "ok"
    before = client.state
    said = ["lies below 4", "is beyond 3", "back to 2"]
    for op, words in zip(wrong, said, strict=True):
        with pytest.raises(UsageError, match=words):
            obeyed(collection, op)
    assert client.state == before


@pytest.mark.parametrize("at", range(3))
def test_s08_a_merged_batch_is_sorted_and_consolidated(client, at):
    batch = CASES["S08"]["given"]["batches"][at]
    collection = client.create_or_load("s08", key=TEXT, value=UNIT)
    for key, time, diff in batch["updates"]:
        collection.write([((key, None), time, diff)]).result()
    collection.seal(batch["upper"]).result()
    client.compact()
    batches = collection.state.batches
    assert sum(len(batch.parts) for batch in batches) == CASES["S08"]["expect"]["parts"][at]
    found = [
        [row["key"], row["mz_timestamp"], row["mz_diff"]]
        for batch in batches
        for row in client._batches.rows(
            collection.state, batch, collection.state.schemas[-1]
        ).to_pylist()
    ]
    assert found == CASES["S08"]["expect"]["contents"][at]


def test_s09_rows_stay_below_the_upper_they_were_sealed_under(client, collection):
    beyond, compacted = CASES["S09"]["given"]["batches"]
    with pytest.raises(UsageError, match="is beyond 2"):
        collection.compare_and_append([(("a", ""), beyond["updates"][0][1], 1)], 0, beyond["upper"])
    collection.compare_and_append([(("a", ""), 0, 1)], 0, compacted["upper"])
    collection.allow_compaction(compacted["since"]).result()
    client.compact()
    assert collection.since == compacted["since"]
    assert [batch.upper for batch in collection.state.batches] == [compacted["upper"]]
    client.discard_unsealed()
    collection.seal(11).result()
    assert listed(collection.snapshot(10)) == [["a", "", 10, 1]]


def test_s10a_a_lost_request_is_sent_again(shelf):
    case = CASES["S10a"]
    client = opened(shelf, wrap=lambda blob: UnreliableBlob(blob, script=lost_once(blob)))
    with client:
        collection = client.create_or_load("0", key=TEXT, value=TEXT)
        expected, new = case["given"]["retry"]
        outcome = collection.compare_and_append([(("a", ""), 0, 1)], expected, new)
        assert outcome == Appended(case["expect"]["upper"])
        assert client.statistics().retries
        assert listed(collection.snapshot(0)) == [["a", "", 0, 1]]


def lost_once(blob):
    """Every other request is lost."""
    while True:
        yield Fate.ANSWERED
        yield Fate.REQUEST_LOST


def test_s13f_a_merge_does_not_go_back_behind_its_inputs(client, collection):
    collection.compare_and_append([(("a", ""), 0, 1)], 0, 2)
    (_, _, input_since), output_since = CASES["S13f"]["given"]["inputs_desc"][0], 0
    collection.allow_compaction(input_since).result()
    client.compact()
    state = collection.state
    assert state.batches[0].since == input_since
    with pytest.raises(InternalError, match="got a batch compacted to 1"):
        client._maintenance().merger.merge(state, state.batches, since=output_since)


def test_s17_since_is_the_least_of_what_is_held(client, collection):
    collection.seal(20).result()
    holds, given, results = {}, CASES["S17"]["given"]["ops"], []
    for verb, *args in given:
        if verb == "reg":
            holds[args[0]] = client.hold(args[0])
            holds[args[0]].move({"0": collection.since})
            results.append(collection.since)
        elif verb == "down":
            hold = holds[args[0]]
            held = max(hold.sinces()["0"], args[1])
            hold.move({"0": held})
            collection.allow_compaction(19 if len(holds) else 0).result()
            results.append(hold.sinces()["0"])
        elif verb == "since":
            results.append(collection.since)
        else:
            holds.pop(args[0]).drop()
            results.append("ok")
    assert results == CASES["S17"]["expect"]["results"]


def test_s19_destroy_is_the_owners_word(client):
    for since, upper in [(END, 3), (2, END), (END, END)]:
        collection = client.create_or_load("s19", key=TEXT, value=TEXT)
        collection.seal(upper).result()
        collection.allow_compaction(since).result()
        assert client.destroy("s19")
        entries = client.state.seqno
        assert not client.destroy("s19")
        assert client.state.seqno == entries


def test_s20_a_closed_collection_can_be_read_and_compacted(client, collection):
    collection.compare_and_append([(("a", ""), 1, 1)], 0, END)
    collection.allow_compaction(1).result()
    assert listed(collection.snapshot(2)) == [["a", "", 2, 1]]
    assert collection.compare_and_append([], 3, 4) == UpperMismatch("0", END)
    assert collection.allow_compaction(2).result().since == 2
    client.compact()
    assert listed(collection.snapshot(2)) == [["a", "", 2, 1]]


def test_s21_history_given_up_does_not_stop_writing(client, collection):
    collection.compare_and_append([(("a", ""), 1, 1)], 0, 2)
    collection.allow_compaction(END).result()
    assert collection.compare_and_append([(("b", ""), 2, 1)], 2, 3) == Appended(3)
    with pytest.raises(SinceError) as refused:
        collection.snapshot(2)
    assert refused.value.since == END
    client.compact()
    assert client.unsealed() == []


def test_s23_files_live_as_long_as_a_reader_may_need_them(shelf):
    client = opened(shelf, inline_bytes=0)
    collection = client.create_or_load("0", key=TEXT, value=TEXT)
    for time in range(3):
        many = [((f"k{n}", "v" * 100), time, 1) for n in range(80)]
        collection.compare_and_append(many, time, time + 1)
    (first, *_) = sorted(client.state.linked())
    alive = []
    with opened(shelf, writer=None) as reader:
        with reader.collection("0").listen(2):
            client.compact()
            assert first not in client.state.linked()
            alive.append(first in shelf.objects)
        reader._runtime.claims.close()
        client.compact()
        alive.append(first in shelf.objects)
    assert alive == CASES["S23"]["expect"]["b0_alive"]
    client.close()


def pushed(batches: list[list[int]], given: list[list[int]]) -> list[list[int]]:
    """Push batches of [lower, upper, rows] and merge as the spine requests."""
    for batch in given:
        batches = [*batches, batch]
        while (chosen := next_merge([rows for *_, rows in batches], fan_in=2)) is not None:
            merged = batches[chosen.start : chosen.stop]
            one = [merged[0][0], merged[-1][1], sum(rows for *_, rows in merged)]
            batches = [*batches[: chosen.start], one, *batches[chosen.stop :]]
    return batches


def test_s24_small_batches_merge_geometrically_and_a_big_one_stays_apart():
    *few, big = CASES["S24"]["given"]["push"]
    before = pushed([], few)
    assert before == CASES["S24"]["expect"]["batches_before_big"]
    assert pushed(before, [big]) == CASES["S24"]["expect"]["batches_after_big"]


def test_s26_empty_intervals_make_no_batches_and_no_merges(client, collection):
    for lower, upper, rows in CASES["S26"]["given"]["push"]:
        many = [((str(n), ""), lower, 1) for n in range(rows)]
        assert collection.compare_and_append(many, lower, upper) == Appended(upper)
        client.run_maintenance()
    (only,) = collection.state.batches
    assert (only.lower, only.upper, only.rows) == (3, 4, 10)
    assert not only.merged


def test_s29_a_commit_at_a_closed_time_tells_the_earliest_usable_one(client):
    made: dict[str, Collection] = {}
    results: list[Any] = []
    now = 0

    def commit(time, writes):
        appends = [
            AppendTo(
                each, [((key, ""), time, 1) for key in writes.get(name, [])], each.upper, time + 1
            )
            for name, each in made.items()
        ]
        if time < now:
            # A writer that is behind expects an old upper.
            late = [AppendTo(a.collection, a.updates, time, time + 1) for a in appends]
            outcome = client.append_all(late)
            assert isinstance(outcome, UpperMismatch)
            return {"error_earliest": outcome.current}
        assert client.append_all(appends) == Appended(time + 1)
        return "ok"

    for verb, *args in CASES["S29"]["given"]["ops"]:
        if verb == "register":
            made[args[0]] = client.create_or_load(args[0], key=TEXT, value=TEXT)
            results.append("ok")
        elif verb == "commit":
            results.append(commit(*args))
            now = max(each.upper for each in made.values())
        else:
            name, as_of = args
            results.append(sorted(u.data[0] for u in made[name].snapshot(as_of)))
    assert results == CASES["S29"]["expect"]["results"]


def test_s31_what_is_committed_is_readable_at_once_and_upkeep_may_come_late(shelf):
    with opened(shelf, inline_bytes=0) as client:
        collection = client.create_or_load("0", key=TEXT, value=TEXT)
        collection.compare_and_append([(("a", ""), 2, 1)], 0, 3)
        assert listed(collection.snapshot(2)) == [["a", "", 2, 1]]
        assert client.state.linked() == set()
        for _ in range(3):
            client.compact()
            assert listed(collection.snapshot(2)) == [["a", "", 2, 1]]
            assert len(client.state.linked()) == 1
