import itertools
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.fix_objects import ObjectServer

from penstock.durable.location import open_blob
from penstock.durable.memory import MemoryBlob
from penstock.durable.probe import probe_location
from penstock.errors import StoreRefused
from penstock.testing.stores import UnreliableBlob


@pytest.fixture
def ids() -> Callable[[], str]:
    numbers = itertools.count()
    return lambda: f"n{next(numbers)}"


@pytest.mark.parametrize("kind", ["memory", "files"])
def test_probe_of_correct_store_passes_and_is_not_repeated(
    tmp_path: Path, ids: Callable[[], str], kind: str
) -> None:
    blob = MemoryBlob() if kind == "memory" else open_blob(f"file:{tmp_path}", writing=True)
    assert probe_location(blob, ids)
    assert [listed.key for listed in blob.list("")] == ["probe/passed-1"]
    assert not probe_location(blob, ids)
    blob.close()


def test_probe_of_real_object_server_passes_and_is_not_repeated(
    object_url: str, ids: Callable[[], str]
) -> None:
    blob = open_blob(object_url, writing=True)
    assert probe_location(blob, ids, racers=3, races=2)
    assert [listed.key for listed in blob.list("")] == ["probe/passed-1"]
    assert not probe_location(open_blob(object_url, writing=True), ids)


def test_probe_of_store_with_two_winning_creators_raises_and_cleans_up(
    ids: Callable[[], str],
) -> None:
    blob = UnreliableBlob(MemoryBlob(name="memory:liar"), lying_create=True)
    with pytest.raises(StoreRefused, match="memory:liar") as refused:
        probe_location(blob, ids)
    assert "16 concurrent creators" in refused.value.detail
    assert "If-None-Match" in refused.value.hint
    assert blob.list("") == []


def test_probe_of_store_that_overwrites_existing_key_raises_store_refused(
    ids: Callable[[], str],
) -> None:
    blob = UnreliableBlob(MemoryBlob(), lying_create=True)
    with pytest.raises(StoreRefused) as refused:
        probe_location(blob, ids, racers=1)
    assert refused.value.detail == "A create of an existing key succeeded."


@pytest.fixture
def careless_proxy(object_server: ObjectServer) -> Iterator[str]:
    """Yield the address of a proxy to the real server that drops the If-None-Match header."""
    target = object_server.environment["AWS_ENDPOINT_URL"]

    class Proxy(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            # Drop the signature too: it covers the dropped header.
            headers = {
                name: value
                for name, value in self.headers.items()
                if name.lower() in ("content-type", "content-md5", "range")
            }
            request = urllib.request.Request(
                target + self.path, data=body or None, headers=headers, method=self.command
            )
            try:
                answer = urllib.request.urlopen(request)
            except urllib.error.HTTPError as error:
                answer = error
            with answer:
                data = answer.read()
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    if name.lower() not in ("transfer-encoding", "content-length", "connection"):
                        self.send_header(name, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = pass_on  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_probe_through_proxy_without_if_none_match_raises_store_refused(
    object_url: str,
    careless_proxy: str,
    ids: Callable[[], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", careless_proxy)
    blob = open_blob(object_url, writing=True)
    blob.put("through", b"the proxy")
    assert blob.get("through") == b"the proxy"
    with pytest.raises(StoreRefused, match="accepts several creators of one key"):
        probe_location(blob, ids, racers=4, races=1)
    assert [listed.key for listed in blob.list("probe/")] == []
