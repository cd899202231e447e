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
from tests.spark.lives import SHAPES, Life, Shape, check, found

import penstock.spark as ps
from penstock import persist
from penstock.persist.scan import consolidation_sql as summing
from penstock.persist.scan import plan as scan_plan
from penstock.persist.scan import spark as door

SEED = int(os.environ.get("PENSTOCK_TEST_SEED") or 2_026)
EXAMPLES = int(os.environ.get("PENSTOCK_MODEL_EXAMPLES") or 5)


def lived(url: str, number: int) -> Life:
    """Return the history of that number, before its first step."""
    shapes = list(SHAPES.values())
    return Life(url, shapes[number % len(shapes)], random.Random(f"{SEED} {number}"))


@pytest.mark.parametrize("number", range(EXAMPLES))
def test_spark_contents_of_random_history_equal_model(spark, tmp_path, number):
    life = lived(f"file:{tmp_path / 'data'}", number)
    life.go_on(6)
    check(spark, life)
    life.go_on(2)
    life.give_up()
    # The driver or Spark consolidates small deltas; the result is the same.
    with mock.patch.object(door, "HERE_BYTES", -1 if number % 2 else door.HERE_BYTES):
        check(spark, life)


@pytest.mark.parametrize("number", range(max(EXAMPLES // 5, 1)))
def test_cluster_contents_of_random_history_equal_model(cluster, tmp_path, number):
    life = lived(f"file:{tmp_path / 'data'}", number + SEED % 5)
    life.go_on(7)
    cluster.run("check_life", life=life)
    life.give_up()
    cluster.run("check_life", life=life)


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
def eventful(tmp_path_factory: pytest.TempPathFactory) -> list[Life]:
    """Return two histories: a base with later updates in its batch, and duplicate rows."""
    folder = tmp_path_factory.mktemp("eventful")
    single, double = (
        Life(f"file:{folder / name}", ROWS, random.Random(1), inline_bytes=0, part_bytes=100_000)
        for name in ("single", "double")
    )
    single.fold_bytes = double.fold_bytes = 1 << 20
    with single.led() as (client, table):
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
    with double.led() as (client, table):
        double.write(table, (row("a"), 0, 2), (row("b"), 0, 1))
        seal(double, table, 2)
        double.write(table, (row("b"), 2, 1))
        allow(double, table, 1)
        client.compact()
        double.write(table, (row("a"), 2, -1))
        seal(double, table, 3)
        assert any(b.merged and not b.distinct for b in table.state.batches)
    return [single, double]


def seal(life: Life, table: persist.Collection, upper: int) -> None:
    life.model.upper = upper
    table.seal(upper).result()


def allow(life: Life, table: persist.Collection, since: int) -> None:
    life.model.since = since
    table.allow_compaction(since).result()


def check_latest(spark: Any, lives: list[Life]) -> None:
    for life in lives:
        as_of = life.model.upper - 1
        contents, _ = found(spark, life.url, [as_of])
        assert contents[as_of] == life.model.contents(as_of)


def test_spark_contents_of_scripted_histories_equal_model(spark, eventful):
    for life in eventful:
        check(spark, life)


def keys_joined_as_values() -> Any:
    """Plant: keys are joined with `=`, so null keys never match."""
    same_key = summing.ConsolidationSql.same_key

    def joined(self: summing.ConsolidationSql, key: tuple[str, ...]) -> str:
        return same_key(self, key).replace("<=>", "=")

    return mock.patch.object(summing.ConsolidationSql, "same_key", joined)


def zeros_are_equal() -> Any:
    """Plant: 0.0 and -0.0 are the same value."""
    mark = summing._mark

    def marked(field: pa.Field) -> str:
        return "" if pa.types.is_floating(field.type) else mark(field)

    return mock.patch.object(summing, "_mark", marked)


def grouped_by_maps() -> Any:
    """Plant: maps are grouped directly, which Spark does incorrectly."""
    by = summing.ConsolidationSql.by.fget

    def plainly(self: summing.ConsolidationSql) -> list[str]:
        names = self.columns.names
        own = {f"{self.own}plain{i}": summing.quoted(name) for i, name in enumerate(names)}
        return [own.get(each, each) for each in by(self)]

    return mock.patch.object(summing.ConsolidationSql, "by", property(plainly))


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
    spark, eventful, bug: Callable[[], Any]
):
    with ExitStack() as stack:
        stack.enter_context(bug())
        stack.enter_context(mock.patch.object(door, "HERE_BYTES", -1))
        planned = scan_plan.scan_snapshot
        stack.enter_context(mock.patch.object(ps, "scan_snapshot", planned))
        # Spark may also raise an error for a map that it grouped.
        kinds = Exception if bug is grouped_by_maps else AssertionError
        with pytest.raises(kinds):
            check_latest(spark, eventful)
