"""Collection changes in the entry of an append: begin, grow, fail, recover, unsealed writes."""

from collections import Counter

import pyarrow as pa
import pytest
from tests.persist.shop import SCHEMA, next_changes, opened, rows

from penstock.durable.memory import Shelf
from penstock.errors import DefiniteError, UsageError
from penstock.persist import (
    END,
    INT64,
    TEXT,
    Appended,
    AppendTo,
    Begin,
    CollectionErrored,
    Fail,
    Grow,
    NotYetComplete,
    Recover,
    SinceError,
    StoredError,
    UpperMismatch,
    WriteTo,
)
from penstock.persist.holds import LeasedClaims
from penstock.persist.machine import Machine
from penstock.persist.state import ErrorSpan

WIDER = pa.schema([("k", pa.string()), ("n", pa.int64()), ("a", pa.string())])
LOST = StoredError("SlotLost", "slot is lost", "Its WAL after 16/0 is lost.", "Copy again.")


@pytest.fixture
def shelf():
    return Shelf()


@pytest.fixture
def client(shelf):
    with opened(shelf, inline_bytes=200, part_bytes=300, fan_in=2) as client:
        yield client


@pytest.fixture
def shop(client):
    return client.create_or_load("shop", schema=SCHEMA, key_columns=["k"])


def contents(collection, as_of):
    return Counter({tuple(u.data.values()): u.diff for u in collection.snapshot(as_of)})


def unchanged(client, call, *, match):
    """The call is refused, and nothing was written."""
    before = client.state
    with pytest.raises(UsageError, match=match):
        call()
    assert client.state is before


def test_a_collection_begins_where_it_is_said_to(client, shop):
    done = client.append_all([AppendTo(shop, rows(("a", 1, 40, 1)), 0, 41)], [Begin(shop, 40)])
    assert done == Appended(41)
    assert (shop.since, shop.state.allowed, shop.state.begins) == (40, 40, 40)
    assert contents(shop, 40) == {("a", 1): 1}
    with pytest.raises(SinceError) as refused:
        shop.snapshot(39)
    assert refused.value.detail == "It begins at 40: there was nothing to read before that time."
    assert (refused.value.since, refused.value.begins) == (40, 40)


def test_what_was_compacted_is_told_from_what_never_was(client, shop):
    client.append_all([AppendTo(shop, rows(("a", 1, 40, 1)), 0, 60)], [Begin(shop, 40)])
    shop.allow_compaction(50).result()
    with pytest.raises(SinceError, match="as of 45") as compacted:
        shop.snapshot(45)
    assert "have been compacted away" in compacted.value.detail
    with pytest.raises(SinceError) as before:
        shop.snapshot(30)
    assert "begins at 40" in before.value.detail
    assert before.value.hint == "Read as of 50 or later."


def test_who_listened_before_the_beginning_hears_of_it_all(shelf, client, shop):
    with (
        opened(shelf, writer=None, lease_ms=60_000) as reader,
        shop.listen(-1) as near,
        reader.collection("shop").listen(5) as far,
    ):
        client.append_all([AppendTo(shop, rows(("a", 1, 40, 1)), 0, 41)], [Begin(shop, 40)])
        client.compact()
        for listener, lower in ((near, 0), (far, 6)):
            changes = next_changes(listener)
            assert (changes.lower, changes.upper) == (lower, 41)
            assert [(u.data["k"], u.time, u.diff) for u in changes] == [("a", 40, 1)]
        assert isinstance(reader._runtime.claims, LeasedClaims)
        reader._runtime.claims.renew()  # Its claimed data still exists.


def test_all_there_ever_was_can_be_listened_to_until_it_is_compacted(client, shop):
    client.append_all([AppendTo(shop, rows(("a", 1, 40, 1)), 0, 60)], [Begin(shop, 40)])
    with shop.listen(-1) as listener:
        assert [u.time for u in listener.next_changes(timeout_ms=0)] == [40]
    with pytest.raises(SinceError, match="as of 39"):
        shop.listen(39)
    shop.allow_compaction(50).result()
    with pytest.raises(SinceError):
        shop.listen(-1)


@pytest.mark.parametrize("prepare", ["sealed", "begun", "allowed", "destroyed"])
def test_a_beginning_is_refused_once_it_could_be_seen(client, shop, prepare):
    since = 40
    if prepare == "sealed":
        shop.seal(1).result()
        match = "Its upper is 1|cannot begin at 40"
    elif prepare == "begun":
        client.append_all([], [Begin(shop, 30)])
        match = "cannot begin at 40"
    elif prepare == "allowed":
        shop.allow_compaction(41).result()
        match = "cannot begin at 40"
    else:
        shop.destroy()
        match = "was destroyed"
    unchanged(client, lambda: client.append_all([], [Begin(shop, since)]), match=match)


@pytest.mark.parametrize("since", [-1, END, "40", 1.5])
def test_a_beginning_is_a_time(client, shop, since):
    unchanged(client, lambda: client.append_all([], [Begin(shop, since)]), match="is not a time")


def test_what_was_written_for_earlier_times_comes_with_the_beginning(client, shop):
    shop.write(rows(("a", 1, 3, 1), ("a", 1, 9, -1), ("b", 1, 9, 1))).result()
    with shop.listen(-1) as listener, shop.listen(5) as later:
        client.append_all([AppendTo(shop, [], 0, 20)], [Begin(shop, 40)])
        for each in (listener, later):
            early = each.next_changes(timeout_ms=0)
            assert (len(early), early.upper) == (0, 20)
        client.append_all([AppendTo(shop, rows(("c", 1, 45, 1)), 20, 50)])
        client.compact()
        for each in (listener, later):
            given = [(u.data["k"], u.time) for u in each.next_changes(timeout_ms=0)]
            assert given == [("b", 40), ("c", 45)]
    assert contents(shop, 40) == {("b", 1): 1}


def test_growth_is_seen_from_the_upper_before_the_append(client, shop):
    shop.compare_and_append(rows(("a", 1, 1, 1)), 0, 10)
    table = pa.table({"k": ["b"], "n": pa.array([2**40]), "a": ["x"]}).append_column(
        "mz_timestamp", pa.array([12])
    )
    grow = Grow(shop, WIDER, {"a": "old"})
    assert client.append_all([AppendTo(shop, table, 10, 20)], [grow]) == Appended(20)
    assert shop.snapshot(9).arrow().schema.names[:2] == ["k", "n"]
    assert contents(shop, 9) == {("a", 1): 1}
    assert contents(shop, 10) == {("a", 1, "old"): 1}
    assert contents(shop, 12) == {("a", 1, "old"): 1, ("b", 2**40, "x"): 1}
    # The same once more is nothing new.
    before = client.state
    assert client.append_all([], [grow]) == Appended(20)
    assert client.state is before


def test_growth_takes_tables_and_files_in_the_further_schema(client, shop):
    many = pa.table(
        {"k": [f"k{n}" for n in range(500)], "n": range(500), "a": ["x"] * 500}
    ).append_column("mz_timestamp", pa.array([0] * 500))
    grow = Grow(shop, WIDER)
    with client.staging() as staging:
        staged = client.stage(shop, [many, many], staging, growing=[grow])
        unchanged(
            client,
            lambda: client.append_all([AppendTo(shop, staged, 0, 1)]),
            match="a schema it does not have",
        )
        client.append_all([AppendTo(shop, [staged, many, many.slice(0, 1)], 0, 1)], [grow])
    assert sum(contents(shop, 0).values()) == 1501
    assert contents(shop, 0)["k0", 0, "x"] == 4


def test_a_collection_grows_twice_in_one_entry(client, shop):
    widest = pa.schema([*WIDER, ("b", pa.bool_())])
    grows = [Grow(shop, WIDER, {"a": "old"}), Grow(shop, widest, {"b": True})]
    client.append_all([AppendTo(shop, rows(("a", 1, 0, 1)), 0, 1)])
    columns = {"k": ["c"], "n": [3], "a": ["x"]}
    with client.staging() as staging:
        in_between = client.stage(shop, [pa.table(columns)], staging, time=1, growing=grows[:1])
        last = client.stage(
            shop, [pa.table({**columns, "b": [False]})], staging, time=1, growing=grows
        )
        keys = pa.table({"k": ["a", "c"]})
        found = shop.written(keys, [in_between, last], grows).sort_by([("k", "ascending")])
        assert found.drop_columns(["mz_diff"]).to_pydict() == {
            "k": ["a", "c", "c"],
            "n": [1, 3, 3],
            "a": ["old", "x", "x"],
            "b": [True, True, False],
        }
        assert client.append_all([AppendTo(shop, [in_between, last], 1, 2)], grows) == Appended(2)
    assert contents(shop, 0) == {("a", 1): 1}
    assert contents(shop, 1) == {
        ("a", 1, "old", True): 1,
        ("c", 3, "x", True): 1,
        ("c", 3, "x", False): 1,
    }


@pytest.mark.parametrize(
    ("schema", "defaults", "match"),
    [
        (pa.schema([("k", pa.string())]), {}, "cannot drop"),
        (pa.schema([("k", pa.string()), ("n", pa.int16())]), {}, "cannot change from int32"),
        (WIDER, {"a": 7}, "default"),
        (WIDER, {"z": "7"}, "default"),
        ("k text", {}, "is a str"),
    ],
)
def test_growth_that_older_rows_could_not_follow_is_refused(client, shop, schema, defaults, match):
    append = AppendTo(shop, rows(("a", 1, 0, 1)), 0, 1)
    grow = Grow(shop, schema, defaults)
    unchanged(client, lambda: client.append_all([append], [grow]), match=match)


def test_rows_that_do_not_have_the_further_schema_are_refused(client, shop):
    append = AppendTo(shop, rows(("a", 1, 0, 1)), 0, 1)
    unchanged(client, lambda: client.append_all([append], [Grow(shop, WIDER)]), match="columns")


def test_keys_and_values_do_not_grow(client):
    pairs = client.create_or_load("pairs", key=TEXT, value=INT64)
    unchanged(
        client, lambda: client.append_all([], [Grow(pairs, WIDER)]), match="holds keys and values"
    )


def test_an_error_is_met_by_every_reading_from_its_time_on(client, shop):
    shop.compare_and_append(rows(("a", 1, 1, 1)), 0, 10)
    append = AppendTo(shop, rows(("b", 2, 12, 1)), 10, 20)
    assert client.append_all([append], [Fail(shop, 15, LOST)]) == Appended(20)
    assert shop.state.errors == (ErrorSpan(15, LOST),)
    assert contents(shop, 14) == {("a", 1): 1, ("b", 2): 1}
    with pytest.raises(CollectionErrored) as errored:
        shop.snapshot(15)
    error = errored.value
    assert isinstance(error, DefiniteError)
    assert str(error) == 'collection "shop" cannot be read as of 15: slot is lost'
    assert error.detail == "It has been in error since 15. Its WAL after 16/0 is lost."
    assert error.hint == "Read as of 14 or earlier. Copy again."
    assert (error.collection, error.since, error.kind) == ("shop", 15, "SlotLost")
    shop.seal(30).result()
    with pytest.raises(CollectionErrored, match="as of 29"):
        shop.snapshot(29)
    with pytest.raises(NotYetComplete):
        shop.snapshot(30)


def test_a_listener_is_given_all_before_the_error_and_then_the_error(client, shop):
    with shop.listen(-1) as listener, shop.listen(12) as late:
        shop.compare_and_append(rows(("a", 1, 1, 1)), 0, 10)
        append = AppendTo(shop, rows(("b", 2, 14, 1), ("c", 2, 15, 1)), 10, 20)
        client.append_all([append], [Fail(shop, 15, LOST)])
        changes = listener.next_changes(timeout_ms=0)
        assert (changes.lower, changes.upper) == (0, 15)
        assert [u.time for u in changes] == [1, 14]
        assert [u.time for u in late.next_changes(timeout_ms=0)] == [14]
        for each in (listener, late):
            for _ in range(2):
                with pytest.raises(CollectionErrored, match="as of 15: slot is lost"):
                    each.next_changes(timeout_ms=0)
        with (
            shop.listen(17, snapshot=True) as inside,
            pytest.raises(CollectionErrored, match="as of 17"),
        ):
            inside.next_changes(timeout_ms=0)


def test_a_listener_waits_before_an_error_that_nobody_has_reached(client, shop):
    shop.seal(15).result()
    client.append_all([], [Fail(shop, 15, LOST)])
    with shop.listen(13) as listener:
        assert listener.next_changes(timeout_ms=0).upper == 15
        assert listener.next_changes(timeout_ms=0) is None
        shop.seal(16).result()
        with pytest.raises(CollectionErrored):
            listener.next_changes(timeout_ms=0)


def test_what_recovered_can_be_read_again_and_the_past_stays_as_it_was(client, shop):
    client.append_all([AppendTo(shop, rows(("a", 1, 1, 1)), 0, 10)], [Fail(shop, 5, LOST)])
    repaired = AppendTo(shop, rows(("a", 1, 20, -1), ("b", 2, 20, 1)), 10, 30)
    client.append_all([repaired], [Recover(shop, 20)])
    assert shop.state.errors == (ErrorSpan(5, LOST, 20),)
    assert contents(shop, 4) == {("a", 1): 1}
    for as_of in (5, 12, 19):
        with pytest.raises(CollectionErrored):
            shop.snapshot(as_of)
    assert contents(shop, 20) == {("b", 2): 1}
    with shop.listen(20) as listener:
        assert listener.next_changes(timeout_ms=0).upper == 30
    with shop.listen(19) as listener, pytest.raises(CollectionErrored, match="as of 19"):
        listener.next_changes(timeout_ms=0)
    client.append_all([], [Fail(shop, 31, LOST)])
    assert [span.lower for span in shop.state.errors] == [5, 31]


def test_an_error_that_is_over_goes_with_the_history_it_was_in(shelf, client, shop):
    client.append_all([AppendTo(shop, rows(("a", 1, 1, 1)), 0, 10)], [Fail(shop, 5, LOST)])
    client.append_all([AppendTo(shop, rows(("b", 1, 20, 1)), 10, 30)], [Recover(shop, 20)])
    shop.allow_compaction(19).result()
    client.compact()
    assert len(shop.state.errors) == 1
    with pytest.raises(CollectionErrored):
        shop.snapshot(19)
    shop.allow_compaction(20).result()
    client.compact()
    assert shop.state.errors == ()
    assert contents(shop, 20) == {("a", 1): 1, ("b", 1): 1}
    assert Machine(client._blob, client._settings).load() == client.state


def test_since_may_pass_where_a_lasting_error_began(client, shop):
    client.append_all([AppendTo(shop, rows(("a", 1, 1, 1)), 0, 10)], [Fail(shop, 5, LOST)])
    shop.allow_compaction(8).result()
    client.compact()
    assert shop.since == 8
    with pytest.raises(CollectionErrored, match="as of 8"):
        shop.snapshot(8)


@pytest.mark.parametrize(
    ("time", "match"), [(9, "cannot fail at 9"), (-1, "not a time"), (END, "not a time")]
)
def test_an_error_does_not_change_what_was_complete(client, shop, time, match):
    shop.seal(10).result()
    unchanged(client, lambda: client.append_all([], [Fail(shop, time, LOST)]), match=match)


def test_the_first_error_stands(client, shop):
    client.append_all([], [Fail(shop, 5, LOST)])
    unchanged(client, lambda: client.append_all([], [Fail(shop, 7, LOST)]), match="fail at 7")
    client.append_all([], [Recover(shop, 20)])
    unchanged(client, lambda: client.append_all([], [Fail(shop, 19, LOST)]), match="fail at 19")
    client.append_all([], [Fail(shop, 20, LOST)])


def test_only_what_failed_recovers_and_not_in_the_past(client, shop):
    unchanged(client, lambda: client.append_all([], [Recover(shop, 5)]), match="not in error|at 5")
    client.append_all([AppendTo(shop, [], 0, 10)], [Fail(shop, 5, LOST)])
    unchanged(client, lambda: client.append_all([], [Recover(shop, 9)]), match="recover at 9")
    client.append_all([], [Recover(shop, 10)])
    unchanged(client, lambda: client.append_all([], [Recover(shop, 11)]), match="recover at 11")


def test_what_recovers_as_it_fails_never_failed(client, shop):
    client.append_all([], [Fail(shop, 5, LOST), Recover(shop, 5)])
    assert shop.state.errors == ()


def test_updates_can_be_left_unsealed_beside_an_append(client, shop):
    other = client.create_or_load("other", schema=SCHEMA)
    done = client.append_all(
        [AppendTo(shop, rows(("a", 1, 1, 1)), 0, 2)],
        [WriteTo(other, [rows(("b", 2, 7, 1)), rows(("c", 3, 9, 1))])],
    )
    assert done == Appended(2)
    assert other.upper == 0
    assert [(u.collection, u.updates, u.lower, u.upper) for u in client.unsealed()] == [
        ("other", 2, 7, 10)
    ]
    # They become visible together, with a beginning.
    client.append_all([AppendTo(other, [], 0, 10)], [Begin(other, 7)])
    assert contents(other, 9) == {("b", 2): 1, ("c", 3): 1}


def test_an_update_below_upper_is_refused_unsealed_too(client, shop):
    shop.seal(5).result()
    late = WriteTo(shop, rows(("a", 1, 4, 1)))
    unchanged(client, lambda: client.append_all([], [late]), match="update at 4")


def test_a_lost_race_says_so_before_anything_else(client, shop):
    shop.seal(10).result()
    before = client.state
    lost = client.append_all(
        [AppendTo(shop, [], 0, 5)], [Fail(shop, 3, LOST), Begin(shop, 2), Recover(shop, 1)]
    )
    assert lost == UpperMismatch("shop", 10)
    assert client.state is before


def test_one_that_is_refused_takes_all_others_with_it(client, shop):
    other = client.create_or_load("other", schema=SCHEMA)
    unchanged(
        client,
        lambda: client.append_all(
            [AppendTo(other, rows(("a", 1, 1, 1)), 0, 2)],
            [Begin(other, 1), Grow(shop, WIDER), Fail(shop, 5, LOST), Recover(shop, 4)],
        ),
        match="recover at 4",
    )
    assert shop.schema.equals(SCHEMA)


def test_nothing_at_all_is_refused(client):
    unchanged(client, lambda: client.append_all([], []), match="no collection")


def test_collections_of_another_client_are_refused(client, shop):
    with opened(Shelf()) as foreign:
        theirs = foreign.create_or_load("shop", schema=SCHEMA)
        unchanged(client, lambda: client.append_all([], [Begin(theirs, 1)]), match="another client")


def test_it_is_all_there_after_reopening(shelf, client, shop):
    client.append_all([AppendTo(shop, rows(("a", 1, 7, 1)), 0, 9)], [Begin(shop, 7)])
    client.append_all([AppendTo(shop, [], 9, 20)], [Grow(shop, WIDER), Fail(shop, 11, LOST)])
    client.append_all([AppendTo(shop, [], 20, 30)], [Recover(shop, 25)])
    state = shop.state
    client.compact()
    client.close()
    with opened(shelf, writer=None) as reader:
        again = reader.collection("shop").state
        assert (again.begins, again.errors) == (7, (ErrorSpan(11, LOST, 25),))
        assert (again.schemas, again.upper) == (state.schemas, 30)
