"""Status of sources that have no connection: `penstock status`, the status page and `/readyz`."""

from pathlib import Path
from typing import Any

from penstock.servers.postgres import PostgresServer
from tests.e2e.process import Up, lines, until, well
from tests.fix_kafka import make_broker
from tests.shared_postgres import QUICK

LAKE = "file:./lake"
HTTP = ("--http", "127.0.0.1:0")

SHOP = """\
location: file:./lake
tick: 250ms
sources:
  shop:
    postgres: {{url: "{url}", tables: [public.item]}}
"""

CLICKS = """\
location: file:./lake
tick: 250ms
sources:
  clicks:
    kafka: {{brokers: "{brokers}", topic: clicks, format: text}}
"""


def status(folder: Path) -> dict[str, Any]:
    """Return sources and materializations in `penstock status --json`, by name."""
    (report,) = lines(well(folder, "status", LAKE, "--json"))
    return {
        kind: {
            task[kind]: task for place in report["storage_locations"] for task in place[f"{kind}s"]
        }
        for kind in ("source", "materialization")
    }


def waits_for(up: Up) -> list[str]:
    """Return what `/readyz` waits for; empty if it reports ready."""
    answer = up.get("/readyz")
    assert (answer.status == 200) is answer.json["ready"]
    return [] if answer.json["ready"] else answer.json["waits_for"]


def state(up: Up, source: str) -> str | None:
    """Return the state of a source on the status page; None if it is not listed."""
    found = {each["name"]: each["state"] for each in up.state()["sources"]}
    return found.get(source)


def assert_lag_is_unknown(folder: Path, up: Up, name: str, unit: str) -> None:
    (on_page,) = [source for source in up.state()["sources"] if source["name"] == name]
    for source in (status(folder)["source"][name], on_page):
        assert source["lag_ms"] is None
        assert source.get(unit) is None
    shown = well(folder, "status", LAKE)
    assert "unknown" in shown
    assert "0 bytes" not in shown
    assert "0 records" not in shown


def test_source_with_hung_server_has_unknown_lag_and_is_not_ready(tmp_path: Path) -> None:
    with PostgresServer(settings={**QUICK, "wal_sender_timeout": "0"}) as server:
        database = server.create_database("shop")
        database.sql("CREATE TABLE item (id int PRIMARY KEY); INSERT INTO item VALUES (1)")
        file = tmp_path / "pipeline.yaml"
        file.write_text(SHOP.format(url=database.url(connect_timeout="600")))
        answers_soon = {"PENSTOCK_ANSWER_TIMEOUT": "1"}
        with Up(tmp_path, "ingest", file.name, *HTTP, environment=answers_soon) as up:
            up.await_ready("shop")
            assert status(tmp_path)["source"]["shop"]["lag_bytes"] is not None
            with server.hung():
                (reason,) = until(lambda: waits_for(up), "/readyz to be false")
                assert reason.startswith('source "shop" to connect: ')
                assert_lag_is_unknown(tmp_path, up, "shop", "lag_bytes")
            until(lambda: not waits_for(up), "/readyz to be true")
            assert up.terminate() == 0
        # The status that the process stored at its end does not apply to the next one.
        with server.hung():
            never = {"PENSTOCK_ANSWER_TIMEOUT": "600"}
            with Up(tmp_path, "ingest", file.name, *HTTP, environment=never) as up:
                until(lambda: state(up, "shop") == "running", "the source to run")
                (reason,) = waits_for(up)
                assert reason == 'source "shop" to connect: the connection is being opened'
                assert_lag_is_unknown(tmp_path, up, "shop", "lag_bytes")
                assert up.terminate() == 0


def test_starting_kafka_source_is_listed_as_source_with_unknown_lag(tmp_path: Path) -> None:
    with make_broker() as broker:
        broker.create_topic("clicks", partitions=1)
        file = tmp_path / "pipeline.yaml"
        file.write_text(CLICKS.format(brokers=broker.bootstrap))
        with Up(tmp_path, "ingest", file.name, *HTTP) as up:
            up.await_ready("clicks")
            assert up.terminate() == 0
        with broker.hung(), Up(tmp_path, "ingest", file.name, *HTTP) as up:
            until(lambda: state(up, "clicks") is not None, "the source on the status page")
            assert waits_for(up)
            assert up.state()["materializations"] == []
            reported = status(tmp_path)
            assert [*reported["source"]] == ["clicks"]
            assert reported["materialization"] == {}
            assert_lag_is_unknown(tmp_path, up, "clicks", "lag_records")
