"""Connections that send half a request to the status page of a running pipeline."""

import logging
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from penstock.web import Served, connection_limit
from penstock.web.connection_limit import MOST_CONNECTIONS, LogRate
from tests.web.http_client import ask

HALF = b"GET /api/state HTTP/1.1\r\nHost: localhost\r\n"


@contextmanager
def half_sent(served: Served, count: int) -> Iterator[list[socket.socket]]:
    parts = urlsplit(served.url)
    with ExitStack() as stack:
        sockets = []
        for _ in range(count):
            line = stack.enter_context(socket.create_connection((parts.hostname, parts.port), 60))
            line.sendall(HALF)
            sockets.append(line)
        yield sockets


def is_closed(line: socket.socket) -> bool:
    try:
        return line.recv(1) == b""
    except ConnectionError:
        return True


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_status_page_with_1000_half_sent_requests_answers_and_bounds_descriptors(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    before = descriptors()
    with half_sent(served, 1_000) as sockets:
        assert ask(served.url, "/healthz").status == 200
        # Each client in this process has one descriptor of its own.
        assert descriptors() - before - len(sockets) <= MOST_CONNECTIONS + 40
        assert is_closed(sockets[0])
        # The server continues with the connections that it did not close.
        sockets[-1].sendall(b"\r\n")
        assert sockets[-1].recv(12) == b"HTTP/1.1 200"
    assert len(caplog.text) < 10_000


def test_half_sent_request_is_closed_after_its_deadline(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_limit, "REQUEST_S", 0.05)
    with half_sent(served, 1) as [line]:
        assert is_closed(line)


def test_log_rate_with_repeated_message_passes_one_record() -> None:
    rate = LogRate()
    records = [logging.LogRecord("x", 30, "f", 1, "no descriptor", (), None) for _ in range(100)]
    assert [rate.filter(each) for each in records] == [True] + [False] * 99
