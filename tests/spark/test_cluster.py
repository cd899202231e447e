"""Executors die, tasks fail and run twice: every row is there once, and no file too many.

What runs there is in `on_cluster.py`.
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
def test_rows_that_tasks_in_trouble_write_are_there_once(cluster, url, tmp_path, trouble):
    found = cluster.run("troubled", url=url, folder=f"{tmp_path}/marks", trouble=trouble)
    assert found["rows"] == ALL
    assert found["litter"] == []
    assert found["damage"] == []
    assert len(found["attempts"]) > PARTS, "nothing was tried twice"
    assert found["killed"] == (trouble == "kill")
    assert found["sweeps"] > 0


@pytest.mark.parametrize("bug", ["sweep_by_age"])
def test_a_sweep_that_takes_what_is_about_to_be_linked_is_found(cluster, url, tmp_path, bug):
    found = cluster.run("troubled", url=url, folder=f"{tmp_path}/marks", trouble="lost", bug=bug)
    assert found["rows"] != ALL
    assert found["damage"] != []


def test_a_folder_that_executors_see_is_read_by_spark_itself(cluster, url, tmp_path):
    with persist.open(url, writer="w", settings=by_hand()) as client:
        client.create_or_load("rows", schema=pa.schema([("n", pa.int64())]))
    verdict, root = cluster.run("reached", url=url)
    assert (verdict, root) == ("reached", url)
    assert list(tmp_path.rglob("tmp-reach-*")) == []


def test_a_folder_that_they_do_not_see_is_refused(cluster, url, tmp_path):
    with persist.open(url, writer="w", settings=by_hand()) as client:
        client.create_or_load("rows", schema=pa.schema([("n", pa.int64())]))
    verdict, told = cluster.run("reached", url=url, elsewhere=f"{tmp_path}/other")
    assert verdict == "refused"
    assert "not the same folder on all of Spark's executors" in told
    assert "not seen on" in told
    assert list(tmp_path.rglob("tmp-reach-*")) == []


def test_damage_that_an_executor_meets_is_our_error(cluster, url):
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


def test_a_location_on_s3_is_written_and_read_by_tasks(cluster, object_url):
    """With nothing but what pip installs: Spark itself has no S3 file system then."""
    found = cluster.run("round_trip", url=object_url)
    assert found["first"] == 100
    assert found["all"] == list(range(101))
    assert found["changed"] == 1
    (reader,) = found["readers"]
    assert "'reader': 'tasks'" in reader
    assert "Spark has no S3 file system" in reader
