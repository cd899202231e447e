"""Status of a lake: its tasks, their state and their last report."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock import persist
from penstock.catalog.inspect import inspect_lake
from penstock.cli.status_table import render
from penstock.persist.state_store import FAILURE, StateStore
from penstock.web.page_state import state_of

SETTINGS = persist.Settings()


def store_status(url: str, name: str, **status: object) -> None:
    with persist.open(url, writer="test") as client:
        StateStore(client, name).put({"status": status})


def test_inspect_lists_materialization_without_state_as_materialization(tmp_path: Path) -> None:
    # This materialization has stored only its status.
    store_status(f"file:{tmp_path}/local", "local", phase="waiting", waits_for="shop.public.orders")
    store_status(f"file:{tmp_path}/shop", "shop", kind="postgres", phase="following")
    statuses = {
        location.url.rpartition("/")[2]: location.to_json()
        for location in inspect_lake(f"file:{tmp_path}", SETTINGS)
    }
    assert [location["materialization"] for location in statuses["local"]["materializations"]] == [
        "local"
    ]
    assert not statuses["local"]["sources"]
    assert [location["source"] for location in statuses["shop"]["sources"]] == ["shop"]


def test_inspect_reports_task_of_killed_writer_as_stopped(tmp_path: Path) -> None:
    url = f"file:{tmp_path}/shop"
    process = subprocess.run(
        [
            sys.executable,
            "-c",
            textwrap.dedent(f"""
                import os
                from penstock import persist
                from penstock.persist.state_store import StateStore
                client = persist.open({url!r}, writer="w")
                status = {{"kind": "postgres", "phase": "following"}}
                StateStore(client, "shop").put({{"status": status}})
                os.kill(os.getpid(), 9)
            """),
        ],
        check=False,
    )
    assert process.returncode == -9
    (status,) = inspect_lake(url, SETTINGS)
    assert status.to_json()["writer"]["lives"] is False
    assert status.to_json()["writer"]["pid"] != os.getpid()
    assert [task.status.phase for task in status.tasks] == ["stopped"]


def test_status_prints_names_with_markup_literally(tmp_path: Path) -> None:
    # Names must not be parsed as console markup.
    url = f"file:{tmp_path}/shop"
    store_status(url, "shop", kind="postgres", phase="[/x]", waits_for="[red]orders")
    with persist.open(url, writer="test") as client:
        client.create_or_load("[red]orders", schema=pa.schema([("id", pa.int64())]))
        text = render(inspect_lake(url, SETTINGS))
    assert "[red]orders" in text
    assert "[/x]" in text


def test_inspect_lists_source_that_never_connected_as_source(tmp_path: Path) -> None:
    url = f"file:{tmp_path}/clicks"
    with persist.open(url, writer="test") as client:
        progress = {"name": "clicks_progress", "kind": "kafka"}
        StateStore(client, "clicks").put({"progress": progress, "status": {"phase": "opening"}})
        (status,) = inspect_lake(url, SETTINGS)
    assert [(task.kind, task.name) for task in status.tasks] == [("source", "clicks")]
    assert "clicks" in render([status])


@pytest.mark.parametrize("kind", ["source", "materialization"])
def test_inspect_lists_task_that_failed_before_first_status_with_its_error(
    tmp_path: Path, kind: str
) -> None:
    url = f"file:{tmp_path}/shop"
    failure = {"kind": kind, "message": "slot is lost", "detail": "It was dropped.", "hint": "Run."}
    with persist.open(url, writer="test") as client:
        StateStore(client, "shop").put({FAILURE: {**failure, "at_ms": 1}})
        (status,) = inspect_lake(url, SETTINGS)
    [task] = status.to_json()[f"{kind}s"]
    assert (task["phase"], task["error"]) == (
        "stopped",
        {"message": "slot is lost", "detail": "It was dropped.", "hint": "Run."},
    )
    assert "slot is lost. It was dropped. Run" in render([status])


@pytest.mark.parametrize(
    ("status", "lag"),
    [
        ({"connected": True}, 7),
        ({"connected": False}, None),
        ({"connected": True, "phase": "stopped"}, None),
    ],
)
def test_inspect_of_disconnected_or_stopped_source_reports_null_lag(
    tmp_path: Path, status: dict[str, Any], lag: int | None
) -> None:
    url = f"file:{tmp_path}/shop"
    known = {"kind": "kafka", "phase": "following", "lag_records": 7, "lag_ms": 7, **status}
    with persist.open(url, writer="test") as client:
        remap = client.create_or_load("shop_remap", key=persist.TEXT, value=persist.UNIT)
        remap.seal(5).result()
        StateStore(client, "shop").put({"status": known})
        (location,) = inspect_lake(url, SETTINGS)
    [source] = location.to_json()["sources"]
    assert source["lag_records"] == lag
    assert (source["lag_ms"] is None) == (lag is None)
    assert ("unknown" in render([location])) == (lag is None)


def test_inspect_of_stopped_materialization_reports_null_lag(tmp_path: Path) -> None:
    url = f"file:{tmp_path}/local"
    with persist.open(url, writer="test") as client:
        status = {"phase": "following", "upper": 5, "lag_ms": 0}
        StateStore(client, "local").put({"status": status})
        (running,) = inspect_lake(url, SETTINGS)
    (stopped,) = inspect_lake(url, SETTINGS)
    lags = [location.tasks[0].status.lag_ms for location in (running, stopped)]
    assert lags == [0, None]
    assert "unknown" not in render([running])
    assert "unknown" in render([stopped])


def test_status_reports_errors_of_tables_without_collection(tmp_path: Path) -> None:
    url = f"file:{tmp_path}/shop"
    untracked = {
        "name": "public.odd",
        "collection": "shop.public.odd",
        "error": "table public.odd cannot be tracked",
        "error_detail": "It has a column mz_diff.",
        "error_hint": "Rename the column.",
    }
    sound = {"name": "public.a", "collection": "shop.public.a", "error": None}
    store_status(url, "shop", kind="postgres", phase="following", tables=[sound, untracked])
    text = render(inspect_lake(url, SETTINGS))
    assert "public.odd cannot be tracked. It has a column mz_diff. Rename the column" in text


def test_status_reports_start_time_of_counts(tmp_path: Path) -> None:
    url = f"file:{tmp_path}/shop"
    store_status(url, "shop", kind="postgres", phase="following", rows=12, counted_since_ms=1)
    (status,) = inspect_lake(url, SETTINGS)
    assert status.tasks[0].status.counted_since_ms == 1
    text = render([status])
    assert "rows since start" in text
    assert "1970-01-01T00:00:00.001Z" in text


@pytest.mark.parametrize(
    ("free_blocks", "free_files", "detail"),
    [(2, 9, "8192 bytes are free."), (9_999, 0, "can hold no more files."), (9_999, 9, None)],
)
def test_status_and_page_report_full_disk(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    free_blocks: int,
    free_files: int,
    detail: str | None,
) -> None:
    # With a full disk the owner cannot store its own error.
    url = f"file:{tmp_path}/shop"
    store_status(url, "shop", kind="postgres", phase="following")
    usage = (4_096, 4_096, 10_000, free_blocks, free_blocks, 10, free_files, free_files, 0, 255)
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(usage))
    (status,) = inspect_lake(url, SETTINGS)
    errors = state_of([status], {}, {}, 0).errors
    if detail is None:
        assert (status.disk_error, errors) == (None, [])
        return
    assert status.disk_error is not None
    assert status.disk_error.message == f'disk of location "{url}" is full'
    assert detail in status.disk_error.detail
    [error] = errors
    assert error["hint"] == "Make room on the disk."
    text = render([status])
    assert "is full" in text
    assert "Make room on the disk." in text
