"""Tasks together return the planned rows, however the plan divides them."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest
from hypothesis import given, settings

from penstock import persist
from penstock.data import DIFF, TIME
from penstock.datasource import read_task
from penstock.datasource.batch_plan import find_contents, plan_contents
from penstock.datasource.options import BatchOptions
from penstock.datasource.read_task import Kind, Task, contents_tasks, rows_of, updates_of
from penstock.durable import location
from penstock.errors import Corruption, InternalError, UsageError
from penstock.persist import Client, Collection
from penstock.persist.holds import list_holds
from penstock.persist.merge import merger
from penstock.persist.scan.plan import scan_snapshot
from penstock.persist.scan.task import ROWS_AT_ONCE
from penstock.testing.clocks import ManualClock
from tests.persist.model import ModelCollection, Version
from tests.persist.shop import SCHEMA, by_hand, opened
from tests.persist.test_scan import History, act, histories

numbers = count()


def new_url() -> str:
    return f"memory:datasource-{next(numbers)}"


@contextmanager
def run_history(history: History, url: str) -> Iterator[tuple[Collection, ModelCollection]]:
    """Yield a collection at `url` with that history."""
    model = ModelCollection([Version(0, tuple(SCHEMA.names))])
    with (
        mock.patch.object(merger, "FOLD_BYTES", history.fold_bytes),
        opened(location._shelf(url.partition(":")[2]), **history.settings) as client,
    ):
        table = client.create_or_load("rows", schema=SCHEMA, key_columns=history.key)
        for action in history.actions:
            act(client, table, model, *action)
        yield table, model


def rows(tasks: list[Task]) -> list[tuple[Any, ...]]:
    """Return the rows of all tasks."""
    return [row for task in tasks for some in rows_of(task) for row in values(some)]


def values(table: pa.Table) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in table.to_pylist()]


@given(histories())
@settings(max_examples=40)
@pytest.mark.parametrize("pack_bytes", [1, 1 << 20])
def test_tasks_read_the_contents_as_of_every_time(pack_bytes, history):
    url = new_url()
    with (
        mock.patch.object(read_task, "PACK_BYTES", pack_bytes),
        run_history(history, url) as (table, model),
    ):
        for as_of in range(model.since, model.upper):
            scan = scan_snapshot(table.state, as_of)
            tasks = contents_tasks(url, scan, scan.schema, max_task_bytes=1 << 30)
            assert Counter(rows(tasks)) == model.contents(as_of), (as_of, tasks)
            updates = [u for task in tasks for some in updates_of(task) for u in values(some)]
            assert {time for *_, time, _ in updates} <= {as_of}


def merged(url: str, **changed: Any) -> tuple[Client, Collection]:
    """Return a collection with a base of two parts and a few later updates."""
    client = persist.open(
        url, writer="w", settings=by_hand(part_bytes=200, inline_bytes=0, **changed)
    )
    table = client.create_or_load(
        "rows", schema=pa.schema([("k", pa.float64()), ("v", pa.list_(pa.int8()))]), key_columns="k"
    )
    keys = [0.0, -0.0, float("nan"), None, *map(float, range(1, 30))]
    table.write([({"k": key, "v": [1]}, 1, 1) for key in keys])
    table.seal(2).result()
    table.allow_compaction(1).result()
    client.compact()
    table.write(
        [
            ({"k": -0.0, "v": [1]}, 2, -1),
            ({"k": float("nan"), "v": [1]}, 2, -1),
            ({"k": float("nan"), "v": None}, 2, 1),
            ({"k": None, "v": [1]}, 2, -1),
        ]
    )
    table.seal(3).result()
    return client, table


def test_rows_are_compared_by_bytes():
    url = new_url()
    client, table = merged(url)
    with client, mock.patch.object(read_task, "PACK_BYTES", 1):
        scan = scan_snapshot(table.state, 2)
        tasks = contents_tasks(url, scan, scan.schema, max_task_bytes=1 << 30)
        assert {task.kind for task in tasks} == {Kind.KEPT, Kind.BROUGHT}
        assert len(tasks) > 2
        assert Counter(map(repr, rows(tasks))) == Counter(
            map(repr, [(0.0, [1]), (float("nan"), None), *((float(n), [1]) for n in range(1, 30))])
        )


def test_row_repeats_by_its_diff():
    url = new_url()
    with persist.open(url, writer="w", settings=by_hand()) as client:
        table = client.create_or_load("rows", schema=SCHEMA)
        table.write([({"k": "a", "n": 1}, 1, 200_000), ({"k": "b", "n": 1}, 1, 3)])
        table.seal(2).result()
        (task,) = plan_contents(*find(url))
        chunks = list(rows_of(task))
        assert max(chunk.num_rows for chunk in chunks) <= ROWS_AT_ONCE
        keys = Counter(k for chunk in chunks for k in chunk.column("k").to_pylist())
        assert keys == {"a": 200_000, "b": 3}


def test_negative_multiplicity_raises_internal_error():
    url = new_url()
    with persist.open(url, writer="w", settings=by_hand()) as client:
        table = client.create_or_load("rows", schema=SCHEMA)
        table.write([({"k": "a", "n": 1}, 1, -2)])
        table.seal(2).result()
        (task,) = plan_contents(*find(url))
        with pytest.raises(
            InternalError, match='collection "rows" has a row with multiplicity -2 as of 1'
        ):
            rows([task])


def find(url: str, **changed: Any) -> tuple[Any, BatchOptions]:
    options = BatchOptions(location=url, collection="rows", **changed)
    return find_contents(options), options


def test_plan_beyond_max_task_bytes_raises_without_hold():
    url = new_url()
    client, _ = merged(url)
    with client:
        with pytest.raises(
            UsageError, match="too large to consolidate in one task as of 2"
        ) as caught:
            plan_contents(*find(url, max_task_bytes=10))
        assert "penstock.spark.read" in caught.value.hint
        assert list_holds(client.reader.machine.blob) == {}


def test_plan_leaves_hold_until_lease_expires():
    url = new_url()
    clock = ManualClock()
    client, table = merged(url, clock=clock)
    with client:
        tasks = plan_contents(*find(url, as_of="1", hold_for_ms=60_000))
        ((_, hold),) = list_holds(client.reader.machine.blob).values()
        assert (hold.lease_ms, hold.sinces) == (60_000, {table.id: 1})

        def compact() -> None:
            table.allow_compaction(2).result()
            for _ in range(4):
                client.run_maintenance()
            client.compact()

        compact()
        assert table.since == 1
        assert len(rows(tasks)) == 33

        clock.move_ms(60_001)
        compact()
        assert table.since == 2
        assert list_holds(client.reader.machine.blob) == {}
        with pytest.raises(UsageError, match="was compacted while it was being read") as caught:
            rows(tasks)
        assert "holdFor" in caught.value.hint


def test_plan_without_hold_creates_none():
    url = new_url()
    client, _ = merged(url)
    with client:
        plan_contents(*find(url, hold=False))
        assert list_holds(client.reader.machine.blob) == {}


def test_damaged_file_raises_corruption():
    url = new_url()
    client, _ = merged(url)
    with client:
        tasks = plan_contents(*find(url))
        blob = client.reader.machine.blob
        for key in client.state.linked():
            blob.put(key, b"PAR1")
        with pytest.raises(Corruption):
            rows(tasks)


def test_contents_keep_the_time_of_their_lookup():
    url = new_url()
    client, table = merged(url)
    with client:
        contents, options = find(url)
        table.write([({"k": 1.0, "v": [1]}, 3, -1)])
        table.seal(4).result()
        given = [some for task in plan_contents(contents, options) for some in rows_of(task)]
        assert sum(some.num_rows for some in given) == 31
        assert {TIME, DIFF}.isdisjoint(given[0].schema.names)
