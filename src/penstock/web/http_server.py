"""HTTP server of the status page, in its own thread."""

import asyncio
import errno
import logging
import socket
import threading
from typing import Any, Final

import uvicorn

from penstock.errors import UsageError
from penstock.telemetry import logger
from penstock.web.app import app
from penstock.web.auth import is_loopback
from penstock.web.connection_limit import ACCEPTED_AT_ONCE, LimitedProtocol, LogRate
from penstock.web.lake_view import View

__all__ = ["AddressTaken", "Served", "serve"]

failures: Final = logger("web.connections")
for _logger in (failures, logging.getLogger("uvicorn.error")):
    _logger.addFilter(LogRate())

PATIENCE_S: Final = 2
"""Time limit for open requests when the page is closed, in seconds."""

LOOPBACK: Final = "127.0.0.1"


class AddressTaken(UsageError):
    """Error: another process listens at the address of the page."""

    def __init__(self, address: str) -> None:
        super().__init__(
            f'address "{address}" of the page is taken',
            detail="Another process listens there.",
            hint="End it, or choose another port; --http :0 takes a free one.",
        )


def serve(view: View, address: str, *, token: str | None) -> "Served":
    """Serve `view` at `address`, `HOST:PORT`, until the result is closed.

    An empty host means loopback, and port 0 a free port. When this returns, the socket listens and
    requests queue there until they are answered.

    Raises:
        UsageError: the address is not available, or other hosts can reach it and there is no token.
    """
    host, port = _parsed(address)
    if token is not None and not token.strip():
        raise UsageError(
            "token of the page is empty", hint="Set PENSTOCK_HTTP_TOKEN to a secret, or not at all."
        )
    bound = _bound(host, port, address, loopback_only=token is None)
    try:
        return Served(bound, view, token)
    except BaseException:
        bound.close()
        raise


class Served:
    """Status page being served. A context manager."""

    def __init__(self, bound: socket.socket, view: View, token: str | None) -> None:
        host, port = bound.getsockname()[:2]
        url_host = f"[{host}]" if ":" in host else host
        self.url = f"http://{url_host}:{port}/"
        config = uvicorn.Config(
            app(view, token=token),
            http=LimitedProtocol,
            backlog=ACCEPTED_AT_ONCE,
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,  # It would log tokens.
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=PATIENCE_S,
        )
        self._server = uvicorn.Server(config)
        self._bound = bound
        self._thread = threading.Thread(target=self._run, name="page", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Served":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the server; open requests are completed, or aborted after `PATIENCE_S`."""
        self._server.should_exit = True
        self._thread.join(2 * PATIENCE_S)

    def _run(self) -> None:
        # Outside the main thread uvicorn installs no signal handlers.
        try:
            asyncio.run(self._serve())
        finally:
            self._bound.close()

    async def _serve(self) -> None:
        asyncio.get_running_loop().set_exception_handler(_log_failure)
        await self._server.serve(sockets=[self._bound])


def _log_failure(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # SUBTLE: without free descriptors, asyncio reports one failure per backlog entry.
    failures.error(context["message"], exc_info=context.get("exception"))


def _parsed(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not colon or not (port.isascii() and port.isdecimal()) or int(port) > 65_535:
        raise _no_address(address)
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise _no_address(address)
    return host or LOOPBACK, int(port)


def _no_address(address: str) -> UsageError:
    return UsageError(
        f'address "{address}" of the status page is invalid',
        hint="Give HOST:PORT, such as 127.0.0.1:8080, [::1]:8080, or :0 for any free port.",
    )


def _bound(host: str, port: int, address: str, *, loopback_only: bool) -> socket.socket:
    """Return a listening socket; with `loopback_only`, only on a loopback address."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise UsageError(
            f'host "{host}" of the status page has no address',
            detail=f"{error.strerror}.",
            hint="Name an address of this host, or omit it for loopback.",
        ) from error
    if loopback_only and not is_loopback(str(where[0])):
        raise UsageError(
            f'status page cannot be served at "{address}" without a token',
            detail="Other hosts can reach that address, and the page shows data.",
            hint="Set PENSTOCK_HTTP_TOKEN to a secret, or serve the page at 127.0.0.1.",
        )
    bound = socket.socket(family, kind)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(where)
        bound.listen(ACCEPTED_AT_ONCE)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise AddressTaken(address) from error
        raise UsageError(
            f'status page cannot be served at "{address}"',
            detail=f"{error.strerror}.",
            hint="Choose an address of this host and a port of at least 1024.",
        ) from error
    return bound
