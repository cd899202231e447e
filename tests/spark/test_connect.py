"""Spark Connect: reads and writes without a JVM in the client process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.spark

for needed in ("grpc", "grpc_status", "google.rpc", "zstandard"):
    pytest.importorskip(needed, reason="Spark Connect needs pyspark[connect]")


def test_lake_is_written_and_read_over_spark_connect(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-m", "tests.spark.connect_process", str(tmp_path)],
        cwd=Path(__file__).parents[2],
        env={
            **os.environ,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
        },
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3_000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["appended"] == found["changes"] == 100
    assert found["rows"] == ["Row(k='a', x=-0.0)", "Row(k='b', x=-0.0)", "Row(k='b', x=0.0)"]
    assert (found["kept"], found["kept later"]) == (1, 0)
    assert "Spark Connect session" in found["tasks"]
    assert found["lost"].startswith("Corruption(")
    assert "batch/" in found["lost"]
