"""State of the status page, health checks and metrics."""

import re
import threading
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

import penstock.ingest
from penstock import persist
from penstock.catalog.inspect import LakeInspector, inspect_lake
from penstock.persist.state import END
from penstock.web import LakeView, serve
from penstock.web.metrics import METRICS
from tests.web.http_client import ask, query
from tests.web.shop import SECRET

ROOT = Path(__file__).parents[2]
LOST = persist.StoredError("SlotLost", "slot is gone", "It was dropped.", "Run penstock resync.")


def state_of(served, after=0):
    answer = ask(served.url, f"/api/state?after={after}")
    assert answer.status == 200
    return answer.json


def test_page_state_of_local_tasks_is_read_from_supervisor(shop, view, served):
    shop.tick(5)
    shop.commit(15)
    state = state_of(served)
    (source,), (sink,) = state["sources"], state["materializations"]
    assert (source["name"], source["state"], source["lag_ms"]) == ("shop", "running", 0)
    assert (sink["upper"], sink["lag_ms"], sink["transactions_total"]) == (shop.upper, 0, 1)
    orders = next(item for item in state["collections"] if item["name"] == "shop.public.orders")
    assert (orders["source"], orders["upper"], orders["updates"]) == ("shop", shop.upper, 5)
    assert state["errors"] == []


def test_page_state_of_remote_tasks_is_read_from_state_store(shop, clock):
    shop.tick(5)
    shop.store_statuses()
    clock.move_ms(4_000)
    elsewhere = LakeView(shop.location, shop.settings, clock=clock)
    state = elsewhere.state()
    (source,), (sink,) = state["sources"], state["materializations"]
    assert (source["state"], source["phase"]) == ("running", "following")
    assert source["lag_ms"] == 4_000
    assert (sink["state"], sink["upper"]) == ("stopped", shop.upper)
    shop.close()
    clock.move_ms(4_000)
    (source,) = elsewhere.state()["sources"]
    assert (source["state"], source["lag_ms"]) == ("stopped", None)
    elsewhere.close()


def test_materialization_lag_is_computed_from_uppers_instead_of_its_report(shop, view, clock):
    shop.tick()
    shop.commit(1)
    clock.move_ms(7_000)
    shop.tick()
    (sink,) = view.state()["materializations"]
    assert sink["lag_ms"] == 7_000


def test_page_state_of_missing_lake_is_empty_until_it_is_created(tmp_path, clock):
    settings = persist.Settings(clock=clock, patience_ms=0)
    view = LakeView(f"file:{tmp_path}/lake", settings, clock=clock)
    state = view.state()
    assert (state["sources"], state["collections"], state["materializations"]) == ([], [], [])
    with persist.open(f"file:{tmp_path}/lake/shop", writer="w") as client:
        client.create_or_load("rows", key=persist.TEXT, value=persist.UNIT)
    clock.move_ms(1_000)
    assert [item["name"] for item in view.state()["collections"]] == ["rows"]
    view.close()


def test_page_state_with_damaged_location_reports_error_and_lists_others(tmp_path, clock):
    for name in ("shop", "other"):
        with persist.open(f"file:{tmp_path}/{name}", writer="w") as client:
            client.create_or_load(f"{name}.rows", key=persist.TEXT, value=persist.UNIT)
    for entry in (tmp_path / "other/log").glob("**/*"):
        if entry.is_file():
            entry.write_bytes(b"no entry")
    view = LakeView(f"file:{tmp_path}", persist.Settings(patience_ms=0), clock=clock)
    state = view.state()
    view.close()
    assert [item["name"] for item in state["collections"]] == ["shop.rows"]
    (error,) = state["errors"]
    assert "other" in error["object"]
    assert error["hint"]


def test_concurrent_page_state_requests_share_one_lake_inspection(shop, view, clock, monkeypatch):
    looks = []
    kept = LakeInspector.inspect
    monkeypatch.setattr(
        LakeInspector, "inspect", lambda *given: looks.append(given) or kept(*given)
    )
    shop.tick()
    threads = [threading.Thread(target=view.state) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(looks) == 1
    clock.move_ms(1_000)
    time = shop.tick()
    assert {item["upper"] for item in view.state()["collections"]} == {time + 1}


def test_repeated_lake_inspection_equals_new_inspection(shop, clock):
    with LakeInspector(shop.settings) as looker:
        for _ in range(3):
            shop.tick()
            shop.store_statuses()
            urls = looker.locations(shop.location)
            assert [looker.inspect(url) for url in urls] == inspect_lake(
                shop.location, shop.settings
            )
            clock.move_ms(500)


def test_page_state_after_time_returns_only_newer_history(shop, view, served, clock):
    shop.commit(2)
    view.sample()
    for at in range(3):
        clock.move_ms(1_000)
        shop.tick(2)
        shop.commit(10 + at)
        view.sample()
    state = state_of(served)
    assert [row[1] for row in state["sources"][0]["history"]] == [0, 6, 12, 18]
    (sink,) = state["materializations"]
    assert [row[0] for row in sink["history"]] == [clock.now_ms() - 1_000 * n for n in (3, 2, 1, 0)]
    assert [item["documents"] for item in sink["transactions"]] == [10, 11, 12]
    assert sink["transactions"][-1]["stored_ms"] == 40
    later = state_of(served, after=clock.now_ms() - 1_000)
    assert len(later["sources"][0]["history"]) == 1


def test_page_history_is_bounded_to_600_samples_and_100_transactions(shop, view, clock):
    for _ in range(700):
        clock.move_ms(1_000)
        shop.commit(1)
        view.sample()
    state = view.state()
    assert len(state["sources"][0]["history"]) == 600
    assert len(state["materializations"][0]["transactions"]) == 100


def test_page_state_reports_errors_of_collections_and_tasks_with_hint(shop, view, served):
    shop.tick()
    orders = shop.client.collection("shop.public.orders")
    failing = persist.AppendTo(orders, [], orders.upper, orders.upper + 1)
    shop.client.append_all([failing], [persist.Fail(orders, orders.upper, LOST)])
    shop.tasks["warehouse"] |= {
        "state": "stopped",
        "error": {"message": "disk is full", "detail": "", "hint": "Make room."},
    }
    state = {item["object"]: item for item in state_of(served)["errors"]}
    assert state['collection "shop.public.orders"']["hint"] == "Run penstock resync."
    assert state['materialization "warehouse"']["message"] == "disk is full"


def test_page_state_reports_error_of_table_without_collection_with_hint(shop, served):
    shop.tick()
    shop.tasks["shop"]["tables"] = [
        {
            **shop.source()["tables"][0],
            "collection": "shop.public.odd",
            "error": "table public.odd cannot be tracked",
            "error_detail": "It has a column mz_diff.",
            "error_hint": "Rename the column.",
        }
    ]
    (error,) = state_of(served)["errors"]
    assert (error["detail"], error["hint"]) == ("It has a column mz_diff.", "Rename the column.")


def test_healthz_with_task_stopped_by_error_returns_503(shop, served):
    assert ask(served.url, "/healthz").json == {"healthy": True, "dead": []}
    shop.tasks["shop"] |= {"state": "restarting", "error": {"message": "no route"}}
    assert ask(served.url, "/healthz").status == 200
    shop.tasks["shop"]["state"] = "stopped"
    answer = ask(served.url, "/healthz")
    assert (answer.status, answer.json["dead"]) == (503, ["shop"])


def test_readyz_returns_200_after_snapshots_and_first_transaction(shop, served, clock):
    waits = ask(served.url, "/readyz")
    assert waits.status == 503
    assert waits.json["waits_for"] == [
        'source "shop" to begin; it is following',
        'materialization "warehouse" to follow; it is following',
    ]
    shop.tick()
    shop.commit(1)
    assert ask(served.url, "/readyz").json == {"ready": True, "waits_for": [], "degraded": []}
    shop.tasks["shop"]["tables"] = [{**shop.source()["tables"][0], "phase": "loading"}]
    assert ask(served.url, "/readyz").json["waits_for"] == [
        'source "shop" to copy public.customers'
    ]
    shop.tasks["shop"]["state"] = "paused"
    assert ask(served.url, "/readyz").status == 200
    shop.tasks["warehouse"]["state"] = "restarting"
    assert ask(served.url, "/readyz").status == 503


def test_readyz_with_stopped_task_reports_its_error(shop, served):
    shop.tick()
    shop.commit(1)
    error = {"message": "slot is lost", "detail": "", "hint": "Run penstock resync."}
    shop.tasks["shop"] |= {"state": "stopped", "error": error}
    answer = ask(served.url, "/readyz")
    assert answer.status == 503
    assert answer.json["waits_for"] == ['source "shop" to run; it is stopped: slot is lost']
    [source] = state_of(served)["sources"]
    assert source["error"] == error


def test_disconnected_source_has_no_lag_and_is_not_ready(shop, served):
    shop.tick()
    shop.commit(1)
    shop.tasks["shop"] |= {"connected": False, "disconnected_reason": "connection refused"}
    [source] = state_of(served)["sources"]
    assert (source["lag_ms"], source["lag_bytes"]) == (None, None)
    assert ask(served.url, "/readyz").json["waits_for"] == [
        'source "shop" to connect: connection refused'
    ]


@pytest.mark.parametrize("state", ["starting", "restarting", "paused"])
def test_source_that_is_not_running_has_no_lag(shop, served, state):
    shop.tick()
    shop.tasks["shop"]["state"] = state
    [source] = ask(served.url, "/api/state").json["sources"]
    assert (source["lag_ms"], source["lag_bytes"]) == (None, None)


def test_materialization_without_transaction_has_no_lag(shop, served):
    shop.tick()
    [sink] = ask(served.url, "/api/state").json["materializations"]
    assert sink["lag_ms"] is None


def test_degraded_materialization_is_ready_and_reports_collection_time_and_hint(shop, served):
    shop.tick()
    shop.commit(1)
    frozen = {
        "collection": "shop.public.orders",
        "time": 25,
        "message": "slot is gone",
        "detail": "It was dropped.",
        "hint": "Copy it again.",
    }
    shop.tasks["warehouse"] |= {
        "phase": "degraded",
        "left_behind": ["shop.public.orders"],
        "degraded": [frozen],
    }
    answer = ask(served.url, "/readyz")
    assert answer.status == 200
    assert answer.json["degraded"] == [{"materialization": "warehouse", **frozen}]
    (error,) = ask(served.url, "/api/state").json["errors"]
    assert error["object"] == 'materialization "warehouse"'
    assert "frozen at 25: slot is gone" in error["message"]
    frozen["time"] = 1_794_830_400_005
    (error,) = ask(served.url, "/api/state").json["errors"]
    assert "frozen at 1794830400005 (2026-11-16T12:00:00.005Z): slot" in error["message"]
    assert error["hint"] == "Copy it again."
    metrics = ask(served.url, "/metrics").body.decode()
    assert 'penstock_materialization_degraded{materialization="warehouse"} 1.0' in metrics


def test_metrics_of_postgres_lake_export_every_metric_except_kafka_ones(shop, served, clock):
    shop.tick(5)
    shop.commit(15)
    clock.move_ms(1_500)
    with persist.open(f"{shop.location}/own", writer="w", settings=shop.settings) as client:
        closed = client.create_or_load('a "closed" \\one', key=persist.TEXT, value=persist.UNIT)
        closed.seal(END).result()
    text = ask(served.url, "/metrics").body.decode()
    found = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found["penstock_source_lag_seconds", "shop"] == 1.5
    assert found["penstock_source_rows_total", "shop"] == 15
    assert found["penstock_collection_upper_seconds", "shop", "shop.public.orders"] == (
        shop.upper / 1_000
    )
    assert found["penstock_collection_upper_seconds", "", 'a "closed" \\one'] == float("inf")
    assert found["penstock_materialization_transactions_total", "warehouse"] == 1
    assert found["penstock_task_restarts_total", "shop", "source"] == 0
    of_topics = {
        "penstock_source_lag_records",
        "penstock_source_bad_records_total",
        "penstock_source_waiting_events",
    }
    assert {name for name, *_ in found} == {metric.name for metric in METRICS} - of_topics


def test_metrics_of_kafka_source_count_records(shop, served, monkeypatch):
    state = {**shop.source(), "kind": "kafka", "lag_records": 7, "bad_records": 2}
    state["waiting_events"] = 3
    monkeypatch.setattr(shop, "source", lambda: state)
    shop.tick(5)
    text = ask(served.url, "/metrics").body.decode()
    assert 'penstock_source_lag_records{source="shop"} 7.0' in text
    assert 'penstock_source_bad_records_total{source="shop"} 2.0' in text
    assert 'penstock_source_waiting_events{source="shop"} 3.0' in text


def test_example_alerts_use_only_existing_metrics():
    rules = yaml.safe_load((ROOT / "examples/alerts.yaml").read_text())
    alerts = [rule for group in rules["groups"] for rule in group["rules"]]
    known = {metric.name for metric in METRICS}
    for rule in alerts:
        names = set(re.findall(r"penstock_\w+", rule["expr"]))
        assert names, rule["alert"]
        assert names <= known, rule["alert"]
        assert rule["annotations"]["summary"]
    assert len(alerts) == len({rule["alert"] for rule in alerts})


def test_password_of_pipeline_file_is_in_no_response(tmp_path, clock):
    file = tmp_path / "pipeline.yaml"
    file.write_text(
        f"location: file:{tmp_path}/lake\nsources:\n  shop:\n    postgres:\n"
        f"      url: postgresql://reader:{SECRET}@127.0.0.1:1/shop\n      tables: [public.orders]\n"
    )
    stop, begun, runs = threading.Event(), threading.Event(), []

    def record(running):
        runs.append(running)
        begun.set()

    thread = threading.Thread(
        target=penstock.ingest.run, args=(str(file),), kwargs={"stop": stop, "on_start": record}
    )
    thread.start()
    try:
        assert begun.wait(60)
        view = LakeView(
            f"file:{tmp_path}/lake", persist.Settings(patience_ms=0), runs[0].status, clock
        )
        with serve(view, ":0", token=None) as served:
            while not (sources := state_of(served)["sources"]) or not sources[0].get("waits_for"):
                clock.move_ms(1_000)
            assert "127.0.0.1" in sources[0]["waits_for"]
            for path in ("/api/state", "/metrics", "/readyz", "/healthz"):
                assert SECRET not in ask(served.url, path).body.decode(), path
            hidden = ask(served.url, query("/api/rows", collection="shop/state"))
            assert hidden.status == 404
        view.close()
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("after", ["x", "-1", "1e3", "9" * 30])
def test_page_state_with_invalid_after_returns_400(served, after):
    answer = ask(served.url, query("/api/state", after=after))
    assert (answer.status, answer.json["error"]["message"]) == (400, "after is not a number")
