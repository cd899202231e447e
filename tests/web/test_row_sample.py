"""Row samples of a collection are exact for every size and history."""

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import persist
from penstock.web import row_sample as sampling
from penstock.web.row_sample import latest_changes, sample
from tests.web.http_client import ask, query

SCHEMA = pa.schema([("id", pa.int64()), ("word", pa.string())])
SETTINGS = persist.Settings(background=False, notify="", inline_bytes=1, part_bytes=1, fan_in=2)
"""Each part holds one row, and every two batches are merged."""

rows = st.tuples(st.integers(0, 6), st.sampled_from("abc"))
steps = st.lists(st.lists(rows, max_size=4, unique_by=lambda row: row[0]), min_size=1, max_size=8)


def written(client, key, ticks):
    """Write rows at each tick; with a key, a row replaces the previous row of its key."""
    words = client.create_or_load("words", schema=SCHEMA, key_columns=["id"] if key else [])
    now = {}
    for time, rows in enumerate(ticks):
        updates = []
        for id, word in rows:
            if key and now.get(id) is not None:
                updates.append(({"id": id, "word": now[id]}, time, -1))
            now[id] = word
            updates.append(({"id": id, "word": word}, time, 1))
        words.compare_and_append(updates, time, time + 1)
    return words


@settings(max_examples=25)
@given(steps, st.booleans(), st.booleans(), st.integers(0, 9), st.integers(1, 20))
def test_row_sample_is_subset_of_snapshot_with_exact_diffs(ticks, key, merged, at, limit):
    with persist.open("memory:", writer="w", settings=SETTINGS) as client:
        words = written(client, key, ticks)
        as_of = min(at, len(ticks) - 1)
        if merged:
            words.allow_compaction(as_of).result()
            client.run_maintenance()
        whole = {
            (str(update.data["id"]), update.data["word"]): str(update.diff)
            for update in words.snapshot(as_of)
        }
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampling, "SMALL_BYTES", -1)
            large = sample(words, as_of, limit)
        small = sample(words, as_of, limit)
        for found in (large, small):
            rows = dict(zip(map(tuple, found["rows"]), found["diffs"], strict=True))
            assert rows.items() <= whole.items()
            assert len(found["rows"]) == len(rows) <= limit
        assert len(small["rows"]) == min(limit, len(whole))
        if len(whole) * 2 <= limit:
            assert len(large["rows"]) == len(whole)


@settings(max_examples=25)
@given(steps, st.booleans(), st.integers(0, 8), st.integers(1, 20))
def test_latest_changes_returns_newest_exact_changes(ticks, key, since, limit):
    with persist.open("memory:", writer="w", settings=SETTINGS) as client:
        words = written(client, key, ticks)
        with words.listen(-1) as listener:
            changes = list(listener.next_changes(timeout_ms=0) or ())
        if since:
            words.allow_compaction(min(since, len(ticks) - 1)).result()
        client.run_maintenance()
        kept = words.state.first_exact_time
        told = sorted(
            (
                (each.time, str(each.data["id"]), each.data["word"], each.diff)
                for each in changes
                if each.time >= kept
            ),
            reverse=True,
        )
        found = latest_changes(words, limit)
        shown = [
            (int(time), *row, int(diff))
            for time, row, diff in zip(found["times"], found["rows"], found["diffs"], strict=True)
        ]
        assert set(shown) <= set(told)
        assert [each[0] for each in shown] == [each[0] for each in told[:limit]]


def test_rows_request_accepts_as_of_latest_number_and_rfc_3339(shop, served, clock):
    first = shop.tick(2)
    clock.move_ms(60_000)
    shop.tick(3)

    def rows(as_of):
        answer = ask(
            served.url, query("/api/rows", collection="shop.public.orders", as_of=as_of, limit=100)
        )
        assert answer.status == 200, answer.json
        return answer.json

    assert [row[0] for row in rows("latest")["rows"]] == ["1", "2", "3", "4", "5"]
    then = rows(first)
    assert [row[:3] for row in then["rows"]] == [["1", "1", "new"], ["2", "2", "new"]]
    assert (then["complete"], then["as_of"]) == (True, first)
    assert rows("2023-11-14T22:13:20Z")["rows"] == then["rows"]
    assert then["columns"][0] == {"name": "id", "type": "int64", "key": True}
    assert rows("latest")["rows"][1][2:4] == ["paid", "1.74"]


@pytest.mark.parametrize(
    ("as_of", "text"),
    [("yesterday", "not a time"), ("1", "since"), ("99999999999999", "complete")],
    ids=["no-time", "before", "after"],
)
def test_rows_request_with_unreadable_as_of_returns_400_with_hint(shop, served, as_of, text):
    shop.tick()
    orders = shop.client.collection("shop.public.orders")
    orders.allow_compaction(shop.upper - 1).result()
    shop.client.run_maintenance()
    given = query("/api/rows", collection="shop.public.orders", as_of=as_of)
    answer = ask(served.url, given)
    assert answer.status == 400
    error = answer.json["error"]
    assert text in (error["message"] + error["detail"])
    assert error["hint"]


def test_rows_request_for_missing_collection_returns_404_with_names(served, shop):
    shop.tick()
    answer = ask(served.url, query("/api/rows", collection="shop.public.oders"))
    assert answer.status == 404
    assert "shop.public.orders" in answer.json["error"]["detail"]
    assert ask(served.url, "/api/changes").status == 400


def test_rows_request_returns_wide_numbers_as_text(shop, served):
    big = shop.client.create_or_load(
        "big",
        schema=pa.schema([("n", pa.int64()), ("d", pa.decimal128(38, 2)), ("b", pa.binary())]),
    )
    row = {"n": 2**53 + 1, "d": "12345678901234567890.10", "b": b"\x00\xff"}
    table = pa.table({name: [value] for name, value in row.items()}).cast(big.schema)
    big.compare_and_append(table, 0, 1, time=0)
    answer = ask(served.url, query("/api/rows", collection="big"))
    assert answer.json["rows"] == [["9007199254740993", "12345678901234567890.10", "AP8="]]


def test_rows_request_for_large_collection_without_key_columns_returns_400(
    shop, served, monkeypatch
):
    monkeypatch.setattr(sampling, "SMALL_BYTES", -1)
    pairs = shop.client.create_or_load("pairs", key=persist.TEXT, value=persist.JSON)
    pairs.compare_and_append([(("k", {"v": 1}), 0, 1)], 0, 1)
    answer = ask(served.url, query("/api/rows", collection="pairs"))
    assert answer.status == 400
    assert "penstock read" in answer.json["error"]["hint"]
