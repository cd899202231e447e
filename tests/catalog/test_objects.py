"""The catalog: ids that are never given out again, and rows that anybody can read."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import persist
from penstock.catalog.objects import (
    WRITER,
    Object,
    Wanted,
    as_wanted,
    catalogued,
    forget_object,
    known_objects,
    resolved,
)
from penstock.catalog.secrets import (
    HIDDEN,
    hides_secrets,
    objects_without_secrets,
    without_secrets,
)
from penstock.errors import Fenced, TransientError
from penstock.pipeline.file import CATALOG

SHOP = Wanted("shop", "source", {"postgres": {"url": "postgresql://u:${P}@h/shop"}})
ORDERS = Wanted("shop.public.orders", "collection", owner="shop")
PROGRESS = Wanted("shop_progress", "source_progress", owner="shop")
DESK = Wanted("desk", "materialization", {"connector": "sqlite"})


@pytest.fixture
def lake(tmp_path):
    return f"file:{tmp_path}/lake"


def read(lake, collection):
    with persist.open(f"{lake}/{CATALOG}", hold=False) as client:
        found = client.collection(collection)
        table = found.snapshot(found.upper - 1).arrow()
        names = [name for name in table.column_names if not name.startswith("mz_")]
        return sorted(map(str, table.select(names).to_pylist()))


def test_it_is_read_like_any_collection(lake):
    catalogued(lake, lambda _: [SHOP, ORDERS, PROGRESS, DESK])
    assert read(lake, "mz_sources") == ["{'id': 's1', 'name': 'shop', 'type': 'postgres'}"]
    assert read(lake, "mz_source_progresses") == [
        "{'id': 'p3', 'name': 'shop_progress', 'source_id': 's1'}"
    ]
    types = [(each.type, each.owner_id) for each in known_objects(lake)]
    assert types == [
        ("source", None),
        ("collection", "s1"),
        ("source_progress", "s1"),
        ("materialization", None),
    ]


def test_progress_goes_with_its_source_and_no_id_comes_back(lake):
    made = catalogued(lake, lambda _: [SHOP, ORDERS, PROGRESS, DESK])
    forget_object(made[0], lake)
    assert [each.name for each in known_objects(lake)] == ["desk"]
    again = catalogued(lake, lambda _: [SHOP, PROGRESS, DESK])
    assert [(each.id, each.name) for each in again] == [
        ("m4", "desk"),
        ("s5", "shop"),
        ("p6", "shop_progress"),
    ]


def test_what_changes_nothing_writes_nothing(lake):
    catalogued(lake, lambda _: [SHOP])
    with persist.open(f"{lake}/{CATALOG}", hold=False) as client:
        before = client.collection("mz_objects").upper
    catalogued(lake, lambda _: [SHOP])
    with persist.open(f"{lake}/{CATALOG}", hold=False) as client:
        assert client.collection("mz_objects").upper == before


def test_the_past_of_the_catalog_can_be_read(lake):
    catalogued(lake, lambda _: [SHOP])
    with persist.open(f"{lake}/{CATALOG}", hold=False) as client:
        then = client.collection("mz_objects").upper - 1
    catalogued(lake, lambda _: [DESK])
    with persist.open(f"{lake}/{CATALOG}", hold=False) as client:
        table = client.collection("mz_objects").snapshot(then).arrow()
    assert table.column("name").to_pylist() == ["shop"]


def test_somebody_who_comes_in_between_costs_another_look(lake):
    catalogued(lake, lambda _: [SHOP])
    turns = []

    def change(known):
        turns.append(len(known))
        if len(turns) == 2:
            # Another process, amid what we do; the first turn only looks.
            catalogued(lake, lambda found: [SHOP, DESK])
        return [*(Wanted(each.name, each.type, each.definition) for each in known), ORDERS]

    catalogued(lake, change)
    assert turns == [1, 1, 2]
    assert [each.name for each in known_objects(lake)] == ["shop", "desk", "shop.public.orders"]


def test_one_that_died_in_it_keeps_nobody_out(lake):
    [shop] = catalogued(lake, lambda _: [SHOP])
    with pytest.raises(Fenced), persist.open(f"{lake}/{CATALOG}", writer=WRITER):
        forget_object(shop, lake)
    assert known_objects(lake) == []


def test_who_is_always_cut_short_may_try_again_and_is_not_fenced(lake, monkeypatch):
    catalogued(lake, lambda _: [SHOP])

    def change(known):
        persist.open(f"{lake}/{CATALOG}", writer=WRITER).close()
        return [SHOP, DESK]

    monkeypatch.setattr("penstock.catalog.objects.TRIES", 2)
    with pytest.raises(TransientError, match="others write it"):
        catalogued(lake, change)


def test_who_changes_nothing_takes_no_lock(lake):
    catalogued(lake, lambda _: [SHOP])
    with persist.open(f"{lake}/{CATALOG}", writer="somebody else"):
        catalogued(lake, as_wanted)


NAMES = st.sampled_from("abcdef")
TYPES = st.sampled_from(["source", "collection", "materialization"])
WISHES = st.lists(st.builds(Wanted, NAMES, TYPES), unique_by=lambda each: (each.name, each.type))


@given(st.lists(WISHES, max_size=8))
def test_an_id_is_of_one_object_for_ever(histories):
    known: list[Object] = []
    last = 0
    given_out: dict[str, tuple[str, str]] = {}
    gone: set[str] = set()
    for wanted in histories:
        after, last = resolved(known, wanted, last)
        assert {(each.type, each.name) for each in after} == {(e.type, e.name) for e in wanted}
        gone |= {each.id for each in known} - {each.id for each in after}
        for each in after:
            assert each.id not in gone
            assert given_out.setdefault(each.id, (each.type, each.name)) == (each.type, each.name)
        known = after


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("postgresql://u:${P}@h/d", "postgresql://u:${P}@h/d"),
        ("postgresql://u:geheim@h/d", f"postgresql://u:{HIDDEN}@h/d"),
        ("host=h password=geheim", f"host=h password={HIDDEN}"),
        ({"password": "geheim", "user": "u"}, {"password": HIDDEN, "user": "u"}),
        ({"password": "${P}"}, {"password": "${P}"}),
        ({"grpc": {"token": "geheim"}}, {"grpc": {"token": HIDDEN}}),
        ({"aws_secret_access_key": "geheim"}, {"aws_secret_access_key": HIDDEN}),
        ({"a": ["postgresql://u:geheim:ge@heim@h/d"]}, {"a": [f"postgresql://u:{HIDDEN}@h/d"]}),
        ("postgresql://u:ge/geheim@h/d", f"postgresql://u:{HIDDEN}@h/d"),
        ("postgresql://u:so geheim@h/d", f"postgresql://u:{HIDDEN}@h/d"),
        ("postgresql://u@h:1/d?x=a@b", "postgresql://u@h:1/d?x=a@b"),
        ("postgresql://[::1]/d?x=a@b", "postgresql://[::1]/d?x=a@b"),
        (
            "postgresql:///d?passwor%64=so geheim&user=u",
            f"postgresql:///d?passwor%64={HIDDEN}&user=u",
        ),
        ("https://geheim@h/d", f"https://{HIDDEN}@h/d"),
        ("https://u:${P}@h, https://${T}@h", "https://u:${P}@h, https://${T}@h"),
        ("host=h password='so geheim' user=u", f"host=h password={HIDDEN} user=u"),
        (r"host=h password = so\ geheim user=u", f"host=h password = {HIDDEN} user=u"),
        ("host=h password='${P}' user=u", "host=h password='${P}' user=u"),
        ("a=b&token=geheim&c=d", f"a=b&token={HIDDEN}&c=d"),
        ({"password": 98765432, "sslmode": 1}, {"password": HIDDEN, "sslmode": 1}),
        ({"password": None, "use_token": True}, {"password": None, "use_token": True}),
        (
            {"api_key": "geheim", "Authorization": "Bearer geheim"},
            {"api_key": HIDDEN, "Authorization": HIDDEN},
        ),
        ({"Authorization": "Bearer ${T}"}, {"Authorization": "Bearer ${T}"}),
        (
            {"credentials": {"key": "geheim", "id": ["geheim", "${ID}"]}},
            {"credentials": {"key": HIDDEN, "id": [HIDDEN, "${ID}"]}},
        ),
        (
            {
                "connector": {"grpc": {"address": "h:1"}},
                "endpoint": {"odd": "geheim", "in": [{"even": "${E}", "n": 1}]},
            },
            {
                "connector": {"grpc": {"address": "h:1"}},
                "endpoint": {"odd": HIDDEN, "in": [{"even": "${E}", "n": 1}]},
            },
        ),
        (
            {
                "brokers": "b:9092",
                "properties": {
                    "ssl.key.pem": "geheim",
                    "Some.Passphrase": "geheim",
                    "sasl.jaas.config": 'Module required password="so geheim;d";',
                    "ssl.key.password": "${P}",
                    "client.id": "penstock",
                },
                "reader_properties": {"ssl.keystore.key": "geheim", "fetch.max.bytes": 1},
            },
            {
                "brokers": "b:9092",
                "properties": {
                    "ssl.key.pem": HIDDEN,
                    "Some.Passphrase": HIDDEN,
                    "sasl.jaas.config": HIDDEN,
                    "ssl.key.password": "${P}",
                    "client.id": "penstock",
                },
                "reader_properties": {"ssl.keystore.key": HIDDEN, "fetch.max.bytes": 1},
            },
        ),
        ('Module required password="so geheim;d";', f"Module required password={HIDDEN};"),
        (
            {"connector": "sqlite", "endpoint": {"path": "a.db"}},
            {"connector": "sqlite", "endpoint": {"path": "a.db"}},
        ),
    ],
)
def test_secrets_in_the_file_itself_are_not_kept(said, kept):
    assert without_secrets(said) == kept
    assert "geheim" not in json.dumps(without_secrets(said))
    assert hides_secrets(kept) == (HIDDEN in json.dumps(kept))
    assert without_secrets(kept) == kept


def test_what_objects_are_called_says_nothing_of_secrets():
    said = {"tokens": {"postgres": {"tables": ["public.t"]}}}
    assert objects_without_secrets(said) == said
    documents = {"shop.tokens": {"schema": {"properties": {"password": {"type": "string"}}}}}
    assert objects_without_secrets(documents, inherited=False) == documents
    assert objects_without_secrets(None) == {}
