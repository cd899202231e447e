"""What others see of a lake: who runs there, what it is, and what it said last."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pyarrow as pa

from penstock import persist
from penstock.catalog.looking import look
from penstock.cli.showing import shown
from penstock.persist.memory import Memory

SETTINGS = persist.Settings()


def noted(url: str, name: str, **status: object) -> None:
    with persist.open(url, writer="test") as client:
        Memory(client, name).write_down({"status": status})


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
                from penstock.persist.memory import Memory
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
