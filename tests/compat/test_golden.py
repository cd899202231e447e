"""Locations of past releases: this release opens, reads and continues them."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from penstock import persist
from penstock.durable import open_blob
from penstock.persist.checksum_walk import verify
from tests.compat.make_golden import LABEL, MOOD_2, ORDERS_2, make
from tests.compat.reader import render

GOLDEN = sorted(Path(__file__).parent.glob("v*"))
SETTINGS = persist.Settings(background=False, notify="")


@pytest.fixture(params=GOLDEN, ids=lambda folder: folder.name)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, Any]]:
    """Return the URL of a copied location, and its expected contents."""
    shutil.copytree(request.param / "location", tmp_path / "location")
    return f"file:{tmp_path}/location", json.loads((request.param / "expected.json").read_text())


def contents(collection: persist.Collection, time: int) -> dict[str, int]:
    found: Counter[str] = Counter()
    for data, _, diff in collection.snapshot(time):
        found[render(data)] += diff
    return dict(found)


def opened(client: persist.Client, name: str) -> persist.Collection:
    if name == "moods":
        return client.create_or_load(name, key=MOOD_2, value=persist.UNIT)
    return client.collection(name)


def check(client: persist.Client, expected: dict[str, Any]) -> None:
    assert client.collections(hidden=True) == sorted(expected)
    assert client.collections() == sorted(name for name in expected if "/" not in name)
    for name, told in expected.items():
        collection = opened(client, name)
        assert (name, collection.since, collection.upper) == (name, told["since"], told["upper"])
        for time, rows in told["as_of"].items():
            assert (name, time, contents(collection, int(time))) == (name, time, rows)
        for time in told["in_error"]:
            with pytest.raises(persist.CollectionErrored):
                collection.snapshot(time)


def test_golden_locations_are_exactly_those_of_v0_1():
    assert [folder.name for folder in GOLDEN] == ["v0.1"]


def test_golden_location_has_expected_contents(golden):
    url, expected = golden
    with persist.open(url, hold=False, settings=SETTINGS) as client:
        check(client, expected)


def test_golden_location_verifies_without_damage(golden):
    url, _ = golden
    blob = open_blob(url)
    assert verify(blob).damage == ()
    blob.close()


def test_golden_location_reports_unsealed_updates(golden):
    url, _ = golden
    with persist.open(url, hold=False, settings=SETTINGS) as client:
        assert client.unsealed() == [persist.Unsealed("words", 1, 12, 13)]


def test_golden_location_keeps_its_durable_hold_and_sinces(golden):
    url, _ = golden
    with persist.open(url, settings=SETTINGS) as client:
        hold = client.hold("reporting")
        assert (hold.token, hold.sinces()) == (2, {"orders": 20, "codec-text": 1})


def test_golden_location_keeps_begin_error_and_metadata_of_source_collection(golden):
    url, _ = golden
    with persist.open(url, hold=False, settings=SETTINGS) as client:
        visits = client.collection("shop.public.visits")
        with pytest.raises(persist.SinceError) as early:
            visits.snapshot(99)
        assert "begins at 100" in early.value.detail
        with pytest.raises(persist.CollectionErrored, match="as of 110: slot is gone") as failed:
            visits.snapshot(110)
        assert failed.value.hint == (
            "Read as of 112 or later. A listener must start again there. "
            "As of 102 or earlier it can be read too."
        )
        assert (visits.schema.field("at").metadata, visits.schema.field("id").metadata) == (
            LABEL,
            None,
        )
        assert visits.snapshot(120).arrow().schema.field("at").metadata == LABEL


def test_golden_location_continues_with_new_writer(golden):
    url, expected = golden
    with persist.open(url, writer="successor", settings=SETTINGS) as client:
        check(client, expected)
        client.compact()
        check(client, expected)

        client.collection("words").seal(20).result()
        assert contents(client.collection("words"), 19) == {
            '["sealed", null]': 1,
            '["unsealed", null]': 1,
        }
        orders = client.create_or_load("orders", schema=ORDERS_2, key_columns=["id"])
        before = contents(orders, 39)
        item = {"id": 5, "item": "item 5", "count": 1, "price": None}
        assert orders.compare_and_append([(item, 40, -1)], 40, 41) == persist.Appended(41)
        del before[render(item)]
        assert contents(orders, 40) == before

        client.hold("reporting").drop()
        orders.allow_compaction(40).result()
        client.compact()
        assert orders.since == 40
        assert contents(orders, 40) == before

    blob = open_blob(url)
    assert verify(blob).damage == ()
    blob.close()


def test_golden_generator_output_matches_stored_expectation(tmp_path):
    """Guard the generator of golden locations: the next release needs it."""
    expected = make(tmp_path / "location")
    kept = json.loads((GOLDEN[-1] / "expected.json").read_text())
    assert expected == kept
