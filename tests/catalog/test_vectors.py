"""The vectors of tests/vectors/materialize.json about names and columns of progress relations."""

import json
from pathlib import Path

from penstock.catalog.namespace import progress_of_source
from penstock.catalog.objects import PROGRESSES, RequestedObject
from penstock.reclock import progress_name
from penstock.sources.registry import remap_form

CASES = {
    case["id"]: case
    for case in json.loads(
        (Path(__file__).parents[1] / "vectors" / "materialize.json").read_text()
    )["cases"]
}


def test_progress_relation_has_the_first_free_default_name() -> None:
    given, expected = CASES["X01"]["given"], CASES["X01"]["expect"]
    taken = [RequestedObject(name, "collection") for name in given["existing"]]
    assert progress_of_source(given["source"], taken).name == expected["name"]
    assert progress_name(given["source"], given["existing"]) == expected["name"]
    # X02 is another spelling of the suffix, which the vector X01 overrules.
    assert progress_name(given["source"], CASES["X02"]["given"]["existing"]) == "foo_progress1"


def test_progress_relation_has_the_columns_of_its_source_type() -> None:
    expected = CASES["X04"]["expect"]
    assert expected
    assert {kind: remap_form(kind).progress.names for kind in expected} == expected
    # X05 has other columns, without the time, which the vector X04 overrules.
    assert all(
        remap_form(kind).progress.names[0] == "mz_timestamp" for kind in CASES["X05"]["expect"]
    )


def test_catalog_lists_progress_relations_in_their_own_collection() -> None:
    expected = CASES["X06"]["expect"]
    assert PROGRESSES.names == expected["columns"]
    assert RequestedObject("shop_progress", expected["mz_objects_type"]).type == "source_progress"
