"""Who may look, and what browsers may do with the answer.

Without a token the page is for this machine alone. A browser here can be led to
it by any site whose name is made to point at loopback, so the name it was asked
by must be one of this machine's own. With a token whoever has it may look: as a
bearer, or by a cookie that `/?token=…` sets once, so that it need not stay in
the address.
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
    """Lets requests through to `app` that may read, and adds headers to every answer."""

    def __init__(self, app: ASGIApp, *, token: str | None) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
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
        """What to answer instead, if the request is not let through."""
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
    """Whether a name or address can only mean this machine."""
    if host.lower().rstrip(".") in ("localhost", "ip6-localhost"):
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def same(given: str, secret: str) -> bool:
    """Whether both are equal, in a time that does not tell where they differ."""
    return hmac.compare_digest(given.encode(), secret.encode())


def _digest(token: str) -> str:
    """What the cookie holds: enough to be let in here, and not the token itself."""
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
    """A Host header without its port."""
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]
