"""Appends and reads on a cluster whose executors die and whose tasks fail or run twice.

Every row is stored once, and no orphan file remains. `cluster_process.py` is the Spark side.
"""

from pathlib import Path

import pyarrow as pa
import pytest
from tests.persist.shop import by_hand

from penstock import persist
from penstock.persist.state import files_of

PARTS = 3
ALL = list(range(1_000))


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file:{tmp_path / 'data'}"


@pytest.mark.parametrize(
    "trouble",
    [
        pytest.param("fail", marks=pytest.mark.long),
        pytest.param("lost", marks=pytest.mark.long),
        "kill",
    ],
)
def test_rows_written_by_failing_tasks_are_stored_once(cluster, url, tmp_path, trouble):
    found = cluster.run("troubled", url=url, folder=f"{tmp_path}/marks", trouble=trouble)
    assert found["rows"] == ALL
    assert found["litter"] == []
    assert found["damage"] == []
    assert len(found["attempts"]) > PARTS, "nothing was tried twice"
    assert found["killed"] == (trouble == "kill")
    assert found["sweeps"] > 0


@pytest.mark.parametrize("bug", ["sweep_by_age"])
def test_planted_sweep_by_age_loses_rows_and_is_detected(cluster, url, tmp_path, bug):
    found = cluster.run("troubled", url=url, folder=f"{tmp_path}/marks", trouble="lost", bug=bug)
    assert found["rows"] != ALL
    assert found["damage"] != []


def test_reach_of_folder_shared_with_executors_returns_its_url(cluster, url, tmp_path):
    with persist.open(url, writer="w", settings=by_hand()) as client:
        client.create_or_load("rows", schema=pa.schema([("n", pa.int64())]))
    verdict, root = cluster.run("reached", url=url)
    assert (verdict, root) == ("reached", url)
    assert list(tmp_path.rglob("tmp-reach-*")) == []


def test_reach_of_folder_not_shared_with_executors_is_rejected(cluster, url, tmp_path):
    with persist.open(url, writer="w", settings=by_hand()) as client:
        client.create_or_load("rows", schema=pa.schema([("n", pa.int64())]))
    verdict, told = cluster.run("reached", url=url, redirect=f"{tmp_path}/other")
    assert verdict == "refused"
    assert "not the same folder on all of Spark's executors" in told
    assert "missing on" in told
    assert list(tmp_path.rglob("tmp-reach-*")) == []


def test_damaged_file_read_by_executor_raises_corruption(cluster, url):
    folder = Path(url.removeprefix("file:"))
    with persist.open(url, writer="w", settings=by_hand(inline_bytes=0)) as client:
        table = client.create_or_load("rows", schema=pa.schema([("n", pa.int64())]))
        table.write([({"n": n}, 0, 1) for n in range(1_000)]).result()
        table.seal(1).result()
        (key,) = (key for batch in table.state.batches for key in files_of(batch))
    data = bytearray((folder / key).read_bytes())
    data[len(data) // 4] ^= 0xFF
    (folder / key).write_bytes(data)
    told = cluster.run("damaged", url=url, name="rows")
    assert told.startswith("Corruption(")
    assert key in told


def test_s3_location_is_written_and_read_by_tasks(cluster, object_url):
    """The Spark distribution of pip has no S3 file system, so tasks read for Spark."""
    found = cluster.run("round_trip", url=object_url)
    assert found["first"] == 100
    assert found["all"] == list(range(101))
    assert found["changed"] == 1
    (reader,) = found["readers"]
    assert "'reader': 'tasks'" in reader
    assert "Spark has no S3 file system" in reader
