import os
import random
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tests.fix_objects import BUCKET, ObjectServer

from penstock.clock import SYSTEM_CLOCK
from penstock.durable.blob import Blob
from penstock.durable.location import children, open_blob
from penstock.durable.objects import UPLOAD_BYTES
from penstock.durable.retrying_blob import RetryingBlob
from penstock.errors import (
    DeterminateError,
    IndeterminateError,
    StoreError,
    StoreRefused,
)
from penstock.retry import Policy, policy_of

READS: list[Callable[[Blob], object]] = [
    lambda blob: blob.get("k"),
    lambda blob: blob.list(""),
    lambda blob: blob.delete("k"),
]
WRITES: list[Callable[[Blob], object]] = [
    lambda blob: blob.put("k", b""),
    lambda blob: blob.create("k", b""),
]


def error_of(call: Callable[[Blob], object], blob: Blob) -> StoreError:
    with pytest.raises(StoreError) as raised:
        call(blob)
    return raised.value


@pytest.mark.parametrize("call", READS + WRITES)
def test_object_call_on_missing_bucket_raises_store_refused(
    object_url: str, call: Callable[[Blob], object]
) -> None:
    error = error_of(call, open_blob("s3://nowhere/prefix"))
    assert isinstance(error, StoreRefused)
    assert "NoSuchBucket" in error.detail
    assert error.hint.startswith("Create the bucket")


@pytest.mark.parametrize("call", READS + WRITES)
@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_object_call_with_wrong_credentials_raises_store_refused_without_them(
    object_url: str, monkeypatch: pytest.MonkeyPatch, name: str, call: Callable[[Blob], object]
) -> None:
    monkeypatch.setenv(name, "hush-hush")
    blob = open_blob(object_url)
    error = error_of(call, blob)
    assert isinstance(error, StoreRefused)
    assert "AWS_ACCESS_KEY_ID" in error.hint
    assert error.__cause__ is None
    told = f"{error!r} {error.__notes__} {blob.name}"
    assert "hush" not in told
    assert "penstock-secret" not in told


def test_open_object_location_without_secret_key_raises_store_refused(
    object_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StoreRefused, match="could not open location") as refused:
        open_blob(object_url)
    assert "AWS_SECRET_ACCESS_KEY" in refused.value.hint


def test_object_call_on_unreachable_server_raises_determinate_error(
    object_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    for call in READS + WRITES:  # No request was sent, and no write is indeterminate.
        error = error_of(call, open_blob(object_url))
        assert type(error) is DeterminateError
        assert error.detail == "The store did not answer (Connect)."


def test_object_list_longer_than_one_page_is_complete(
    object_server: ObjectServer, object_url: str
) -> None:
    blob = open_blob(object_url, writing=True)
    keys = [f"part/{number:04}" for number in range(1_100)]
    for key in keys:
        blob.put(key, b"")
    assert [listed.key for listed in blob.list("part/")] == keys
    assert [listed.key for listed in blob.list("part/", after=keys[-3])] == keys[-2:]
    assert children(object_url) == ["part"]


class Answers(BaseHTTPRequestHandler):
    """Handler that sends the same response to every request, or closes the connection."""

    protocol_version = "HTTP/1.1"
    status = 0
    code = "Odd"
    requests = 0

    def answer(self) -> None:
        type(self).requests += 1
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.status == 0:
            self.close_connection = True
            return
        body = f"<Error><Code>{self.code}</Code></Error>".encode()
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_DELETE = answer  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Answers]]:
    class Own(Answers):
        pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Own)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    yield Own
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("status", [400, 401, 403, 405, 411, 413, 501])
def test_object_call_with_permanent_http_status_raises_store_refused(
    answers: type[Answers], status: int
) -> None:
    answers.status = status
    for call in READS + WRITES:
        assert isinstance(error_of(call, open_blob(f"s3://{BUCKET}/x")), StoreRefused)


@pytest.mark.parametrize("status", [408, 409, 425, 429])
def test_object_call_with_transient_http_status_raises_retryable_determinate_error(
    answers: type[Answers], status: int
) -> None:
    answers.status = status
    for call in READS + WRITES:
        error = error_of(call, open_blob(f"s3://{BUCKET}/x"))
        assert type(error) is DeterminateError
        assert policy_of(error) is Policy.REPEAT


def test_object_call_with_request_timeout_code_raises_determinate_error(
    answers: type[Answers],
) -> None:
    answers.status, answers.code = 400, "RequestTimeout"
    for call in READS + WRITES:
        assert type(error_of(call, open_blob(f"s3://{BUCKET}/x"))) is DeterminateError


@pytest.mark.parametrize("status", [0, 500, 502, 503, 504])
def test_object_write_with_server_error_raises_indeterminate_error(
    answers: type[Answers], status: int
) -> None:
    answers.status = status
    for call in READS:
        assert type(error_of(call, open_blob(f"s3://{BUCKET}/x"))) is DeterminateError
    for call in WRITES:
        assert type(error_of(call, open_blob(f"s3://{BUCKET}/x"))) is IndeterminateError


def test_object_client_sends_failed_request_only_once(answers: type[Answers]) -> None:
    answers.status = 503
    error_of(WRITES[0], open_blob(f"s3://{BUCKET}/x"))
    assert answers.requests == 1


def test_object_create_with_http_412_returns_false(answers: type[Answers]) -> None:
    answers.status = 412
    assert open_blob(f"s3://{BUCKET}/x").create("k", b"") is False


def test_object_get_leaves_environment_unchanged(object_url: str) -> None:
    before = dict(os.environ)
    open_blob(object_url).get("k")
    assert dict(os.environ) == before


def test_object_write_to_hung_store_raises_indeterminate_error_after_timeout(
    object_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_ANSWER_TIMEOUT", "0.2")
    monkeypatch.setattr("penstock.durable.objects.UPLOAD_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{listener.getsockname()[1]}")
        blob = open_blob(object_url)
        for call in READS:
            assert type(error_of(call, blob)) is DeterminateError
        for call in [*WRITES, lambda blob: blob.put("large", bytes(UPLOAD_BYTES + 1))]:
            error = error_of(call, blob)
            assert type(error) is IndeterminateError
            assert error.detail == "The store did not answer (Timeout)."


def test_object_create_in_suspended_store_is_retried_and_succeeds_once(
    object_server: ObjectServer, object_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The suspended store may execute the first attempt on resume; the create succeeds anyway."""
    # The server needs a second for a create, and longer while it catches up.
    monkeypatch.setenv("PENSTOCK_ANSWER_TIMEOUT", "5")
    blob = RetryingBlob(open_blob(object_url, writing=True), SYSTEM_CLOCK, random.Random(3))
    assert blob.create("before", b"x")
    assert object_server.process is not None
    object_server.process.send_signal(signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(1) as pool:
            created = pool.submit(blob.create, "entry", b"token")
            while not blob.statistics().retries:
                assert not created.done()
                SYSTEM_CLOCK.wait(threading.Event(), 20)
            assert [each.operation for each in blob.statistics().failing] == ["create"]
            object_server.process.send_signal(signal.SIGCONT)
            assert created.result(60)
    finally:
        object_server.process.send_signal(signal.SIGCONT)
    assert blob.get("entry") == b"token"
    assert not blob.create("entry", b"other token")
    blob.close()
