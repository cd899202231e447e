"""`penstock compact` starts Spark only for a merge that exceeds its memory limit."""

import subprocess
import sys
from pathlib import Path

import pytest

import penstock.cli.compact as command
import penstock.persist as persist
from penstock.catalog.objects import WRITER, RequestedObject, known_objects, update_catalog
from penstock.errors import Fenced, UsageError
from tests.cli.test_commands import penstock
from tests.persist.shop import SCHEMA, by_hand


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Return the URL of a collection with two batches that can be merged."""
    made = f"file:{tmp_path / 'data'}"
    with persist.open(made, writer="w", settings=by_hand()) as client:
        rows = client.create_or_load("rows", schema=SCHEMA, key_columns=("k",))
        for upper in (1, 2):
            updates = [({"k": f"{upper} {i}", "n": i}, upper - 1, 1) for i in range(1_000)]
            rows.compare_and_append(updates, upper - 1, upper)
    return made


def batches(url: str) -> int:
    with persist.open(url, hold=False) as client:
        return len(client.collection("rows").state.batches)


def test_compact_of_small_merge_with_master_starts_no_spark(url):
    # No master listens on this port: a start of Spark would fail.
    output = penstock("compact", url, "--master", "spark://127.0.0.1:1")
    assert (output.returncode, output.stderr) == (0, "")
    assert "2 batches of 2000 updates became 1 of 2000" in output.stdout
    assert batches(url) == 1


def test_compact_of_lake_with_open_catalog_writer_fences_that_writer(tmp_path, capsys):
    lake = f"file:{tmp_path / 'lake'}"
    update_catalog(lake, lambda _: [RequestedObject("shop", "source", {"postgres": {}})])
    with pytest.raises(Fenced), persist.open(f"{lake}/catalog", writer=WRITER):
        command.compact(lake, wait=1)
    assert "lake/catalog" in capsys.readouterr().out
    assert len(known_objects(lake)) == 1


def test_import_of_cli_main_does_not_import_pyspark():
    script = "import sys, penstock.cli.main; sys.exit('pyspark' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0


def test_compact_of_merge_above_limit_runs_on_spark_and_reports_it(spark, url, monkeypatch, capsys):
    monkeypatch.setattr(command, "SETTINGS", by_hand(merge_bytes=1_000, part_bytes=10_000))
    command.compact(url, master=spark.sparkContext.master)
    output = capsys.readouterr()
    assert 'merging on Spark: collection "rows" has ' in output.err
    assert "the limit of this process is 1000 bytes" in output.err
    assert "2 batches of 2000 updates became 1 of 2000" in output.out
    assert batches(url) == 1
    assert penstock("verify", url).returncode == 0
    # A collection of one batch needs no merge.
    command.compact(url, master="spark://127.0.0.1:1")
    assert capsys.readouterr().err == ""


def test_compact_with_other_master_than_running_session_raises_usage_error(
    spark, url, monkeypatch, capsys
):
    monkeypatch.setattr(command, "SETTINGS", by_hand(merge_bytes=1_000))
    with pytest.raises(UsageError, match="already runs with master"):
        command.compact(url, master="local[17]")
    assert "merging on Spark" in capsys.readouterr().err
    assert batches(url) == 2
