"""A connector that does not respond is unreachable, and the error names the step."""

import threading
from pathlib import Path

import pyarrow as pa
import pytest

from penstock.materialize import connect
from penstock.materialize.errors import ConnectorError, ConnectorUnreachable
from penstock.protocol.messages import Acknowledge, Acknowledged, Flush, Flushed, Load, StartCommit
from penstock.sdk import serve
from tests.sdk.stream_client import PATIENCE_S, drained, opened, ready, until
from tests.sdk.toy import Toy, ToyTransactor


@pytest.fixture
def gate():
    gate = threading.Event()
    yield gate
    gate.set()


@pytest.fixture
def toy() -> Toy:
    return Toy()


@pytest.fixture
def hurried(toy: Toy, gate: threading.Event, tmp_path: Path):
    """A connection to a connector with a method that does not return."""
    with serve(toy, f"unix:{tmp_path}/toy.sock") as server:
        with connect(server.address, patience_s=0.3) as connection:
            yield connection
        gate.set()


def blocked_transactor(method: str, gate: threading.Event) -> type[ToyTransactor]:
    def wait(self, *_):
        assert gate.wait(PATIENCE_S)

    return type("Deaf", (ToyTransactor,), {method: wait})


def acknowledge(stream):
    stream.send(Acknowledge())
    assert stream.receive() == Acknowledged()


def flush(stream):
    acknowledge(stream)
    stream.send(Flush())
    assert stream.receive() == Flushed()


def commit(stream):
    flush(stream)
    stream.send(StartCommit(b"cp"))
    stream.receive()


def end(stream):
    acknowledge(stream)
    stream.end()
    stream.receive()


@pytest.mark.parametrize(
    ("method", "steps", "says"),
    [
        ("__init__", None, "Opened did not arrive after Open"),
        ("acknowledge", acknowledge, "Acknowledged did not arrive after Acknowledge"),
        ("load", flush, "Flushed did not arrive after Flush"),
        ("start_commit", commit, "StartedCommit did not arrive after StartCommit"),
        ("close", end, "it does not end the stream after our half-close"),
    ],
    ids=["open", "acknowledge", "load", "commit", "end"],
)
def test_silent_connector_raises_connector_unreachable_that_names_step(
    toy, hurried, gate, method, steps, says
):
    toy.transactor = blocked_transactor(method, gate)

    def go_on():
        stream = opened(hurried)
        steps(stream)

    with pytest.raises(ConnectorUnreachable, match=says) as caught:
        go_on()
    assert hurried.address in str(caught.value)
    assert caught.value.detail == "The wait was 0.3 s."


def test_connector_that_reads_no_requests_raises_connector_unreachable(
    toy, hurried, gate, monkeypatch
):
    monkeypatch.setattr("penstock.sdk.stream.WAITING_BYTES", 1)
    monkeypatch.setattr("penstock.materialize.connector_client.BUFFERED_BYTES", 1)
    toy.transactor = blocked_transactor("acknowledge", gate)
    stream = opened(hurried)
    stream.send(Acknowledge())
    large = pa.array([bytes(1 << 20)], pa.binary())

    def send_on():
        for _ in range(100):
            stream.send(Load(0, large))

    with pytest.raises(ConnectorUnreachable, match="it accepts no request"):
        send_on()


def test_idle_stream_without_pending_response_does_not_time_out(hurried):
    stream = ready(hurried)
    heard: list[Exception] = []

    def listen():
        try:
            drained(stream)
        except ConnectorError as error:
            heard.append(error)

    listener = threading.Thread(target=listen)
    listener.start()
    threading.Event().wait(1.0)
    assert not heard
    stream.cancel()
    listener.join(PATIENCE_S)
    assert "CANCELLED" in str(heard[0].__notes__)


def test_stream_end_has_full_answer_timeout_after_idle_time(toy, gate, tmp_path):
    toy.transactor = blocked_transactor("close", gate)
    with serve(toy, f"unix:{tmp_path}/toy.sock") as server, connect(server.address) as connection:
        stream = ready(connection)
        heard: list[object] = []
        listener = threading.Thread(target=lambda: heard.append(stream.receive()))
        listener.start()
        until(lambda: stream._receiving)

        looks = iter(range(4))

        def check(_patience_s):
            """Report an idle stream twice, then end the stream, then stop the watch."""
            count = next(looks)
            if count == 2:
                stream.end()
            return count == 3

        stream._ended.wait = check
        stream._watch(1.0)
        gate.set()
        listener.join(PATIENCE_S)
        assert heard == [None]
