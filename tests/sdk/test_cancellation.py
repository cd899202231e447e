"""A stream can be broken off before it is opened, and is not waited for without end."""

import threading

import grpc
import pytest

from penstock.materialize import connect
from penstock.materialize.errors import ConnectorError, ConnectorUnreachable
from penstock.protocol.key_range import WHOLE
from penstock.protocol.messages import Open
from penstock.sdk import Fenced, serve
from tests.sdk.stream_client import PATIENCE_S, opened, ready, until
from tests.sdk.toy import Toy, spec


class Waits(Toy):
    """Waits for the endpoint the first time that it is opened, unless it is broken off."""

    def open(self, opening):
        if not self.opened:
            self.opened += 1
            self.events.append("waits")
            assert opening.broken_off.wait(PATIENCE_S)
            self.events.append("gave up")
            raise RuntimeError("the endpoint did not answer")
        return super().open(opening)


@pytest.fixture
def toy() -> Waits:
    return Waits()


def opening(connection):
    stream = connection.transactions()
    stream.send(Open(spec(), "v", WHOLE))
    return stream


def test_by_the_runtime(toy, connection):
    stream = opening(connection)
    until(lambda: "waits" in toy.events)
    stream.cancel()
    until(lambda: "gave up" in toy.events)
    ready(connection).cancel()


def test_by_a_newer_stream(toy, connection):
    older = opening(connection)
    until(lambda: "waits" in toy.events)
    newer = ready(connection)
    assert toy.events[:3] == ["waits", "gave up", "open 2"]
    with pytest.raises(ConnectorError, match="a newer stream"):
        older.receive()
    newer.cancel()


def test_by_the_end_of_the_connector(toy, tmp_path):
    with serve(toy, f"unix:{tmp_path}/toy.sock") as server, connect(server.address) as connection:
        stream = opening(connection)
        until(lambda: "waits" in toy.events)
        server.stop()
        assert toy.events[-1] == "gave up"
        with pytest.raises(ConnectorError):
            stream.receive()


def test_a_connector_that_does_not_listen_holds_up_nobody_else(tmp_path, monkeypatch):
    """What it does goes on in a thread of its own; the call is over."""
    monkeypatch.setattr("penstock.sdk.server.CALLS", 2)
    gate = threading.Event()

    class Deaf(Toy):
        def open(self, opening):
            self.events.append("waits")
            assert gate.wait(10 * PATIENCE_S)
            raise Fenced("too late")

    toy = Deaf()
    with serve(toy, f"unix:{tmp_path}/toy.sock") as server, connect(server.address) as connection:
        try:
            for number in range(2):
                stream = connection.transactions()
                stream.send(Open(spec(materialization=f"m{number}"), "v", WHOLE))
                until(lambda wanted=number + 1: toy.events.count("waits") == wanted)
                stream.cancel()
            until(lambda: answers(connection))
        finally:
            gate.set()


def answers(connection) -> bool:
    try:
        connection.spec()
    except ConnectorError:  # All threads are taken, as yet.
        return False
    return True


def test_by_the_clock_if_nothing_is_said(connection, monkeypatch):
    monkeypatch.setattr("penstock.sdk.stream.OPEN_S", 0.1)
    stream = connection.transactions()
    with pytest.raises(ConnectorUnreachable) as caught:
        stream.receive()
    assert "no Open came within 0.1 seconds" in caught.value.detail
    assert caught.value.__cause__.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_not_by_the_clock_once_it_is_open(monkeypatch, tmp_path):
    monkeypatch.setattr("penstock.sdk.stream.OPEN_S", 1.0)
    with serve(Toy(), f"unix:{tmp_path}/a.sock") as server, connect(server.address) as connection:
        stream = opened(connection)
        threading.Event().wait(1.2)
        stream.end()
        assert stream.receive() is None
