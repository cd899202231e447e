"""HTTP requests to a running status page."""

import http.client
import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode, urlsplit


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def ask(url: str, path: str, method: str = "GET", /, **headers: str) -> Answer:
    """Send a request to the status page at `url`; keyword arguments are headers."""
    parts = urlsplit(url)
    line = http.client.HTTPConnection(parts.hostname, parts.port, timeout=20)
    try:
        line.request(method, quote(path, safe="/?=&%+"), headers=headers)
        answer = line.getresponse()
        told = {name.lower(): value for name, value in answer.getheaders()}
        return Answer(answer.status, told, answer.read())
    finally:
        line.close()


def query(path: str, **given: object) -> str:
    return f"{path}?{urlencode(given)}"
