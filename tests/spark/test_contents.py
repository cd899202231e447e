"""Contents returned by Spark equal the model at every time, before and after compaction.

A history takes seconds, so `make test` runs few and covers every row shape. Set
PENSTOCK_MODEL_EXAMPLES to run more.
"""

import os
import random
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest
from tests.persist.test_scan import (
    any_merge_is_a_base,
    forget_what_lies_above_the_base,
    ignore_until,
)
from tests.spark.random_history import SHAPES, RandomHistory, Shape, check, read_history

import penstock.spark as ps
from penstock import persist
from penstock.persist.scan import consolidation_sql
from penstock.persist.scan import plan as scan_plan
from penstock.persist.scan import spark as scan_spark

SEED = int(os.environ.get("PENSTOCK_TEST_SEED") or 2_026)
EXAMPLES = int(os.environ.get("PENSTOCK_MODEL_EXAMPLES") or 5)


def random_history(url: str, number: int) -> RandomHistory:
    """Return the history of that number, before its first step."""
    shapes = list(SHAPES.values())
    return RandomHistory(url, shapes[number % len(shapes)], random.Random(f"{SEED} {number}"))


@pytest.mark.parametrize("number", range(EXAMPLES))
def test_spark_contents_of_random_history_equal_model(spark, tmp_path, number):
    history = random_history(f"file:{tmp_path / 'data'}", number)
    history.run_steps(6)
    check(spark, history)
    history.run_steps(2)
    history.advance_since()
    # The driver or Spark consolidates small deltas; the result is the same.
    with mock.patch.object(scan_spark, "HERE_BYTES", -1 if number % 2 else scan_spark.HERE_BYTES):
        check(spark, history)


@pytest.mark.parametrize("number", range(max(EXAMPLES // 5, 1)))
def test_cluster_contents_of_random_history_equal_model(cluster, tmp_path, number):
    history = random_history(f"file:{tmp_path / 'data'}", number + SEED % 5)
    history.run_steps(7)
    cluster.run("check_history", history=history)
    history.advance_since()
    cluster.run("check_history", history=history)


# Planted bugs.

ROWS = Shape(
    schemas=[
        pa.schema([("k", pa.string()), ("x", pa.float64()), ("tags", pa.map_("string", "float64"))])
    ],
    values={},
    keys=[("k",)],
)


def row(k: str | None, x: float = 1.5, *tags: tuple[str, float | None]) -> dict[str, Any]:
    return {"k": k, "x": x, "tags": list(tags)}


@pytest.fixture(scope="module")
def scripted_histories(tmp_path_factory: pytest.TempPathFactory) -> list[RandomHistory]:
    """Return two histories: a base with later updates in its batch, and duplicate rows."""
    folder = tmp_path_factory.mktemp("histories")
    single, double = (
        RandomHistory(
            f"file:{folder / name}", ROWS, random.Random(1), inline_bytes=0, part_bytes=100_000
        )
        for name in ("single", "double")
    )
    single.fold_bytes = double.fold_bytes = 1 << 20
    with single.open() as (client, table):
        single.write(table, (row(None), 0, 1), (row("a"), 0, 1), (row("c"), 2, 1))
        single.write(table, (row("b"), 1, 1), (row("b"), 2, -1), (row("e"), 3, 1))
        table.write([(row("f"), 3, 1), (row("never"), 4, 1)]).result()
        single.model.updates.append((row("f"), 3, 1))
        seal(single, table, 4)
        allow(single, table, 1)
        client.compact()
        client.discard_unsealed()
        single.write(table, (row(None), 5, -1), (row("d", 0.0), 5, 1), (row("d", -0.0), 5, 1))
        single.write(table, (row("m", 1.5, ("a", None)), 5, 1))
        seal(single, table, 6)
        bases = [b for b in table.state.batches if b.distinct]
        assert [(b.lower, b.since, b.upper) for b in bases] == [(1, 1, 4)]
    with double.open() as (client, table):
        double.write(table, (row("a"), 0, 2), (row("b"), 0, 1))
        seal(double, table, 2)
        double.write(table, (row("b"), 2, 1))
        allow(double, table, 1)
        client.compact()
        double.write(table, (row("a"), 2, -1))
        seal(double, table, 3)
        assert any(b.merged and not b.distinct for b in table.state.batches)
    return [single, double]


def seal(history: RandomHistory, table: persist.Collection, upper: int) -> None:
    history.model.upper = upper
    table.seal(upper).result()


def allow(history: RandomHistory, table: persist.Collection, since: int) -> None:
    history.model.since = since
    table.allow_compaction(since).result()


def check_latest(spark: Any, histories: list[RandomHistory]) -> None:
    for history in histories:
        as_of = history.model.upper - 1
        contents, _ = read_history(spark, history.url, [as_of])
        assert contents[as_of] == history.model.contents(as_of)


def test_spark_contents_of_scripted_histories_equal_model(spark, scripted_histories):
    for history in scripted_histories:
        check(spark, history)


def keys_joined_as_values() -> Any:
    """Plant: keys are joined with `=`, so null keys never match."""
    same_key = consolidation_sql.ConsolidationSql.same_key

    def joined(self: consolidation_sql.ConsolidationSql, key: tuple[str, ...]) -> str:
        return same_key(self, key).replace("<=>", "=")

    return mock.patch.object(consolidation_sql.ConsolidationSql, "same_key", joined)


def zeros_are_equal() -> Any:
    """Plant: 0.0 and -0.0 are the same value."""
    mark = consolidation_sql._mark

    def marked(field: pa.Field) -> str:
        return "" if pa.types.is_floating(field.type) else mark(field)

    return mock.patch.object(consolidation_sql, "_mark", marked)


def grouped_by_maps() -> Any:
    """Plant: maps are grouped directly, which Spark does incorrectly."""
    by = consolidation_sql.ConsolidationSql.by.fget

    def plainly(self: consolidation_sql.ConsolidationSql) -> list[str]:
        names = self.columns.names
        own = {
            f"{self.own}plain{i}": consolidation_sql.quoted(name) for i, name in enumerate(names)
        }
        return [own.get(name, name) for name in by(self)]

    return mock.patch.object(consolidation_sql.ConsolidationSql, "by", property(plainly))


@pytest.mark.parametrize(
    "bug",
    [
        ignore_until,
        any_merge_is_a_base,
        forget_what_lies_above_the_base,
        keys_joined_as_values,
        zeros_are_equal,
        grouped_by_maps,
    ],
)
def test_planted_bug_makes_spark_contents_differ_from_model(
    spark, scripted_histories, bug: Callable[[], Any]
):
    with ExitStack() as stack:
        stack.enter_context(bug())
        stack.enter_context(mock.patch.object(scan_spark, "HERE_BYTES", -1))
        planned = scan_plan.scan_snapshot
        stack.enter_context(mock.patch.object(ps, "scan_snapshot", planned))
        # Spark may also raise an error for a map that it grouped.
        kinds = Exception if bug is grouped_by_maps else AssertionError
        with pytest.raises(kinds):
            check_latest(spark, scripted_histories)
