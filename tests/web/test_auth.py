"""Access to the status page: hosts, methods, tokens and addresses."""

import socket

import pytest

from penstock import persist
from penstock.errors import UsageError
from penstock.web import LakeView, serve
from tests.web.http_client import ask

TOKEN = "a token; with = and spaces"


@pytest.fixture
def view(tmp_path):
    """Yield the view of a lake that does not exist."""
    view = LakeView(f"file:{tmp_path}/lake", persist.Settings())
    yield view
    view.close()


def test_status_page_on_loopback_needs_no_token_and_rejects_other_host_names(served):
    assert ask(served.url, "/").status == 200
    for host in ("localhost", "localhost:80", "127.0.0.1:9", "[::1]:9", "LOCALHOST."):
        assert ask(served.url, "/api/state", Host=host).status == 200, host
    for host in ("evil.example", "127.0.0.1.evil.example", "10.0.0.1", "localhost.evil.example"):
        refused = ask(served.url, "/api/state", Host=host)
        assert refused.status == 421, host
        assert b"lake" not in refused.body


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_status_page_rejects_methods_that_write_with_405(served, method):
    assert ask(served.url, "/api/state", method).status == 405


def test_head_request_returns_status_without_body(served):
    answer = ask(served.url, "/healthz", "HEAD")
    assert (answer.status, answer.body) == (200, b"")


@pytest.mark.parametrize("path", ["/", "/app.js", "/api/state", "/metrics", "/nowhere"])
def test_every_response_has_security_and_cache_headers(served, path):
    headers = ask(served.url, path).headers
    assert headers["content-security-policy"].startswith("default-src 'self';")
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == ("no-cache" if path in ("/", "/app.js") else "no-store")


def test_internal_error_returns_500_without_its_message(view, served, monkeypatch):
    def broken():
        raise RuntimeError("a secret")

    monkeypatch.setattr(view, "running", broken)
    answer = ask(served.url, "/api/state")
    assert answer.status == 500
    assert b"secret" not in answer.body
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_request_for_file_outside_status_page_returns_404(served):
    for path in ("/../app.py", "/%2e%2e/app.py", "/static/app.js", "/app.py"):
        assert ask(served.url, path).status == 404


def test_status_page_with_token_requires_bearer_token_except_for_healthz(view):
    with serve(view, "127.0.0.1:0", token=TOKEN) as served:
        assert ask(served.url, "/healthz").status == 200
        for path in ("/", "/api/state", "/metrics", "/readyz", "/app.js", "/?token=wrong"):
            refused = ask(served.url, path)
            assert (refused.status, refused.headers["www-authenticate"]) == (401, "Bearer"), path
        for given in (f"Bearer {TOKEN}", f"bearer {TOKEN}"):
            assert ask(served.url, "/api/state", Authorization=given).status == 200
        for given in (f"Basic {TOKEN}", "Bearer ", "Bearer tökens", TOKEN):
            value = given.encode().decode("latin-1")
            assert ask(served.url, "/api/state", Authorization=value).status == 401, given


def test_token_in_page_url_is_replaced_by_cookie(view):
    with serve(view, "127.0.0.1:0", token=TOKEN) as served:
        entered = ask(served.url, "/?token=a%20token;%20with%20%3D%20and%20spaces")
        assert (entered.status, entered.headers["location"]) == (303, "/")
        cookie, *attributes = entered.headers["set-cookie"].split("; ")
        assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(attributes)
        assert "token" not in cookie
        assert ask(served.url, "/api/state", Cookie=cookie).status == 200
        assert ask(served.url, "/api/state", Cookie=cookie[:-1]).status == 401
        assert ask(served.url, "/api/state?token=a%20token").status == 401


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0"])
def test_serve_beyond_loopback_without_token_raises_usage_error(view, address):
    with pytest.raises(UsageError, match="without a token") as refused:
        serve(view, address, token=None)
    assert "PENSTOCK_HTTP_TOKEN" in refused.value.hint
    with serve(view, address, token=TOKEN) as served:
        port = served.url.rpartition(":")[2]
        there = f"http://127.0.0.1:{port}"
        assert ask(there, "/api/state", Host="db.example").status == 401
        answer = ask(there, "/api/state", Host="db.example", Authorization=f"Bearer {TOKEN}")
        assert answer.status == 200


@pytest.mark.parametrize("address", [":0", "127.0.0.1:0", "localhost:0", "[::1]:0"])
def test_serve_on_loopback_address_answers_until_closed(view, address):
    with serve(view, address, token=None) as served:
        assert ask(served.url, "/healthz").status == 200
    with pytest.raises(ConnectionRefusedError):
        ask(served.url, "/healthz")


@pytest.mark.parametrize("address", ["8080", "localhost", ":http", "::1:80", ":70000", ":-1", ""])
def test_serve_on_invalid_address_raises_usage_error(view, address):
    with pytest.raises(UsageError, match="of the status page is invalid") as refused:
        serve(view, address, token=None)
    assert "127.0.0.1:8080" in refused.value.hint


def test_serve_on_port_in_use_raises_usage_error(view):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UsageError, match=f'"{address}" of the page is taken') as refused:
            serve(view, address, token=None)
        assert "--http :0" in refused.value.hint


def test_serve_with_blank_token_raises_usage_error(view):
    with pytest.raises(UsageError, match="empty"):
        serve(view, "0.0.0.0:0", token=" ")
