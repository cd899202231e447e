"""Cancellation of streams before Open returns, and the time limit for Open."""

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


class WaitingToy(Toy):
    """The first open waits until it is cancelled."""

    def open(self, request):
        if not self.opened:
            self.opened += 1
            self.events.append("waits")
            assert request.cancelled.wait(PATIENCE_S)
            self.events.append("gave up")
            raise RuntimeError("the endpoint did not answer")
        return super().open(request)


@pytest.fixture
def toy() -> WaitingToy:
    return WaitingToy()


def send_open(connection):
    stream = connection.transactions()
    stream.send(Open(spec(), "v", WHOLE))
    return stream


def test_stream_cancelled_by_runtime_stops_open(toy, connection):
    stream = send_open(connection)
    until(lambda: "waits" in toy.events)
    stream.cancel()
    until(lambda: "gave up" in toy.events)
    ready(connection).cancel()


def test_stream_cancelled_by_newer_stream_stops_open(toy, connection):
    older = send_open(connection)
    until(lambda: "waits" in toy.events)
    newer = ready(connection)
    assert toy.events[:3] == ["waits", "gave up", "open 2"]
    with pytest.raises(ConnectorError, match="newer stream"):
        older.receive()
    newer.cancel()


def test_stopped_server_stops_open(toy, tmp_path):
    with serve(toy, f"unix:{tmp_path}/toy.sock") as server, connect(server.address) as connection:
        stream = send_open(connection)
        until(lambda: "waits" in toy.events)
        server.stop()
        assert toy.events[-1] == "gave up"
        with pytest.raises(ConnectorError):
            stream.receive()


def test_open_that_ignores_cancellation_does_not_block_calls(tmp_path, monkeypatch):
    """The method continues in its thread, but the call ends."""
    monkeypatch.setattr("penstock.sdk.server.CALLS", 2)
    gate = threading.Event()

    class Uncancellable(Toy):
        def open(self, request):
            self.events.append("waits")
            assert gate.wait(10 * PATIENCE_S)
            raise Fenced("too late")

    toy = Uncancellable()
    with serve(toy, f"unix:{tmp_path}/toy.sock") as server, connect(server.address) as connection:
        try:
            for number in range(2):
                stream = connection.transactions()
                stream.send(Open(spec(materialization=f"m{number}"), "v", WHOLE))
                until(lambda expected=number + 1: toy.events.count("waits") == expected)
                stream.cancel()
            until(lambda: responds(connection))
        finally:
            gate.set()


def responds(connection) -> bool:
    try:
        connection.spec()
    except ConnectorError:  # All threads are still in use.
        return False
    return True


def test_stream_without_open_exceeds_deadline(connection, monkeypatch):
    monkeypatch.setattr("penstock.sdk.stream.OPEN_S", 0.1)
    stream = connection.transactions()
    with pytest.raises(ConnectorUnreachable) as caught:
        stream.receive()
    assert "Open was not sent within 0.1 seconds" in caught.value.detail
    assert caught.value.__cause__.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_open_stream_has_no_deadline(monkeypatch, tmp_path):
    monkeypatch.setattr("penstock.sdk.stream.OPEN_S", 1.0)
    with serve(Toy(), f"unix:{tmp_path}/a.sock") as server, connect(server.address) as connection:
        stream = opened(connection)
        threading.Event().wait(1.2)
        stream.end()
        assert stream.receive() is None
