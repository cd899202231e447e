"""Changes between the catalog and a pipeline file."""

import copy
from typing import Any, Final

import pytest

from penstock.catalog.diff import plan
from penstock.catalog.objects import Object

BOTH: Final = ("source", "materialization")
FILE: dict[str, Any] = {
    "sources": {
        "shop": {
            "postgres": {"url": "postgresql://u:${P}@h/shop", "tables": ["public.a", "public.b"]}
        }
    },
    "materializations": {
        "desk": {
            "connector": "sqlite",
            "endpoint": {"path": "desk.db"},
            "bindings": [
                {"collection": "shop.public.a", "resource": {"table": "a"}},
                {"collection": "shop.public.b", "resource": {"table": "b"}, "backfill": 1},
            ],
        }
    },
}


def known(file):
    objects = [
        Object(f"s{number}", name, "source", None, section)
        for number, (name, section) in enumerate(file["sources"].items())
    ]
    return objects + [
        Object(f"m{number}", name, "materialization", None, section)
        for number, (name, section) in enumerate(file["materializations"].items())
    ]


def changed(change):
    file = copy.deepcopy(FILE)
    change(file)
    return [
        (change.action, change.name, change.what.split(",")[0].split(";")[0])
        for change in plan(known(FILE), file, types=BOTH)
    ]


def test_plan_of_unchanged_file_is_empty():
    assert plan(known(FILE), FILE, types=BOTH) == []


def test_plan_ignores_newly_redacted_values():
    file = copy.deepcopy(FILE)
    file["sources"]["shop"]["postgres"]["connection"] = {"password": 98765432}
    file["materializations"]["desk"]["endpoint"]["api_key"] = "geheim"
    assert plan(known(file), file, types=BOTH) == []


def test_plan_for_new_lake_creates_all_objects():
    assert [(change.action, change.name) for change in plan([], FILE, types=BOTH)] == [
        ("create", "shop"),
        ("create", "desk"),
    ]


@pytest.mark.parametrize(
    ("section", "expected"),
    [({"topic": "clicks"}, "clicks"), ({"topics": {"a": None, "b": "public.b"}}, "a, b")],
)
def test_plan_for_new_kafka_source_lists_its_topics(section, expected):
    file = {"sources": {"web": {"kafka": {"brokers": "b:9092", **section}}}}
    (objects,) = plan([], file, types=("source",))
    assert str(objects) == f'create source "web": reads from kafka: {expected}'


def test_plan_of_sources_ignores_materializations():
    file = {**FILE, "materializations": {}}
    assert plan(known(FILE), file, types=("source",)) == []
    assert [change.action for change in plan(known(FILE), file, types=BOTH)] == ["drop"]


def test_plan_with_changed_document_definition_alters_collection():
    before = Object("c9", "shop.public.a", "collection", "s0", {"key": ["/id"]})
    file = {**FILE, "collections": {"shop.public.a": {"key": ["/id"], "schema": {}}}}
    assert [str(change) for change in plan([*known(FILE), before], file, types=BOTH)] == [
        'alter collection "shop.public.a": documents: schema is added'
    ]


def test_plan_with_name_of_other_object_type_is_rejected():
    file = {"sources": {"desk": FILE["sources"]["shop"]}}
    expected = [str(change) for change in plan(known(FILE)[1:], file, types=("source",))]
    assert len(expected) == 1
    assert expected[0].startswith('refuse source "desk": the name')
    assert "belong to a materialization" in expected[0]


def test_plan_with_newly_listed_tables_drops_the_others():
    before = copy.deepcopy(FILE)
    del shop(before)["tables"]
    made = [
        Object(f"c{number}", name, "collection", "s0", None)
        for number, name in enumerate(
            ("shop_remap", "shop.public.a", "shop.public.Odd b", "shop.public.c")
        )
    ]
    file = copy.deepcopy(before)
    shop(file)["tables"] = ["a", 'public."Odd b"', "public.new"]
    assert [str(change) for change in plan([*known(before), *made], file, types=BOTH)] == [
        'alter source "shop": only the listed tables are captured',
        'alter source "shop": table public.new is added, with an initial snapshot',
        'drop source "shop": table public.c is removed; its collection is dropped',
    ]


def test_plan_compares_table_names_by_value():
    file = copy.deepcopy(FILE)
    shop(file)["tables"] = ['"public"."a"', "${B}"]
    assert plan(known(FILE), file, types=BOTH, environment={"B": "b"}) == []


@pytest.mark.parametrize(
    ("old_backfill", "new_backfill", "expected"),
    [
        ("${N}", "${N}", []),
        (1, "${N}", ["backfill"]),
        (3, "${N}", ["refuse"]),
        ("${GONE}", "${N}", ["alter"]),
        ("${GONE}", "${GONE}", []),
    ],
)
def test_plan_with_backfill_from_variable_compares_value_without_printing_it(
    old_backfill, new_backfill, expected
):
    before, after = copy.deepcopy(FILE), copy.deepcopy(FILE)
    desk(before)["bindings"][0].update(backfill=old_backfill)
    desk(after)["bindings"][0].update(backfill=new_backfill, delete="soft")
    changes = plan(known(before), after, types=BOTH, environment={"N": "2"})
    assert [change.action for change in changes] == [*expected, "alter"]
    assert not any("2" in change.what for change in changes)


def desk(file):
    return file["materializations"]["desk"]


def shop(file):
    return file["sources"]["shop"]["postgres"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda file: shop(file)["tables"].append("public.c"),
            [("alter", "shop", "table public.c is added")],
        ),
        (
            lambda file: (shop(file)["tables"].pop(), desk(file)["bindings"].pop()),
            [
                ("drop", "shop", "table public.b is removed"),
                ("alter", "desk", "resource b is removed"),
            ],
        ),
        (
            lambda file: shop(file)["tables"].pop(),
            [("refuse", "shop", "table public.b is removed")],
        ),
        (
            lambda file: shop(file).update(
                tables=["public.a", {"name": "public.b", "text": ["x"]}]
            ),
            [("refuse", "shop", "table public.b changes its columns")],
        ),
        (
            lambda file: shop(file).pop("tables"),
            [("alter", "shop", "all published tables are captured")],
        ),
        (
            lambda file: shop(file).update(publication="p"),
            [("alter", "shop", "publication is added")],
        ),
        (
            lambda file: file["sources"].update(shop={"kafka": {}}),
            [("refuse", "shop", "its kind cannot change from postgres to kafka")],
        ),
        (lambda file: file["sources"].clear(), [("refuse", "shop", "drops its replication slot")]),
        (
            lambda file: (file["sources"].clear(), file["materializations"].clear()),
            [
                ("drop", "shop", "drops its replication slot"),
                ("drop", "desk", "its connector drops the resources that it created"),
            ],
        ),
        (
            lambda file: desk(file)["bindings"].append(
                {"collection": "shop.public.c", "resource": {"table": "c"}}
            ),
            [("alter", "desk", "resource c is added")],
        ),
        (
            lambda file: desk(file)["bindings"].pop(),
            [("alter", "desk", "resource b is removed")],
        ),
        (
            lambda file: desk(file)["bindings"][0].update(backfill=1),
            [("backfill", "desk", "resource a is backfilled")],
        ),
        (
            lambda file: desk(file)["bindings"][1].update(backfill=0),
            [("refuse", "desk", "backfill of resource b decreases to 0")],
        ),
        (
            lambda file: desk(file)["bindings"][0].update(delete="soft"),
            [("alter", "desk", "resource a: delete is added")],
        ),
        (
            lambda file: desk(file).update(connector="postgres"),
            [("refuse", "desk", "its connector changes")],
        ),
        (
            lambda file: desk(file).update(endpoint={"path": "other.db"}),
            [("alter", "desk", "endpoint changes")],
        ),
        (lambda file: desk(file).update(shards=2), [("alter", "desk", "shards is added")]),
        (
            lambda file: file["materializations"].clear(),
            [("drop", "desk", "its connector drops the resources that it created")],
        ),
    ],
    ids=range(18),
)
def test_plan_of_changed_file_lists_expected_changes(change, expected):
    assert changed(change) == expected


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        (lambda file: shop(file)["tables"].pop(), "Remove the binding from the file too"),
        (
            lambda file: shop(file).update(tables=[{"name": "public.b", "text": ["x"]}]),
            "Remove the table first (penstock up FILE --allow-drop)",
        ),
        (lambda file: file["sources"].update(shop={"kafka": {}}), "Drop the source first"),
        (lambda file: file["sources"].clear(), 'keep source "shop" in it'),
        (lambda file: desk(file)["bindings"][1].update(backfill=0), "Backfill can only increase"),
        (
            lambda file: desk(file).update(connector="postgres"),
            "Use another name for the new materialization",
        ),
        (
            lambda file: file["sources"].update(desk=file["sources"]["shop"]),
            "penstock drop LOCATION desk",
        ),
    ],
)
def test_plan_with_rejected_change_has_hint(change, hint):
    file = copy.deepcopy(FILE)
    change(file)
    refused = [item for item in plan(known(FILE), file, types=BOTH) if item.action == "refuse"]
    assert refused
    assert all(item.hint for item in refused), refused
    assert any(hint in item.hint for item in refused), refused
