"""The next interval is read and loaded while the last transaction commits."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.connectors.sqlite.connector import SqliteConnector
from penstock.connectors.sqlite.transactor import SqliteTransactor
from penstock.materialize import connector_session, shard
from penstock.protocol.messages import StateUpdate
from penstock.sdk.batches import Keys, LoadedDocuments
from tests.materialize.lake import Endpoint, materializing
from tests.materialize.test_documents import COLUMNS, Log, by_columns, table

PATIENCE_S = 60
"""Limit of each wait. Only a failure reaches the limit."""


class Slow(SqliteTransactor):
    """A transactor that commits after the next read and acknowledges after the next Loads."""

    go_on: Callable[[], None]
    read: threading.Event
    loaded: threading.Event
    seen: list[str]

    def load(self, keys: Iterator[Keys]) -> Iterator[LoadedDocuments]:
        yield from super().load(keys)
        # The runtime waits for the end of load, so it sees the new rows before the commit.
        if len(self.seen) < 2:
            self.read.clear()
            self.loaded.clear()
            self.go_on()

    def start_commit(self, checkpoint: bytes) -> StateUpdate | None:
        if len(self.seen) < 2:
            assert self.read.wait(PATIENCE_S), "the next interval was not read"
            self.seen.append("read")
        return super().start_commit(checkpoint)

    def acknowledge(self) -> None:
        if self.seen[-1:] == ["read"]:
            assert self.loaded.wait(PATIENCE_S), "no document was requested"
            self.seen.append("loaded")
        super().acknowledge()


class SlowConnector(SqliteConnector):
    """A connector with slow transactors."""

    def open(self, opening: Any) -> SqliteTransactor:
        found = super().open(opening)
        found.__class__ = Slow
        return found


def test_next_interval_is_read_and_loaded_during_commit_and_acknowledge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake, endpoint = f"file:{tmp_path / 'lake'}", Endpoint("sqlite", tmp_path)
    log = Log(lake, "shop.t", COLUMNS)
    log.add((0, 1, 5, "first", 3))
    read, loaded, seen = threading.Event(), threading.Event(), list[str]()
    monkeypatch.setattr(Slow, "read", read, raising=False)
    monkeypatch.setattr(Slow, "loaded", loaded, raising=False)
    monkeypatch.setattr(Slow, "seen", seen, raising=False)
    read_locally, load = shard.read_locally, connector_session.ConnectorSession.load

    def reading(*given: Any) -> Any:
        found = read_locally(*given)
        read.set()
        return found

    def loading(self: connector_session.ConnectorSession, request: Any) -> None:
        load(self, request)
        loaded.set()

    monkeypatch.setattr(shard, "read_locally", reading)
    monkeypatch.setattr(connector_session.ConnectorSession, "load", loading)
    stop = threading.Event()
    with materializing(
        lake, endpoint, tmp_path, connector=SlowConnector(), collections=by_columns()
    ) as materialization:

        def go_on() -> None:
            log.add((100 + len(seen), 1, 1, "n", 0))
            while materialization.ready().upper < log.collection.upper:
                assert not stop.wait(0.01)

        monkeypatch.setattr(Slow, "go_on", staticmethod(go_on), raising=False)
        thread = threading.Thread(target=materialization.run, args=(stop,), kwargs={"once": False})
        thread.start()
        while materialization.status().upper < log.collection.upper or len(seen) < 2:
            assert thread.is_alive(), materialization.status()
            stop.wait(0.01)
        stop.set()
        thread.join()
    assert seen == ["read", "loaded"]
    assert table(endpoint, "id, amount") == [(1, 6)]
    log.client.close()
