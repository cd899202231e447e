"""Routes of the status page, over a `View`.

    /                the page
    /api/state       everything except rows; with after=MS only the history since then
    /api/rows        collection=NAME  as_of=T  limit=N
    /api/changes     collection=NAME  limit=N
    /metrics         for Prometheus
    /healthz         200 while this process and all its tasks are alive
    /readyz          200 when all tasks deliver, else 503 and the outstanding conditions

A view reads files, so its methods run in threads.
"""

from collections.abc import Mapping
from importlib.resources import files
from typing import Any, Final

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.errors import PenstockError, StoreError, UsageError
from penstock.persist.errors import CollectionMissing
from penstock.supervisor.status import ErrorStatus
from penstock.telemetry import fields, logger
from penstock.web.auth import HEADERS, Guard
from penstock.web.lake_view import View
from penstock.web.metrics import CONTENT_TYPE, exposition
from penstock.web.page_state import degraded_bindings, outstanding_conditions, unhealthy_tasks

__all__ = ["app"]

log = logger("web")

KINDS: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
DEFAULT_LIMIT: Final = 50
LARGEST_LIMIT: Final = 500


def app(view: View, *, token: str | None) -> Starlette:
    """Return the app that serves `view`; with a token, only to clients that send it."""
    routes = [Route(f"/{name}", page) for name, page in _pages().items()]
    handlers = _Routes(view)
    return Starlette(
        routes=[
            *routes,
            Route("/", _pages()["index.html"]),
            Route("/api/state", handlers.state),
            Route("/api/rows", handlers.rows),
            Route("/api/changes", handlers.changes),
            Route("/metrics", handlers.metrics),
            Route("/healthz", handlers.healthz),
            Route("/readyz", handlers.readyz),
        ],
        middleware=[Middleware(Guard, token=token)],
        exception_handlers={PenstockError: _refuse, Exception: _fail},
    )


class _Routes:
    def __init__(self, view: View) -> None:
        self._view = view

    def state(self, request: Request) -> Response:
        after = _number(request, "after", 0)
        return _json(_since(after, self._view.state()))

    def rows(self, request: Request) -> Response:
        as_of = request.query_params.get("as_of") or "latest"
        return _json(self._view.rows(_collection(request), as_of.strip(), _limit(request)))

    def changes(self, request: Request) -> Response:
        return _json(self._view.changes(_collection(request), _limit(request)))

    def metrics(self, _: Request) -> Response:
        return Response(exposition(self._view.page_state()), media_type=CONTENT_TYPE)

    async def healthz(self, _: Request) -> Response:
        # Not in the thread pool: requests for rows could fill it, and the process would look dead.
        dead = unhealthy_tasks(self._view.running())
        return _json({"healthy": not dead, "dead": dead}, 503 if dead else 200)

    def readyz(self, _: Request) -> Response:
        state = self._view.page_state()
        waits = outstanding_conditions(state)
        if not self._view.running():
            waits = ["the tasks to start", *waits]
        answer = {"ready": not waits, "waits_for": waits, "degraded": degraded_bindings(state)}
        return _json(answer, 503 if waits else 200)


def _pages() -> dict[str, Any]:
    """Return a handler for each static file, by name."""

    def page(body: bytes, kind: str) -> Any:
        def serve(_: Request) -> Response:
            return Response(body, media_type=kind, headers={"Cache-Control": "no-cache"})

        return serve

    return {
        file.name: page(file.read_bytes(), KINDS["." + file.name.rpartition(".")[2]])
        for file in (files("penstock.web") / "static").iterdir()
    }


def _since(after: int, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state with only the history after a time."""
    return {
        **state,
        "sources": [
            {**source, "history": [row for row in source["history"] if row[0] > after]}
            for source in state["sources"]
        ],
        "materializations": [
            {
                **task,
                "history": [row for row in task["history"] if row[0] > after],
                # The last few transactions again: their durations may have been incomplete before.
                "transactions": task["transactions"][-5 if after else 0 :],
            }
            for task in state["materializations"]
        ],
    }


def _collection(request: Request) -> str:
    name = request.query_params.get("collection")
    if not name:
        raise UsageError("request names no collection", hint="Add ?collection=NAME.")
    return name


def _limit(request: Request) -> int:
    return max(1, min(_number(request, "limit", DEFAULT_LIMIT), LARGEST_LIMIT))


def _number(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise UsageError(f"{name} is not a number", hint=f"Give {name} as digits.")
    return int(text)


def _json(value: Mapping[str, Any], status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def _refuse(_: Request, error: Exception) -> Response:
    match error:
        case CollectionMissing():
            status = 404
        case StoreError():
            status = 503
        case _:
            status = 400
    return _json({"error": ErrorStatus.of(error).to_json()}, status)


async def _fail(request: Request, error: Exception) -> Response:
    log.error("request failed", extra=fields(path=request.url.path, error=repr(error)))
    failure = ErrorStatus(
        "request failed with an internal error",
        hint="Please report it, with the error in the log of this process.",
    )
    response = _json({"error": failure.to_json()}, 500)
    response.headers.update(HEADERS)  # This response bypasses the guard.
    return response
