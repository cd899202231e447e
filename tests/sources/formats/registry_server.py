"""Schema registry for tests with the part of Confluent's API that readers use."""

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from penstock.sources.formats import schema_registry


@dataclass
class Answers:
    """Recorded requests and configured responses of the server."""

    schemas: dict[int, dict[str, Any]] = field(default_factory=dict)
    subjects: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    credentials: list[str | None] = field(default_factory=list)
    instead: tuple[int, bytes] | None = None
    redirect: str | None = None
    refuses: str | None = None
    """Prefix of the paths that the server rejects."""

    url: str = ""


class _Handler(BaseHTTPRequestHandler):
    answers: Answers

    def do_GET(self) -> None:
        answers = self.answers
        answers.asked.append(self.path)
        answers.credentials.append(self.headers.get("Authorization"))
        if answers.redirect is not None:
            self.send_response(302)
            self.send_header("Location", answers.redirect)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if answers.refuses is not None and self.path.startswith(answers.refuses):
            self._say(403, b"{}")
            return
        if answers.instead is not None:
            self._say(*answers.instead)
            return
        _, kind, *rest = self.path.split("/")
        found = None
        if kind == "schemas":
            found = answers.schemas.get(int(rest[1]))
            missing = 40403
        else:
            found = answers.subjects.get((rest[0], rest[2]))
            missing = 40401
        if found is None:
            self._say(404, json.dumps({"error_code": missing, "message": "not found"}).encode())
        else:
            self._say(200, json.dumps(found).encode())

    def _say(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def serving(tls: ssl.SSLContext | None = None) -> Iterator[Answers]:
    # A port may be used again, and schemas are cached by URL and id.
    schema_registry._by_id.cache_clear()
    schema_registry._by_version.cache_clear()
    answers = Answers()
    handler = type("_Bound", (_Handler,), {"answers": answers})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        scheme = "http" if tls is None else "https"
        answers.url = f"{scheme}://localhost:{server.server_port}"
        yield answers
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
