"""The namespace of a lake."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import persist
from penstock.catalog.namespace import (
    check_free,
    holder_of,
    name_conflicts,
    progress_of_source,
    take_name_in_lake,
    take_user_collection,
)
from penstock.catalog.objects import RequestedObject, known_objects, to_requested, update_catalog
from penstock.errors import UsageError
from penstock.pipeline import Pipeline

SOURCE = RequestedObject("shop", "source")
PROGRESS = RequestedObject("shop_progress", "source_progress", owner="shop")
REMAP = RequestedObject("shop_remap", "collection", owner="shop")
USER = RequestedObject("mine", "collection")
DESK = RequestedObject("desk", "materialization")
TAKEN = [SOURCE, PROGRESS, REMAP, USER, DESK]
POSTGRES = {"url": "postgresql://nobody@127.0.0.1:1/none"}


@pytest.mark.parametrize("requested", TAKEN)
def test_check_free_accepts_name_held_by_same_object(requested):
    check_free(requested, TAKEN)


@pytest.mark.parametrize(
    ("requested", "holder"),
    [
        (RequestedObject("shop", "collection"), 'source "shop"'),
        (RequestedObject("shop", "materialization"), 'source "shop"'),
        (RequestedObject("shop", "source_progress", owner="shop"), 'source "shop"'),
        (RequestedObject("shop.public.orders", "collection"), 'source "shop"'),
        (
            RequestedObject("shop_progress", "collection"),
            'progress relation "shop_progress" of source',
        ),
        (
            RequestedObject("shop_progress", "source"),
            'progress relation "shop_progress" of source "shop"',
        ),
        (
            RequestedObject("shop_progress", "source_progress", owner="till"),
            'relation "shop_progress"',
        ),
        (
            RequestedObject("shop_remap", "source_progress", owner="shop"),
            'collection "shop_remap" of',
        ),
        (RequestedObject("mine", "source"), 'user collection "mine"'),
        (RequestedObject("mine", "source_progress", owner="shop"), 'user collection "mine"'),
        (RequestedObject("desk", "collection"), 'materialization "desk"'),
        (RequestedObject("mz_objects", "source_progress", owner="shop"), "reserved"),
        (RequestedObject("mz_mine", "collection"), "reserved"),
        (RequestedObject("user", "source"), "storage location"),
        (RequestedObject("catalog", "materialization"), "storage location"),
    ],
)
def test_check_free_with_name_of_other_object_raises_usage_error_with_holder(requested, holder):
    with pytest.raises(UsageError, match=f'"{requested.name}".*: the name is taken') as raised:
        check_free(requested, TAKEN)
    assert holder in raised.value.detail
    assert raised.value.hint


def test_source_name_above_user_collection_is_held_by_that_collection():
    taken = [RequestedObject("till.notes", "collection")]
    assert holder_of(RequestedObject("till", "source"), taken) == 'user collection "till.notes"'
    assert holder_of(RequestedObject("tilling", "source"), taken) is None


def test_source_of_one_topic_and_its_collection_may_share_a_name():
    topic = RequestedObject("clicks", "collection", owner="clicks")
    assert holder_of(RequestedObject("clicks", "source"), [topic]) is None
    assert holder_of(topic, [RequestedObject("clicks", "source")]) is None
    assert (
        holder_of(RequestedObject("clicks", "source"), [RequestedObject("clicks", "collection")])
        is not None
    )


def test_progress_name_of_catalog_relation_is_rejected_even_if_held():
    hiding = RequestedObject("mz_objects", "source_progress", owner="shop")
    assert holder_of(hiding, [hiding]) is not None


@given(st.sets(st.sampled_from(["shop_progress", *(f"shop_progress{n}" for n in range(1, 5))])))
def test_progress_of_source_gets_first_free_name_and_keeps_it(names):
    taken = [SOURCE, *(RequestedObject(name, "collection") for name in sorted(names))]
    chosen = progress_of_source("shop", taken)
    order = ["shop_progress", *(f"shop_progress{n}" for n in range(1, 6))]
    assert chosen.name == next(name for name in order if name not in names)
    assert progress_of_source("shop", [chosen, *taken]) == chosen


def conflicts(sources, materializations=(), taken=()):
    pipeline = Pipeline.model_validate(
        {
            "location": "memory:lake",
            "sources": sources,
            "materializations": {
                name: {"connector": "sqlite", "bindings": []} for name in materializations
            },
        }
    )
    return {obj.name: holder for obj, holder in name_conflicts(pipeline, taken)}


def test_name_conflicts_reports_names_used_twice_in_one_file():
    shop, till = {"postgres": POSTGRES}, {"postgres": POSTGRES, "progress": "how_far"}
    assert conflicts({"shop": shop, "till": till}) == {}
    assert conflicts({"shop": {**shop, "progress": "how_far"}, "till": till}) == {
        "how_far": 'progress relation "how_far" of source "shop"'
    }
    assert conflicts({"shop": {**shop, "progress": "shop"}}) == {"shop": 'source "shop"'}
    assert conflicts({"shop": shop, "shop_remap": shop}) == {"shop_remap": 'source "shop_remap"'}
    assert conflicts({"till": till}, ["how_far"]) == {"how_far": 'materialization "how_far"'}
    # A default name yields to an explicit one.
    assert conflicts({"shop": shop, "shop_progress": shop}) == {}


def test_concurrent_catalog_updates_for_one_name_have_one_winner(tmp_path):
    lake = f"file:{tmp_path}/lake"
    start = threading.Barrier(2)

    def take(owner):
        requested = RequestedObject("how_far", "source_progress", owner=owner)

        def with_owner(known):
            check_free(requested, to_requested(known))
            return [*to_requested(known), RequestedObject(owner, "source"), requested]

        start.wait()
        try:
            update_catalog(lake, with_owner)
        except UsageError as error:
            return error
        return owner

    with ThreadPoolExecutor(2) as pool:
        outcomes = [*pool.map(take, ["a", "b"])]
    (winner,) = [obj for obj in outcomes if isinstance(obj, str)]
    (error,) = [obj for obj in outcomes if isinstance(obj, UsageError)]
    assert [obj.name for obj in known_objects(lake)] == [winner, "how_far"]
    assert error.detail == f'The name belongs to progress relation "how_far" of source "{winner}".'


def test_user_collection_takes_its_name_in_catalog_of_its_lake(tmp_path):
    lake = f"file:{tmp_path}/lake"
    update_catalog(lake, lambda _: [SOURCE, PROGRESS])
    take_name_in_lake(f"{lake}/user", "mine")
    take_user_collection(lake, "mine")
    assert [obj.name for obj in known_objects(lake)] == ["shop", "shop_progress", "mine"]
    with pytest.raises(UsageError, match='cannot create user collection "shop_progress"'):
        take_name_in_lake(f"{lake}/user", "shop_progress")
    # A single storage location has no catalog.
    take_name_in_lake(f"file:{tmp_path}/alone", "shop_progress")


def test_collection_outside_catalog_holds_its_name(tmp_path):
    lake = f"file:{tmp_path}/lake"
    with persist.open(f"{lake}/other", writer="w") as client:
        client.create_or_load("old", key=persist.TEXT, value=persist.UNIT)
    with pytest.raises(UsageError, match='cannot create user collection "old"'):
        take_user_collection(lake, "old")
