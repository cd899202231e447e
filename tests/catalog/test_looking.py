"""What others see of a lake: who runs there, what it is, and what it said last."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock import persist
from penstock.catalog.looking import look
from penstock.cli.showing import shown
from penstock.persist.state_store import FAILURE, StateStore
from penstock.web.state import state_of

SETTINGS = persist.Settings()


def noted(url: str, name: str, **status: object) -> None:
    with persist.open(url, writer="test") as client:
        StateStore(client, name).put({"status": status})


def test_what_waits_for_its_collections_is_a_materialization(tmp_path: Path) -> None:
    """It has written nothing yet by which it could be told, but how it is."""
    noted(f"file:{tmp_path}/local", "local", phase="waiting", waits_for="shop.public.orders")
    noted(f"file:{tmp_path}/shop", "shop", kind="postgres", phase="following")
    found = {
        each["location"].rpartition("/")[2]: each for each in look(f"file:{tmp_path}", SETTINGS)
    }
    assert [each["materialization"] for each in found["local"]["materializations"]] == ["local"]
    assert not found["local"]["sources"]
    assert [each["source"] for each in found["shop"]["sources"]] == ["shop"]


def test_who_was_killed_does_not_run(tmp_path: Path) -> None:
    url = f"file:{tmp_path}/shop"
    process = subprocess.run(
        [
            sys.executable,
            "-c",
            textwrap.dedent(f"""
                import os
                from penstock import persist
                from penstock.persist.state_store import Memory
                client = persist.open({url!r}, writer="w")
                status = {{"kind": "postgres", "phase": "following"}}
                Memory(client, "shop").write_down({{"status": status}})
                os.kill(os.getpid(), 9)
            """),
        ],
        check=False,
    )
    assert process.returncode == -9
    (found,) = look(url, SETTINGS)
    assert found["writer"]["lives"] is False
    assert found["writer"]["pid"] != os.getpid()
    assert [each["phase"] for each in found["sources"]] == ["stopped"]


def test_names_are_shown_as_they_are(tmp_path: Path) -> None:
    """And not taken for how to draw them, nor do they end the drawing."""
    url = f"file:{tmp_path}/shop"
    noted(url, "shop", kind="postgres", phase="[/x]", waits_for="[red]orders")
    with persist.open(url, writer="test") as client:
        client.create_or_load("[red]orders", schema=pa.schema([("id", pa.int64())]))
        said = shown(look(url, SETTINGS))
    assert "[red]orders" in said
    assert "[/x]" in said


def test_source_that_never_connected_is_listed_as_a_source(tmp_path: Path) -> None:
    url = f"file:{tmp_path}/clicks"
    with persist.open(url, writer="test") as client:
        progress = {"name": "clicks_progress", "kind": "kafka"}
        StateStore(client, "clicks").put({"progress": progress, "status": {"phase": "opening"}})
        (found,) = look(url, SETTINGS)
    assert [each["source"] for each in found["sources"]] == ["clicks"]
    assert found["materializations"] == []
    assert "clicks" in shown([found])


@pytest.mark.parametrize("kind", ["source", "materialization"])
def test_task_that_failed_before_its_first_status_is_listed_with_the_error(
    tmp_path: Path, kind: str
) -> None:
    url = f"file:{tmp_path}/shop"
    failure = {"kind": kind, "message": "slot is lost", "detail": "It was dropped.", "hint": "Run."}
    with persist.open(url, writer="test") as client:
        StateStore(client, "shop").put({FAILURE: {**failure, "at_ms": 1}})
        (found,) = look(url, SETTINGS)
    [task] = found[f"{kind}s"]
    assert (task["phase"], task["error"]) == (
        "stopped",
        {"message": "slot is lost", "detail": "It was dropped.", "hint": "Run."},
    )
    assert "slot is lost. It was dropped. Run" in shown([found])


@pytest.mark.parametrize(
    ("status", "lag"),
    [
        ({"connected": True}, 7),
        ({"connected": False}, None),
        ({"connected": True, "phase": "stopped"}, None),
    ],
)
def test_lag_of_a_source_is_null_while_it_is_disconnected_or_stopped(
    tmp_path: Path, status: dict[str, Any], lag: int | None
) -> None:
    url = f"file:{tmp_path}/shop"
    known = {"kind": "kafka", "phase": "following", "lag_records": 7, "lag_ms": 7, **status}
    with persist.open(url, writer="test") as client:
        remap = client.create_or_load("shop_remap", key=persist.TEXT, value=persist.UNIT)
        remap.seal(5).result()
        StateStore(client, "shop").put({"status": known})
        (found,) = look(url, SETTINGS)
    [source] = found["sources"]
    assert source["lag_records"] == lag
    assert (source["lag_ms"] is None) == (lag is None)
    assert ("unknown" in shown([found])) == (lag is None)


def test_lag_of_a_materialization_is_null_while_it_is_stopped(tmp_path: Path) -> None:
    url = f"file:{tmp_path}/local"
    with persist.open(url, writer="test") as client:
        status = {"phase": "following", "upper": 5, "lag_ms": 0}
        StateStore(client, "local").put({"status": status})
        (running,) = look(url, SETTINGS)
    (stopped,) = look(url, SETTINGS)
    lags = [found["materializations"][0]["lag_ms"] for found in (running, stopped)]
    assert lags == [0, None]
    assert "unknown" not in shown([running])
    assert "unknown" in shown([stopped])


def test_status_shows_errors_of_tables_without_a_collection(tmp_path: Path) -> None:
    url = f"file:{tmp_path}/shop"
    untracked = {
        "name": "public.odd",
        "collection": "shop.public.odd",
        "error": "table public.odd cannot be tracked",
        "error_detail": "It has a column mz_diff.",
        "error_hint": "Rename the column.",
    }
    sound = {"name": "public.a", "collection": "shop.public.a", "error": None}
    noted(url, "shop", kind="postgres", phase="following", tables=[sound, untracked])
    text = shown(look(url, SETTINGS))
    assert "public.odd cannot be tracked. It has a column mz_diff. Rename the column" in text


def test_status_shows_the_time_at_which_its_counts_began(tmp_path: Path) -> None:
    url = f"file:{tmp_path}/shop"
    noted(url, "shop", kind="postgres", phase="following", rows=12, counted_since_ms=1)
    (found,) = look(url, SETTINGS)
    assert found["sources"][0]["counted_since_ms"] == 1
    text = shown([found])
    assert "rows since start" in text
    assert "1970-01-01T00:00:00.001Z" in text


@pytest.mark.parametrize(
    ("free_blocks", "free_files", "detail"),
    [(2, 9, "8192 bytes are free."), (9_999, 0, "can hold no more files."), (9_999, 9, None)],
)
def test_full_disk_is_reported_by_status_and_page(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    free_blocks: int,
    free_files: int,
    detail: str | None,
) -> None:
    """The owner cannot store its own error."""
    url = f"file:{tmp_path}/shop"
    noted(url, "shop", kind="postgres", phase="following")
    usage = (4_096, 4_096, 10_000, free_blocks, free_blocks, 10, free_files, free_files, 0, 255)
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(usage))
    (found,) = look(url, SETTINGS)
    errors = state_of([found], {}, {}, 0)["errors"]
    if detail is None:
        assert (found["disk_error"], errors) == (None, [])
        return
    assert found["disk_error"]["message"] == f'disk of location "{url}" is full'
    assert detail in found["disk_error"]["detail"]
    [error] = errors
    assert error["hint"] == "Make room on the disk."
    text = shown([found])
    assert "is full" in text
    assert "Make room on the disk." in text
