"""A source, its traffic and the pipeline file that materializes it in two endpoints."""

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.demo.comparison import Places
from penstock.servers.postgres import Database, PostgresServer
from tests.e2e.ledger import TABLES, LedgerTraffic
from tests.e2e.observer import Endpoint, PostgresEndpoint, SqliteEndpoint
from tests.ingest.proxy import Proxy
from tests.shared_postgres import QUICK

SETTINGS: Final = {**QUICK, "wal_sender_timeout": "5s"}


@dataclass(frozen=True)
class Stage:
    """Everything that a pipeline reads and writes."""

    folder: Path
    source: Database
    target: Database
    """The database of the Postgres endpoint, on a server of its own."""

    to_source: Proxy
    to_target: Proxy
    """The connections of the pipeline to both servers. Writers and observers do not use them."""

    places: Places
    endpoints: Sequence[Endpoint]
    traffic: LedgerTraffic

    @property
    def file(self) -> Path:
        return self.folder / "pipeline.yaml"


@contextmanager
def staged(folder: Path, rng: random.Random, rate: float = 20) -> Iterator[Stage]:
    """Create the source and the pipeline file. The caller starts the traffic."""
    with (
        PostgresServer(settings=SETTINGS) as source_server,
        PostgresServer(settings=SETTINGS) as target_server,
        Proxy(source_server.port) as to_source,
        Proxy(target_server.port) as to_target,
    ):
        source, target = (
            source_server.create_database("shop"),
            target_server.create_database("shop"),
        )
        places = Places(source.url(), f"file:{folder}/lake", folder / "shop.db")
        traffic = LedgerTraffic(places.postgres, rng, rate)
        traffic.create()
        endpoints = (SqliteEndpoint(places.sqlite), PostgresEndpoint(target.url()))
        stage = Stage(folder, source, target, to_source, to_target, places, endpoints, traffic)
        stage.file.write_text(json.dumps(_pipeline(stage), indent=2))
        try:
            yield stage
        finally:
            traffic.end()


def _pipeline(stage: Stage) -> dict[str, object]:
    """Return the pipeline file, as JSON, which is YAML."""
    places = stage.places
    bindings = [
        {"collection": places.collection(table), "resource": {"table": table}} for table in TABLES
    ]
    endpoints = {
        "sqlite": {"path": str(places.sqlite)},
        "postgres": {"url": _through(stage.to_target, stage.target)},
    }
    source = {
        "url": _through(stage.to_source, stage.source),
        "tables": [f"public.{table}" for table in TABLES],
    }
    return {
        "location": places.lake,
        "tick": "250ms",
        "retain": "1m",
        "sources": {places.source: {"postgres": source}},
        "materializations": {
            f"to_{connector}": {"connector": connector, "endpoint": config, "bindings": bindings}
            for connector, config in endpoints.items()
        },
    }


def _through(proxy: Proxy, database: Database) -> str:
    return database.url(host="tcp").replace(f":{database.server.port}/", f":{proxy.port}/")
