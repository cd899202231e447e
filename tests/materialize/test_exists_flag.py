"""The `exists` flag of a Store: true exactly if the document was loaded.

Flow caches some documents of the previous transaction and does not load their keys again.
Penstock caches none: each transaction loads its keys. The stored documents do not depend on the
memory of a process.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from penstock.connectors.sqlite.connector import SqliteConnector
from penstock.connectors.sqlite.transactor import SqliteTransactor
from penstock.data.packed import unpack_row
from penstock.sdk.batches import Documents, Keys, LoadedDocuments
from tests.materialize.lake import Endpoint, materializing, once
from tests.materialize.test_documents import TEXTS, Log, by_text
from tests.protocol.vectors import cases

(VECTOR,) = [case["expect"] for case in cases("lifecycle") if case["id"] == "life-12"]
SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "n": {"type": "integer", "reduce": {"strategy": "sum"}},
    },
    "required": ["id"],
    "if": {"required": ["gone"]},
    "then": {"reduce": {"strategy": "merge", "delete": True}},
    "else": {"reduce": {"strategy": "merge"}},
}


@dataclass
class Seen:
    """Keys of the Loads, Loadeds and Stores of one transaction."""

    requested: set[int] = field(default_factory=set)
    found: set[int] = field(default_factory=set)
    exists: dict[int, bool] = field(default_factory=dict)


class Watched(SqliteTransactor):
    """A transactor that records its requests and responses."""

    seen: list[Seen]

    def load(self, keys: Iterator[Keys]) -> Iterator[LoadedDocuments]:
        self.seen.append(Seen())
        for found in super().load(self._requested(keys)):
            texts = found.docs_json.to_pylist()
            self.seen[-1].found.update(json.loads(text)["id"] for text in texts)
            yield found

    def _requested(self, keys: Iterator[Keys]) -> Iterator[Keys]:
        for batch in keys:
            self.seen[-1].requested.update(numbers(batch.packed))
            yield batch

    def store(self, documents: Iterator[Documents]) -> None:
        super().store(self._stored(documents))

    def _stored(self, documents: Iterator[Documents]) -> Iterator[Documents]:
        for batch in documents:
            exists = batch.exists.to_pylist()
            self.seen[-1].exists.update(zip(numbers(batch.packed_keys), exists, strict=True))
            yield batch


class WatchedConnector(SqliteConnector):
    """A connector whose transactors record their requests and responses."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Seen] = []

    def open(self, opening: Any) -> SqliteTransactor:
        found = super().open(opening)
        found.__class__ = Watched
        found.seen = self.seen
        return found


def numbers(keys: Any) -> list[int]:
    return [unpack_row(key)[0] for key in keys.to_pylist()]


@pytest.fixture
def texts(lake: str) -> Iterator[Log]:
    log = Log(lake, "shop.t", TEXTS)
    yield log
    log.client.close()


def add(log: Log, *said: Mapping[str, Any]) -> None:
    start = log.collection.upper
    log.add(*((start + at, json.dumps(each)) for at, each in enumerate(said)))


def test_stored_document_has_exists_if_and_only_if_it_was_loaded(
    lake: str, texts: Log, tmp_path: Path
) -> None:
    connector = WatchedConnector()
    steps = [
        [{"id": 1, "n": 1}, {"id": 2, "n": 1}],
        [{"id": 1, "n": 1}, {"id": 3, "n": 1}, {"id": 1, "n": 1}],
        [{"id": 1, "n": 1}, {"id": 2, "gone": True}],
        [{"id": 2, "n": 1}, {"id": 3, "n": 1}],
    ]
    with materializing(
        lake,
        Endpoint("sqlite", tmp_path),
        tmp_path,
        connector=connector,
        collections=by_text(SCHEMA),
    ) as materialization:
        for step in steps:
            add(texts, *step)
            once(materialization)
    seen = [each for each in connector.seen if each.exists]
    assert [each.exists for each in seen] == [
        {1: False, 2: False},
        {1: VECTOR["key_loaded"], 3: VECTOR["novel_key_not_found"]},
        {1: VECTOR["key_cached_from_previous_txn"], 2: True},
        {2: False, 3: True},
    ]
    for each in seen:
        assert {id for id, exists in each.exists.items() if exists} == each.found
    # The first transaction stores the complete collection into an empty resource: no Loads.
    assert [each.requested for each in seen] == [set(), {1, 3}, {1, 2}, {2, 3}]


def test_delta_updates_send_no_loads_and_store_with_exists_false(
    lake: str, texts: Log, tmp_path: Path
) -> None:
    connector = WatchedConnector()
    with materializing(
        lake,
        Endpoint("sqlite", tmp_path),
        tmp_path,
        connector=connector,
        collections=by_text(SCHEMA),
        delta_updates=True,
    ) as materialization:
        for _ in range(2):
            add(texts, {"id": 1, "n": 1}, {"id": 1, "n": 1})
            once(materialization)
    seen = [each for each in connector.seen if each.exists]
    assert [each.exists for each in seen] == [{1: VECTOR["delta_updates"]}] * 2
    assert not any(each.requested for each in connector.seen)
