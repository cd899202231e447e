"""Names that tasks take in the catalog before they create anything."""

from pathlib import Path
from typing import Any

import pytest

from penstock import persist
from penstock.catalog.namespace import take_user_collection
from penstock.catalog.objects import RequestedObject, known_objects, to_requested, update_catalog
from penstock.clock import SYSTEM_CLOCK
from penstock.engine import apply
from penstock.engine.preflight import plan_file
from penstock.errors import IndeterminateError, UsageError
from penstock.failpoints import Action, Failpoint, armed
from penstock.persist.append.user_collections import USER_LOCATION
from penstock.pipeline import Pipeline
from penstock.supervisor import Task

URL = "postgresql://nobody@127.0.0.1:1/none"


NO_CLIENT: Any = None  # `build_nothing` does not use it.


def build_nothing(_client: Any) -> Any:
    return None


def catalog_updates(lake, *names, **more):
    """Return the catalog, and the builders of tasks that create nothing."""
    section = {"postgres": {"url": URL}, **more}
    written = {"location": lake, "sources": dict.fromkeys(names, section)}
    catalog = apply._CatalogUpdates(Pipeline.model_validate(written), written, SYSTEM_CLOCK)

    def build(name):
        url = f"{lake}/{name}"
        task = Task(name, "source", url, "w", build_nothing, lambda _client, _keep: None)
        return lambda: catalog.with_catalog(task).build(NO_CLIENT)

    return catalog, [build(name) for name in names]


def names(lake):
    return sorted(each.name for each in known_objects(lake))


@pytest.fixture
def lake(tmp_path: Path) -> str:
    return f"file:{tmp_path}/lake"


def test_progress_name_is_kept_after_a_crash_between_taking_and_creating(lake):
    _, [build] = catalog_updates(lake, "shop")
    with armed(Failpoint.NAMES_TAKEN, Action.ERROR), pytest.raises(IndeterminateError):
        build()
    assert names(lake) == ["shop", "shop_progress", "shop_remap"]
    catalog, [build] = catalog_updates(lake, "shop")
    build()
    assert catalog.progress == {"shop": "shop_progress"}
    assert names(lake) == ["shop", "shop_progress", "shop_remap"]


def test_automatic_progress_names_avoid_every_object(lake):
    take_user_collection(lake, "shop_progress1")
    catalog, builders = catalog_updates(lake, "shop", "shop_progress")
    for build in builders:
        build()
    assert catalog.progress == {
        "shop": "shop_progress2",
        "shop_progress": "shop_progress_progress",
    }


def test_two_files_that_give_one_progress_name_have_one_winner(lake):
    _, [first] = catalog_updates(lake, "shop", progress="how_far")
    _, [second] = catalog_updates(lake, "till", progress="how_far")
    first()
    with pytest.raises(UsageError, match='cannot create progress relation "how_far"') as raised:
        second()
    holder = 'progress relation "how_far" of source "shop"'
    assert raised.value.detail == f"The name belongs to {holder}."
    assert 'source "till"' in raised.value.hint
    assert "till" not in names(lake)


def test_listing_keeps_names_that_are_taken_and_not_created_yet(lake):
    catalog, [build] = catalog_updates(lake, "shop")
    build()
    remap = RequestedObject("other_remap", "collection", owner="other")
    with persist.open(f"{lake}/{USER_LOCATION}", writer="job") as job:
        take_user_collection(lake, "mine")
        other = [RequestedObject("other", "source"), remap]
        update_catalog(lake, lambda known: [*to_requested(known), *other])
        catalog.update_collections()
        assert {"mine", "other_remap", "shop_remap"} <= {*names(lake)}
        job.create_or_load("mine", key=persist.TEXT, value=persist.UNIT)
    catalog.update_collections()
    assert "mine" in names(lake)


def test_listing_frees_the_name_of_a_job_that_created_nothing(lake):
    catalog, [build] = catalog_updates(lake, "shop")
    build()
    with persist.open(f"{lake}/{USER_LOCATION}", writer="job"):
        take_user_collection(lake, "mine")
    catalog.update_collections()
    assert "mine" not in names(lake)


def test_plan_reports_names_that_are_taken_and_changes_nothing(lake, tmp_path):
    take_user_collection(lake, "mine")
    before = known_objects(lake)
    file = tmp_path / "file.yaml"
    file.write_text(
        f"location: {lake}\n"
        "sources:\n"
        f"  shop: {{postgres: {{url: '{URL}'}}, progress: mine}}\n"
        f"  till: {{postgres: {{url: '{URL}'}}, progress: mz_objects}}\n"
    )
    found = [each for each in plan_file(file) if each.is_problem]
    assert all(each.hint for each in found), found
    refused = [str(each) for each in found if each.action == "refuse"]
    assert refused == [
        (
            'refuse source "shop": progress relation "mine" of source "shop" cannot be created: '
            'the name belongs to user collection "mine"'
        ),
        (
            'refuse source "till": progress relation "mz_objects" of source "till" cannot be '
            "created: the name belongs to the catalog: names that start with mz_ are reserved"
        ),
    ]
    with pytest.raises(UsageError, match='progress relation "mine"'):
        apply.run(file, types=("source",), once=True)
    assert known_objects(lake) == before
