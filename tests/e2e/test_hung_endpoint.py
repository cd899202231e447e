"""`penstock up` as a process, with an endpoint whose server hangs."""

from pathlib import Path
from typing import Any

from penstock.catalog.inspect import inspect_lake
from penstock.clock import SYSTEM_CLOCK
from penstock.persist import Settings
from penstock.servers.postgres import Database, PostgresServer
from tests.e2e.process import Up, until
from tests.shared_postgres import QUICK

ANSWER_TIMEOUT_S, STOP_TIMEOUT_S = 2, 9
ENVIRONMENT = {
    "PENSTOCK_ANSWER_TIMEOUT": str(ANSWER_TIMEOUT_S),
    "PENSTOCK_STOP_TIMEOUT": str(STOP_TIMEOUT_S),
}

HTTP = ("--http", "127.0.0.1:0")

MARGIN_S = 5
"""For the end of the interpreter on a busy machine, and for `until`."""

PIPELINE = """\
location: file:./lake
tick: 250ms
sources:
  shop:
    postgres: {{url: "{source}", tables: [public.item]}}
materializations:
  remote:
    connector: postgres
    endpoint: {{url: "{endpoint}"}}
    bindings: [{{collection: shop.public.item, resource: {{table: item}}}}]
"""


def test_up_with_hung_endpoint_reports_it_stops_in_time_and_resumes(
    database: Database, tmp_path: Path
) -> None:
    database.sql("CREATE TABLE item (id int PRIMARY KEY); INSERT INTO item VALUES (1)")

    def reported_error() -> str:
        """Return the error of the materialization in `penstock status`."""
        return "".join(
            str(materialization["error"])
            for location in inspect_lake(f"file:{tmp_path}/lake", Settings())
            for materialization in location.to_json()["materializations"]
        )

    with PostgresServer(settings=QUICK) as server:
        endpoint = server.create_database("endpoint")
        file = tmp_path / "pipeline.yaml"
        file.write_text(PIPELINE.format(source=database.url(), endpoint=endpoint.url()))

        def stored() -> list[tuple[Any, ...]]:
            if endpoint.sql("SELECT to_regclass('item')") == [(None,)]:
                return []
            return endpoint.sql("SELECT id FROM item ORDER BY id")

        with Up(tmp_path, "up", file.name, *HTTP, environment=ENVIRONMENT) as up:
            until(lambda: stored() == [(1,)], "the first row")
            with server.hung():
                database.sql("INSERT INTO item VALUES (2)")
                until(lambda: "does not answer" in reported_error(), "the report")
                began_ms = SYSTEM_CLOCK.boot_ms()
                assert up.terminate() == 0
                took_s = (SYSTEM_CLOCK.boot_ms() - began_ms) / 1_000
        assert took_s < STOP_TIMEOUT_S + MARGIN_S
        with Up(tmp_path, "up", file.name, "--once", *HTTP) as again:
            assert again.wait() == 0
        assert stored() == [(1,), (2,)]
