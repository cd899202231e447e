"""`penstock materialize` as a process: on Spark, with a connector that it starts."""

import json
import random
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tests.materialize.lake import Table

FILE = """\
location: file:./lake
materializations:
  local:
    connector: {connector}
    endpoint: {{path: ./shop.db}}
    bindings:
      - collection: shop.t
        resource: {{table: orders}}
"""


def penstock(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture
def table(tmp_path: Path) -> Table:
    (tmp_path / "pipeline.yaml").write_text(FILE.format(connector="sqlite"))
    table = Table(f"file:{tmp_path / 'lake' / 'shop'}", random.Random(1))
    table.change(50)
    table.client.close()
    return table


def test_materialize_once_writes_endpoint_up_to_upper_of_collections(
    tmp_path: Path, table: Table
) -> None:
    ended = penstock(tmp_path, "materialize", "pipeline.yaml", "--once", "--json")
    assert ended.returncode == 0, ended.stderr
    rows = sqlite3.connect(tmp_path / "shop.db").execute("SELECT flow_document FROM orders")
    found = sorted((json.loads(row[0]) for row in rows), key=lambda row: row["id"])
    assert found == table.contents()
    told = json.loads(penstock(tmp_path, "status", "file:./lake", "--json").stdout)
    (materialization,) = [
        each for where in told["storage_locations"] for each in where["materializations"]
    ]
    assert materialization["materialization"] == "local"
    assert materialization["upper"] == 50
    assert materialization["documents"] == len(found)
    assert materialization["bindings"][0]["resource"] == "orders"
    shown = penstock(tmp_path, "status", "file:./lake").stdout
    assert "orders" in shown
    assert "materialize-local" in shown, "its hold is listed"


def test_materialize_with_unknown_connector_fails_and_lists_connectors(
    tmp_path: Path, table: Table
) -> None:
    (tmp_path / "pipeline.yaml").write_text(FILE.format(connector="sqlte"))
    ended = penstock(tmp_path, "materialize", "pipeline.yaml", "--once")
    assert ended.returncode == 1
    assert 'materialization "local" is refused: connector "sqlte" does not exist' in ended.stderr
    assert "sqlite, staged-files" in ended.stderr
