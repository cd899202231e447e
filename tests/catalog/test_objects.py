"""The catalog: permanent ids, and rows that every reader can read."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import persist
from penstock.catalog.objects import (
    WRITER,
    Object,
    RequestedObject,
    assign_ids,
    known_objects,
    remove_object,
    to_requested,
    update_catalog,
)
from penstock.catalog.redaction import (
    HIDDEN,
    hides_secrets,
    objects_without_secrets,
    without_secrets,
)
from penstock.errors import Fenced, TransientError
from penstock.pipeline.file import CATALOG

SHOP = RequestedObject("shop", "source", {"postgres": {"url": "postgresql://u:${P}@h/shop"}})
ORDERS = RequestedObject("shop.public.orders", "collection", owner="shop")
PROGRESS = RequestedObject("shop_progress", "source_progress", owner="shop")
DESK = RequestedObject("desk", "materialization", {"connector": "sqlite"})


@pytest.fixture
def lake(tmp_path):
    return f"file:{tmp_path}/lake"


def read(lake, collection):
    with persist.open(f"{lake}/{CATALOG}", hold=False) as client:
        loaded = client.collection(collection)
        table = loaded.snapshot(loaded.upper - 1).arrow()
        names = [name for name in table.column_names if not name.startswith("mz_")]
        return sorted(map(str, table.select(names).to_pylist()))


def test_catalog_collections_are_readable_as_rows(lake):
    update_catalog(lake, lambda _: [SHOP, ORDERS, PROGRESS, DESK])
    assert read(lake, "mz_sources") == ["{'id': 's1', 'name': 'shop', 'type': 'postgres'}"]
    assert read(lake, "mz_source_progresses") == [
        "{'id': 'p3', 'name': 'shop_progress', 'source_id': 's1'}"
    ]
    types = [(obj.type, obj.owner_id) for obj in known_objects(lake)]
    assert types == [
        ("source", None),
        ("collection", "s1"),
        ("source_progress", "s1"),
        ("materialization", None),
    ]


def test_remove_object_of_source_removes_its_objects_and_ids_are_not_reused(lake):
    made = update_catalog(lake, lambda _: [SHOP, ORDERS, PROGRESS, DESK])
    remove_object(made[0], lake)
    assert [obj.name for obj in known_objects(lake)] == ["desk"]
    again = update_catalog(lake, lambda _: [SHOP, PROGRESS, DESK])
    assert [(obj.id, obj.name) for obj in again] == [
        ("m4", "desk"),
        ("s5", "shop"),
        ("p6", "shop_progress"),
    ]


def test_update_catalog_without_change_writes_nothing(lake):
    update_catalog(lake, lambda _: [SHOP])
    with persist.open(f"{lake}/{CATALOG}", hold=False) as client:
        before = client.collection("mz_objects").upper
    update_catalog(lake, lambda _: [SHOP])
    with persist.open(f"{lake}/{CATALOG}", hold=False) as client:
        assert client.collection("mz_objects").upper == before


def test_catalog_is_readable_as_of_earlier_time(lake):
    update_catalog(lake, lambda _: [SHOP])
    with persist.open(f"{lake}/{CATALOG}", hold=False) as client:
        then = client.collection("mz_objects").upper - 1
    update_catalog(lake, lambda _: [DESK])
    with persist.open(f"{lake}/{CATALOG}", hold=False) as client:
        table = client.collection("mz_objects").snapshot(then).arrow()
    assert table.column("name").to_pylist() == ["shop"]


def test_update_catalog_with_concurrent_writer_retries(lake):
    update_catalog(lake, lambda _: [SHOP])
    turns = []

    def change(known):
        turns.append(len(known))
        if len(turns) == 2:
            # Another process writes during the update; the first call only reads.
            update_catalog(lake, lambda loaded: [SHOP, DESK])
        return [*(RequestedObject(obj.name, obj.type, obj.definition) for obj in known), ORDERS]

    update_catalog(lake, change)
    assert turns == [1, 1, 2]
    assert [obj.name for obj in known_objects(lake)] == ["shop", "desk", "shop.public.orders"]


def test_remove_object_with_open_catalog_writer_fences_that_writer(lake):
    [shop] = update_catalog(lake, lambda _: [SHOP])
    with pytest.raises(Fenced), persist.open(f"{lake}/{CATALOG}", writer=WRITER):
        remove_object(shop, lake)
    assert known_objects(lake) == []


def test_update_catalog_fenced_on_every_attempt_raises_transient_error(lake, monkeypatch):
    update_catalog(lake, lambda _: [SHOP])

    def change(known):
        persist.open(f"{lake}/{CATALOG}", writer=WRITER).close()
        return [SHOP, DESK]

    monkeypatch.setattr("penstock.catalog.objects.TRIES", 2)
    with pytest.raises(TransientError, match="other processes write it"):
        update_catalog(lake, change)


def test_update_catalog_without_change_takes_no_lock(lake):
    update_catalog(lake, lambda _: [SHOP])
    with persist.open(f"{lake}/{CATALOG}", writer="somebody else"):
        update_catalog(lake, to_requested)


NAMES = st.sampled_from("abcdef")
TYPES = st.sampled_from(["source", "collection", "materialization"])
REQUESTS = st.lists(
    st.builds(RequestedObject, NAMES, TYPES), unique_by=lambda obj: (obj.name, obj.type)
)


@given(st.lists(REQUESTS, max_size=8))
def test_assigned_id_identifies_one_object_permanently(histories):
    known: list[Object] = []
    last = 0
    given_out: dict[str, tuple[str, str]] = {}
    removed: set[str] = set()
    for requested in histories:
        after, last = assign_ids(known, requested, last)
        assert {(obj.type, obj.name) for obj in after} == {(e.type, e.name) for e in requested}
        removed |= {obj.id for obj in known} - {obj.id for obj in after}
        for obj in after:
            assert obj.id not in removed
            assert given_out.setdefault(obj.id, (obj.type, obj.name)) == (obj.type, obj.name)
        known = after


@pytest.mark.parametrize(
    ("definition", "redacted"),
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
def test_redaction_hides_literal_secrets_and_keeps_variables(definition, redacted):
    assert without_secrets(definition) == redacted
    assert "geheim" not in json.dumps(without_secrets(definition))
    assert hides_secrets(redacted) == (HIDDEN in json.dumps(redacted))
    assert without_secrets(redacted) == redacted


def test_redaction_keeps_values_below_object_name_that_looks_secret():
    definition = {"tokens": {"postgres": {"tables": ["public.t"]}}}
    assert objects_without_secrets(definition) == definition
    documents = {"shop.tokens": {"schema": {"properties": {"password": {"type": "string"}}}}}
    assert objects_without_secrets(documents, inherited=False) == documents
    assert objects_without_secrets(None) == {}
