"""Endpoints of the built-in connectors: their configuration and their contents.

Two are databases, whose commit is authoritative. For three file connectors the recovery log
is authoritative: staged files are applied once, plain files have no transactions, and pushed
files are append-only.
"""

import fcntl
import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from penstock.servers.postgres import Database
from tests.chaos.invariants import Line, State
from tests.chaos.workload import Bound, Doc
from tests.ingest.proxy import Proxy


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Endpoint of one scenario."""

    connector: str
    folder: Path
    database: Database | None = None
    """Postgres database, if the connector needs one."""

    proxy: Proxy | None = None
    """Proxy between the connector and the database."""

    @property
    def config(self) -> Mapping[str, Any]:
        match self.connector:
            case "sqlite":
                return {"path": str(self.folder / "bank.db")}
            case "postgres":
                assert self.database is not None
                assert self.proxy is not None
                port = f":{self.database.server.port}/"
                url = self.database.url(host="tcp")
                return {"url": url.replace(port, f":{self.proxy.port}/")}
            case _:
                return {"folder": str(self.folder / "files")}

    def binding(self, bound: Bound) -> Mapping[str, Any]:
        """Return the binding as in a pipeline file."""
        files = self.connector.endswith("files")
        binding = {
            "collection": bound.collection,
            "resource": {"name" if files else "table": bound.resource},
        }
        # Push-only bindings are always delta updates, without a setting.
        delta = bound.delta and self.connector != "push-files"
        return {**binding, "delta_updates": True} if delta else binding

    def read(self, bounds: Sequence[Bound]) -> State:
        """Return the contents; for a database, in one transaction."""
        match self.connector:
            case "sqlite":
                return self._sqlite(bounds)
            case "postgres":
                return self._postgres(bounds)
            case _:
                return {each.resource: list(self._file(each.resource)) for each in bounds}

    @contextmanager
    def away(self) -> Iterator[None]:
        """Block all other writers within the block."""
        with ExitStack() as stack:
            if self.proxy is not None:
                self.proxy.refuses = True
                self.proxy.cut()
                stack.callback(setattr, self.proxy, "refuses", False)
            elif self.connector == "sqlite":
                lock = sqlite3.connect(self.folder / "bank.db", isolation_level=None, timeout=30)
                stack.callback(lock.close)
                lock.execute("BEGIN IMMEDIATE")
            else:
                for folder in (self.folder / "files").iterdir():
                    file = stack.enter_context((folder / "lock").open("a"))
                    fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def staged(self) -> list[str]:
        """Return the paths of staged files."""
        return sorted(str(each) for each in (self.folder / "files").glob("*/staged/*"))

    def _sqlite(self, bounds: Sequence[Bound]) -> State:
        path = self.folder / "bank.db"
        if not path.exists():
            return {}
        connection = sqlite3.connect(path, timeout=30, isolation_level=None)
        try:
            connection.execute("BEGIN")
            tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            names = {name for (name,) in tables}
            return {
                each.resource: [
                    Line(doc_of(json.loads(text)))
                    for (text,) in connection.execute(
                        f"SELECT flow_document FROM {each.resource} ORDER BY rowid"
                    )
                ]
                for each in bounds
                if each.resource in names
            }
        finally:
            connection.close()

    def _postgres(self, bounds: Sequence[Bound]) -> State:
        assert self.database is not None
        with psycopg.connect(self.database.url()) as connection:
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            tables = connection.execute(
                "SELECT table_name FROM information_schema.tables WHERE table_schema = 'public'"
            )
            names = {name for (name,) in tables}
            return {
                each.resource: [
                    Line(doc_of(json.loads(text)))
                    for (text,) in connection.execute(
                        f"SELECT flow_document::text FROM {each.resource} ORDER BY ctid"
                    )
                ]
                for each in bounds
                if each.resource in names
            }

    def _file(self, resource: str) -> Iterator[Line]:
        folder = self.folder / "files" / resource
        if self.connector == "plain-files":
            for path in sorted((folder / "keys").glob("[!.]*")):
                try:
                    yield Line(doc_of(json.loads(path.read_bytes())))
                except FileNotFoundError:
                    continue  # Deleted after the listing.
            return
        path = folder / ("table.jsonl" if self.connector == "staged-files" else "pushed.jsonl")
        if not path.exists():
            return
        for text in path.read_bytes().split(b"\n")[:-1]:
            line = json.loads(text)
            if "document" in line and line["document"] is not None:
                yield Line(doc_of(line["document"]), line["deleted"])


def doc_of(document: Mapping[str, Any]) -> Doc:
    return Doc(document["id"], document["seq"], document["amount"], document["oracle"])
