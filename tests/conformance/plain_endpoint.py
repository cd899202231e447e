"""SQLite endpoint of `plain.py`, and its config."""

import json
import sqlite3
from pathlib import Path

REMOTE, STAGED, PLAIN, PUSH = (
    "remote-authoritative",
    "idempotent-apply",
    "non-transactional",
    "push-only",
)

TABLES = """
create table if not exists applied (task text primary key, version text, fields text);
create table if not exists rows (
    resource text, key blob, doc blob, epoch int, primary key (resource, key));
create table if not exists pushed (resource text, doc blob);
create table if not exists fences (
    task text, low int, high int, fence int, checkpoint blob, primary key (task, low, high));
create table if not exists epochs (epoch integer primary key autoincrement, task text);
create table if not exists done (id text primary key);
"""


class Refused(Exception):
    """Rejected request."""


class Endpoint:
    """Endpoint opened from its config."""

    def __init__(self, text: str, defect: str) -> None:
        try:
            config = json.loads(text)
        except ValueError:
            raise Refused("the endpoint is not JSON") from None
        if not isinstance(config, dict):
            raise Refused("the endpoint is not an object")
        self.defect = defect or config.get("defect", "")
        if "path" not in config and not self.bad("takes-any-endpoint"):
            raise Refused("the endpoint has no path")
        self.path = Path(config.get("path", ":memory:"))
        self.mode = config.get("mode", REMOTE)
        self.delta_only = self.mode == PUSH or config.get("delta_only", False)
        self.deletes = config.get("deletes", self.mode != PUSH)

    def bad(self, defect: str) -> bool:
        return self.defect == defect

    def connect(self) -> sqlite3.Connection:
        found = sqlite3.connect(
            self.path, timeout=10, isolation_level=None, check_same_thread=False
        )
        found.execute("pragma journal_mode = wal")
        found.execute("pragma synchronous = off")
        found.executescript(TABLES)
        return found


def table_of(text: str, endpoint: Endpoint) -> str:
    try:
        resource = json.loads(text)
    except ValueError:
        raise Refused("the resource is not JSON") from None
    if not isinstance(resource, dict):
        raise Refused("the resource is not an object")
    if "table" not in resource and endpoint.bad("takes-any-resource"):
        return "anything"
    if "table" not in resource:
        raise Refused("the resource has no table")
    return resource["table"]
