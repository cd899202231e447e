"""What a file changes, from what the catalog has and what is written."""

import copy

import pytest

from penstock.catalog.objects import Object
from penstock.catalog.planning import plan

BOTH = ("source", "materialization")
FILE = {
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
    found = [
        Object(f"s{number}", name, "source", None, said)
        for number, (name, said) in enumerate(file["sources"].items())
    ]
    return found + [
        Object(f"m{number}", name, "materialization", None, said)
        for number, (name, said) in enumerate(file["materializations"].items())
    ]


def changed(change):
    file = copy.deepcopy(FILE)
    change(file)
    return [
        (each.action, each.name, each.what.split(",")[0].split(";")[0])
        for each in plan(known(FILE), file, types=BOTH)
    ]


def test_the_same_file_changes_nothing():
    assert plan(known(FILE), FILE, types=BOTH) == []


def test_what_was_kept_before_it_was_hidden_has_not_changed():
    file = copy.deepcopy(FILE)
    file["sources"]["shop"]["postgres"]["connection"] = {"password": 98765432}
    file["materializations"]["desk"]["endpoint"]["api_key"] = "geheim"
    assert plan(known(file), file, types=BOTH) == []


def test_a_new_lake_gets_all_of_it():
    assert [(each.action, each.name) for each in plan([], FILE, types=BOTH)] == [
        ("create", "shop"),
        ("create", "desk"),
    ]


@pytest.mark.parametrize(
    ("said", "told"),
    [({"topic": "clicks"}, "clicks"), ({"topics": {"a": None, "b": "public.b"}}, "a, b")],
)
def test_topics_are_told_as_topics(said, told):
    file = {"sources": {"web": {"kafka": {"brokers": "b:9092", **said}}}}
    (found,) = plan([], file, types=("source",))
    assert str(found) == f'create source "web": reads from kafka: {told}'


def test_half_of_a_file_leaves_the_other_half_alone():
    file = {**FILE, "materializations": {}}
    assert plan(known(FILE), file, types=("source",)) == []
    assert [each.action for each in plan(known(FILE), file, types=BOTH)] == ["drop"]


def test_documents_that_become_others_are_told():
    was = Object("c9", "shop.public.a", "collection", "s0", {"key": ["/id"]})
    file = {**FILE, "collections": {"shop.public.a": {"key": ["/id"], "schema": {}}}}
    assert [str(each) for each in plan([*known(FILE), was], file, types=BOTH)] == [
        'alter collection "shop.public.a": its documents: schema is given'
    ]


def test_a_name_that_moves_to_another_type_is_refused():
    file = {"sources": {"desk": FILE["sources"]["shop"]}}
    told = [str(each) for each in plan(known(FILE)[1:], file, types=("source",))]
    assert len(told) == 1
    assert told[0].startswith('refuse source "desk": its name')
    assert "is that of a materialization" in told[0]


def test_what_is_not_named_any_more_is_dropped_though_nothing_was_named_before():
    was = copy.deepcopy(FILE)
    del shop(was)["tables"]
    made = [
        Object(f"c{number}", name, "collection", "s0", None)
        for number, name in enumerate(
            ("shop_remap", "shop.public.a", "shop.public.Odd b", "shop.public.c")
        )
    ]
    file = copy.deepcopy(was)
    shop(file)["tables"] = ["a", 'public."Odd b"', "public.new"]
    assert [str(each) for each in plan([*known(was), *made], file, types=BOTH)] == [
        'alter source "shop": only the tables that are named now are followed',
        'create source "shop": table public.new joins, and is copied',
        'drop source "shop": table public.c is left out; its collection is destroyed',
    ]


def test_a_table_is_the_same_however_it_is_written():
    file = copy.deepcopy(FILE)
    shop(file)["tables"] = ['"public"."a"', "${B}"]
    assert plan(known(FILE), file, types=BOTH, environment={"B": "b"}) == []


@pytest.mark.parametrize(
    ("was", "now", "told"),
    [
        ("${N}", "${N}", []),
        (1, "${N}", ["backfill"]),
        (3, "${N}", ["refuse"]),
        ("${GONE}", "${N}", ["alter"]),
        ("${GONE}", "${GONE}", []),
    ],
)
def test_a_number_may_come_from_a_variable_which_is_not_told(was, now, told):
    before, after = copy.deepcopy(FILE), copy.deepcopy(FILE)
    desk(before)["bindings"][0].update(backfill=was)
    desk(after)["bindings"][0].update(backfill=now, delete="soft")
    found = plan(known(before), after, types=BOTH, environment={"N": "2"})
    assert [each.action for each in found] == [*told, "alter"]
    assert not any("2" in each.what for each in found)


def desk(file):
    return file["materializations"]["desk"]


def shop(file):
    return file["sources"]["shop"]["postgres"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda file: shop(file)["tables"].append("public.c"),
            [("create", "shop", "table public.c joins")],
        ),
        (
            lambda file: (shop(file)["tables"].pop(), desk(file)["bindings"].pop()),
            [
                ("drop", "shop", "table public.b is left out"),
                ("alter", "desk", "resource b is not written any more"),
            ],
        ),
        (
            lambda file: shop(file)["tables"].pop(),
            [("refuse", "shop", "table public.b is left out")],
        ),
        (
            lambda file: shop(file).update(
                tables=["public.a", {"name": "public.b", "text": ["x"]}]
            ),
            [("refuse", "shop", "table public.b was followed with other columns")],
        ),
        (
            lambda file: shop(file).pop("tables"),
            [("alter", "shop", "all published tables are followed")],
        ),
        (
            lambda file: shop(file).update(publication="p"),
            [("alter", "shop", "publication is given")],
        ),
        (
            lambda file: file["sources"].update(shop={"kafka": {}}),
            [("refuse", "shop", "it reads from postgres")],
        ),
        (lambda file: file["sources"].clear(), [("refuse", "shop", "its slot")]),
        (
            lambda file: (file["sources"].clear(), file["materializations"].clear()),
            [
                ("drop", "shop", "its slot"),
                ("drop", "desk", "its connector deletes what it wrote"),
            ],
        ),
        (
            lambda file: desk(file)["bindings"].append(
                {"collection": "shop.public.c", "resource": {"table": "c"}}
            ),
            [("create", "desk", "resource c is bound")],
        ),
        (
            lambda file: desk(file)["bindings"].pop(),
            [("alter", "desk", "resource b is not written any more")],
        ),
        (
            lambda file: desk(file)["bindings"][0].update(backfill=1),
            [("backfill", "desk", "resource a is written anew")],
        ),
        (
            lambda file: desk(file)["bindings"][1].update(backfill=0),
            [("refuse", "desk", "backfill of resource b went down to 0")],
        ),
        (
            lambda file: desk(file)["bindings"][0].update(delete="soft"),
            [("alter", "desk", "resource a: delete is given")],
        ),
        (
            lambda file: desk(file).update(connector="postgres"),
            [("refuse", "desk", "it has another connector")],
        ),
        (
            lambda file: desk(file).update(endpoint={"path": "other.db"}),
            [("alter", "desk", "endpoint changes")],
        ),
        (lambda file: desk(file).update(shards=2), [("alter", "desk", "shards is given")]),
        (
            lambda file: file["materializations"].clear(),
            [("drop", "desk", "its connector deletes what it wrote")],
        ),
    ],
    ids=range(18),
)
def test_what_is_changed_is_told(change, told):
    assert changed(change) == told


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        (lambda file: shop(file)["tables"].pop(), "Remove the binding from the file too"),
        (
            lambda file: shop(file).update(tables=[{"name": "public.b", "text": ["x"]}]),
            "Leave it out first (penstock up FILE --allow-drop)",
        ),
        (lambda file: file["sources"].update(shop={"kafka": {}}), "Drop it first"),
        (lambda file: file["sources"].clear(), 'keep source "shop" in it'),
        (lambda file: desk(file)["bindings"][1].update(backfill=0), "It only goes up"),
        (lambda file: desk(file).update(connector="postgres"), "Give the new one another name"),
        (
            lambda file: file["sources"].update(desk=file["sources"]["shop"]),
            "penstock drop LOCATION desk",
        ),
    ],
)
def test_refused_change_has_a_hint(change, hint):
    file = copy.deepcopy(FILE)
    change(file)
    refused = [each for each in plan(known(FILE), file, types=BOTH) if each.action == "refuse"]
    assert refused
    assert all(each.hint for each in refused), refused
    assert any(hint in each.hint for each in refused), refused
