"""Encryption between the driver's host and executors on other hosts."""

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Final

from penstock.servers.postgres import Database

TEXT: Final = "a-text-that-no-other-packet-contains"
ROWS: Final = 200

PIPELINE: Final = """\
location: file:{folder}/lake
sources:
  shop:
    postgres: {{url: "{source}", tables: [public.item]}}
materializations:
  local:
    connector: sqlite
    endpoint: {{path: {folder}/item.db}}
    bindings: [{{collection: shop.public.item, resource: {{table: item}}}}]
"""


def test_documents_sent_to_the_connector_of_a_cluster_are_encrypted(
    database: Database, tmp_path: Path
) -> None:
    database.sql(
        "CREATE TABLE item (id int PRIMARY KEY, note text);"
        f"INSERT INTO item SELECT g, '{TEXT}' FROM generate_series(1, {ROWS}) g"
    )
    (tmp_path / "pipeline.yaml").write_text(PIPELINE.format(folder=tmp_path, source=database.url()))
    # Root has the right to create the namespace; other users need a user namespace for it.
    rights = () if os.geteuid() == 0 else ("--map-root-user",)
    script = (sys.executable, "-m", "tests.e2e.encrypted_cluster", str(tmp_path), TEXT)
    run = subprocess.run(
        ["unshare", "--net", *rights, *script], capture_output=True, text=True, check=False
    )
    output = run.stdout + run.stderr + (tmp_path / "up.log").read_text()[-4_000:]
    assert run.returncode == 0, output
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["status"] == 0, output
    with sqlite3.connect(tmp_path / "item.db") as file:
        assert file.execute("SELECT count(*) FROM item").fetchone() == (ROWS,)
    assert result["control"] > 0, "the record misses packets"
    assert result["documents"] == 0
