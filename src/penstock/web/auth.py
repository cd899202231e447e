"""Access to the status page, and the security headers of its responses.

Without a token the page is for this machine alone. A foreign site can make its host name resolve to
loopback and lead a local browser to the page (DNS rebinding). The Host header must therefore name
this machine. With a token, any client that sends it has access: as a bearer token, or by a cookie
that `/?token=…` sets once. The cookie keeps the token out of the address.
"""

import hashlib
import hmac
from http.cookies import CookieError, SimpleCookie
from ipaddress import ip_address
from typing import Final
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["HEADERS", "Guard", "is_loopback"]

COOKIE: Final = "penstock"
OPEN_TO_ALL: Final = frozenset({"/healthz"})
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class Guard:
    """Middleware that passes authorised reads to `app` and adds headers to each response."""

    def __init__(self, app: ASGIApp, *, token: str | None) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        refused = self._refused(scope)
        await (refused or self._app)(scope, receive, send_guarded)

    def _refused(self, scope: Scope) -> Response | None:
        """Return the response to a rejected request; None if the request is allowed."""
        headers = Headers(scope=scope)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse(
                "this page is read-only\n", 405, headers={"Allow": "GET, HEAD"}
            )
        if scope["path"] in OPEN_TO_ALL:
            return None
        if self._token is None:
            host = _name_in(headers.get("host", ""))
            if is_loopback(host):
                return None
            return PlainTextResponse(
                f'"{host}" is not a name of this machine\n'
                "hint: Open the page as http://localhost, or start it with a token.\n",
                421,
            )
        return self._refused_by(self._token, scope, headers)

    def _refused_by(self, token: str, scope: Scope, headers: Headers) -> Response | None:
        if same(_bearer(headers), token) or same(_cookie(headers), _digest(token)):
            return None
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if scope["path"] == "/" and same(given, token):
            answer = RedirectResponse("/", 303)
            answer.set_cookie(
                COOKIE,
                _digest(token),
                httponly=True,
                samesite="strict",
                secure=scope["scheme"] == "https",
            )
            return answer
        return PlainTextResponse(
            "a token is needed\n"
            "hint: Open /?token=… once in this browser, or send Authorization: Bearer ….\n",
            401,
            headers={"WWW-Authenticate": "Bearer"},
        )


def is_loopback(host: str) -> bool:
    """Return whether a name or address can only mean this machine."""
    if host.lower().rstrip(".") in ("localhost", "ip6-localhost"):
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def same(given: str, secret: str) -> bool:
    """Return whether both are equal, in a time that does not depend on their contents."""
    return hmac.compare_digest(given.encode(), secret.encode())


def _digest(token: str) -> str:
    """Return the value of the cookie, which grants access and does not reveal the token."""
    return hashlib.sha256(b"penstock page\0" + token.encode()).hexdigest()


def _bearer(headers: Headers) -> str:
    scheme, _, given = headers.get("authorization", "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else ""


def _cookie(headers: Headers) -> str:
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return "" if found is None else found.value


def _name_in(host: str) -> str:
    """Return a Host header without its port."""
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]
