"""Sources of a pipeline file as tasks: their names, and how they are dropped."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock import persist
from penstock.errors import UsageError
from penstock.failpoints import Action, Failpoint, armed
from penstock.ingest import tick_transaction
from penstock.ingest.progress_views import progress_views_in
from penstock.ingest.tasks import drop, tasks_of
from penstock.pipeline import load
from penstock.testing.sources import ScriptedSource
from tests.ingest.test_loop import turn

__all__ = ["turn"]

FILE = """
location: file:{folder}/lake
writer: test
sources:
  clicks:
    kafka: {{brokers: localhost:1, topic: clicks, format: json}}
  shop:
    postgres: {{url: postgresql://localhost:1/shop}}
"""


@pytest.fixture
def pipeline(tmp_path: Path) -> Any:
    file = tmp_path / "pipeline.yaml"
    file.write_text(FILE.format(folder=tmp_path))
    return load(file)


def progress_names(pipeline: Any, **options: Any) -> list[str]:
    """Build each task in its storage location, and return the names of their progress."""
    names = []
    for task in tasks_of(pipeline, jobs=None, **options):
        with persist.open(task.url, writer="test") as client:
            task.build(client)
            names.append(progress_views_in(client)[0].name)
    return names


def test_progress_avoids_the_names_of_all_collections_and_progress_relations(
    pipeline: Any, tmp_path: Path
) -> None:
    with persist.open(f"file:{tmp_path}/lake/other", writer="test") as client:
        client.create_or_load("clicks_progress", schema=pa.schema([("n", pa.int64())]))
    assert progress_names(pipeline) == ["clicks_progress1", "shop_progress"]
    (file := tmp_path / "more.yaml").write_text(
        FILE.format(folder=tmp_path).replace("shop:", "more:\n    progress: shop_progress")
    )
    with pytest.raises(UsageError, match=r'name "shop_progress" .* already taken'):
        progress_names(load(file))


def test_progress_with_names_from_the_caller_is_not_compared_with_others(
    pipeline: Any, tmp_path: Path
) -> None:
    with persist.open(f"file:{tmp_path}/lake/other", writer="test") as client:
        client.create_or_load("clicks_progress", schema=pa.schema([("n", pa.int64())]))
    names = progress_names(pipeline, progress_of=lambda source: f"{source}_progress")
    assert names == ["clicks_progress", "shop_progress"]


def test_tasks_have_a_storage_location_for_each_source(pipeline: Any, tmp_path: Path) -> None:
    tasks = tasks_of(pipeline, jobs=None)
    assert [(task.name, task.kind, task.writer) for task in tasks] == [
        ("clicks", "source", "test"),
        ("shop", "source", "test"),
    ]
    assert [task.url for task in tasks] == [
        f"file:{tmp_path}/lake/clicks",
        f"file:{tmp_path}/lake/shop",
    ]


def test_dropped_source_leaves_no_collection_and_no_rows(
    turn: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tick_transaction, "SPOOL_BYTES", 0)
    source = ScriptedSource("kafka")
    source.append(0, "one")
    run = turn(source)
    run.ticks(1)
    client = run.client
    assert {"words", "src_remap", "src/state"} <= {*client.collections(hidden=True)}
    assert [*(tmp_path / "lake" / "src" / "batch").rglob("*.parquet")]
    known: list[list[str]] = []

    def dropping(memory: Any) -> None:
        known.append(memory.names())
        known.append(client.collections(hidden=True))

    source.drop = dropping  # type: ignore[method-assign]
    drop(client, "src", source)
    assert "words" in known[0], "its state is there while upstream is cleaned up"
    assert "words" in known[1]
    assert client.collections(hidden=True) == []
    assert [*(tmp_path / "lake" / "src" / "batch").rglob("*.parquet")] == []


@pytest.mark.parametrize(
    ("point", "dropped"), [(Failpoint.SLOT_DROPPED, False), (Failpoint.DROP_DONE, True)]
)
def test_drop_that_failed_halfway_is_completed_by_a_second_drop(
    turn: Any, point: Failpoint, dropped: bool
) -> None:
    source = ScriptedSource("kafka")
    source.append(0, "one")
    run = turn(source)
    run.ticks(1)
    with armed(point, Action.ERROR), pytest.raises(Exception, match=point.value):
        drop(run.client, "src", source)
    assert source.dropped
    assert (run.client.collections(hidden=True) == []) is dropped
    drop(run.client, "src", source)
    assert run.client.collections(hidden=True) == []
