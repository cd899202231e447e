"""Command output for collections that begin late, are errored or are hidden."""

import json
from pathlib import Path

import pyarrow as pa
import pytest

from penstock import persist
from tests.cli.test_commands import lines, penstock

SETTINGS = persist.Settings(background=False, notify="")
LOST = persist.StoredError("SlotLost", "slot [bold] is gone", "It was dropped.", "Copy again.")


@pytest.fixture
def shop(tmp_path: Path) -> str:
    url = f"file:{tmp_path / 'shop'}"
    with persist.open(url, writer="w", settings=SETTINGS) as client:
        orders = client.create_or_load("orders", schema=pa.schema([("n", pa.int64())]))
        state = client.create_or_load(
            "shop/state", key=persist.TEXT, value=persist.UNIT, owner="shop"
        )
        append = persist.AppendTo(orders, [({"n": 1}, 5, 1), ({"n": 2}, 7, 1)], 0, 8)
        client.append_all([append], [persist.Begin(orders, 5)])
        later = persist.AppendTo(orders, [({"n": 3}, 9, 1), ({"n": 4}, 10, 1)], 8, 20)
        client.append_all([later], [persist.Fail(orders, 10, LOST)])
        state.compare_and_append([(("lsn", None), 1, 1)], 0, 2)
    return url


def test_read_of_errored_collection_fails_with_stored_error(shop):
    for words in ((), ("--as-of", "10")):
        failed = penstock("read", shop, "orders", *words)
        assert failed.returncode == 1
        told = failed.stderr.splitlines()
        assert told[0].endswith(": slot [bold] is gone")
        assert told[1] == "detail: It has been in error since 10. It was dropped."
        assert told[2] == "hint: Read as of 9 or earlier. Copy again."
        assert not failed.stdout
    assert lines(penstock("read", shop, "orders", "--as-of", "9")) == [{"n": n} for n in (1, 2, 3)]


def test_read_before_begin_of_collection_reports_begin_time(shop):
    failed = penstock("read", shop, "orders", "--as-of", "4")
    assert failed.returncode == 1
    assert "It begins at 5" in failed.stderr


def test_tail_of_errored_collection_prints_earlier_rows_then_fails(shop):
    failed = penstock("tail", shop, "orders", "--as-of", "earliest")
    assert failed.returncode == 1
    assert [json.loads(line)["n"] for line in failed.stdout.splitlines()] == [1, 2, 3]
    assert "slot [bold] is gone" in failed.stderr
    until = penstock("tail", shop, "orders", "--as-of", "earliest", "--until", "10")
    assert [line["n"] for line in lines(until)] == [1, 2, 3]


def test_status_of_errored_collection_reports_error(shop):
    (told,) = lines(penstock("status", shop, "--json"))
    (orders,) = told["storage_locations"][0]["collections"]
    assert orders["error"] == {
        "since": 10,
        "kind": "SlotLost",
        "message": "slot [bold] is gone",
        "detail": "It was dropped.",
        "hint": "Copy again.",
    }
    shown = " ".join(penstock("status", shop).stdout.replace("│", " ").split())
    assert "since 10:" in shown  # The table may wrap the text.
    assert "[bold]" in shown


def test_status_with_all_option_lists_hidden_collections(shop):
    (told,) = lines(penstock("status", shop, "--all", "--json"))
    found = told["storage_locations"][0]["collections"]
    assert [(each["name"], each["error"] is None) for each in found] == [
        ("orders", False),
        ("shop/state", True),
    ]
    assert "shop/state" not in penstock("status", shop).stdout
    assert lines(penstock("read", shop, "shop/state")) == [{"key": "lsn", "value": None}]
