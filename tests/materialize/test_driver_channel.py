"""The driver channel: encrypted, and restricted to the Spark tasks of the job."""

import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from penstock.materialize.commit_barrier import CommitBarrier, CommitNotRecorded, ShardReport
from penstock.materialize.driver_channel import DriverChannel, DriverChannelServer
from penstock.materialize.run_certificate import run_certificate

SECRET = b"x" * 32
READABLE = "a-plan-that-nobody-else-must-read"


class Offers:
    """A driver whose plan is one text."""

    def opened(self) -> None:
        pass

    def plan_next(self) -> Any:
        return [READABLE]

    def commit(self, reports: Sequence[ShardReport], *, continues: bool) -> None:
        pass

    def acknowledged(self, acknowledged_ms: int) -> None:
        pass


@pytest.fixture(params=[True, False], ids=["tls", "loopback"])
def server(request: pytest.FixtureRequest) -> Iterator[DriverChannelServer]:
    certificate = run_certificate() if request.param else None
    found = DriverChannelServer(
        CommitBarrier(1, Offers(), lambda _: True), "127.0.0.1", SECRET, 1, certificate
    )
    yield found
    found.close()


class Proxy:
    """A proxy that forwards one connection and records its bytes."""

    def __init__(self, port: int) -> None:
        self.seen = bytearray()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._target = port
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        client = self._listener.accept()[0]
        driver = socket.create_connection(("127.0.0.1", self._target))
        back = threading.Thread(target=self._forward, args=(driver, client))
        back.start()
        self._forward(client, driver)
        back.join()
        client.close()
        driver.close()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65_536):
                self.seen += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def close(self) -> None:
        self._listener.close()
        for each in self._threads:
            each.join()


def test_driver_channel_messages_are_plaintext_only_without_certificate(
    server: DriverChannelServer,
) -> None:
    proxy = Proxy(server.address.port)
    line = DriverChannel(replace(server.address, port=proxy.port), 0)
    assert line.plan_next() == READABLE
    line.close(done=True)
    proxy.close()
    assert (READABLE.encode() in proxy.seen) is (server.address.certificate is None)
    assert SECRET not in proxy.seen


def test_driver_channel_client_with_wrong_secret_is_rejected(server: DriverChannelServer) -> None:
    with pytest.raises(CommitNotRecorded):
        DriverChannel(replace(server.address, secret=b"y" * 32), 0)
    line = DriverChannel(server.address, 0)
    assert line.plan_next() == READABLE
    line.close(done=True)


def test_plaintext_client_of_encrypted_driver_channel_is_rejected() -> None:
    rounds = CommitBarrier(1, Offers(), lambda _: True)
    server = DriverChannelServer(rounds, "127.0.0.1", SECRET, 1, run_certificate())
    with socket.create_connection(("127.0.0.1", server.address.port)) as plain:
        plain.sendall(b"\0" * 8)
        # At most a TLS alert before the end of the stream.
        received = b"".join(iter(lambda: plain.recv(1_024), b""))
        assert len(received) < 16
    server.close()


def test_driver_channel_server_with_unexpected_certificate_is_rejected() -> None:
    rounds = CommitBarrier(1, Offers(), lambda _: True)
    server = DriverChannelServer(rounds, "127.0.0.1", SECRET, 1, run_certificate())
    another = run_certificate.__wrapped__().certificate
    with pytest.raises(CommitNotRecorded):
        DriverChannel(replace(server.address, certificate=another), 0)
    server.close()


def test_private_key_of_run_certificate_is_absent_from_repr_and_address(
    server: DriverChannelServer,
) -> None:
    assert "PRIVATE" not in repr(run_certificate()) + repr(server.address)
    assert b"PRIVATE" not in (server.address.certificate or b"")
