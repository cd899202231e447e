"""Reductions as Spark aggregates: the rows of a key become one, without documents.

First and last are the least and the greatest row of a key, as one struct in the fold order.
Spark cannot update a struct in its hash table and sorts by key for such aggregates; it hashes
for all others, in about half the time.
"""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as Spark's users write it.

from penstock.data import DIFF
from penstock.persist.scan.consolidation_sql import quoted
from penstock.reduce.native import Aggregate, NativePlan

__all__ = ["aggregate_rows"]


def aggregate_rows(rows: DataFrame, plan: NativePlan) -> DataFrame:
    """Return one row per key with the columns of the plan and the least `mz_diff` of its rows.

    Args:
        rows: The columns of the collection and `mz_diff`, the multiplicity of a row. A row can
            occur several times, as before compaction. If the least `mz_diff` is negative, a
            row was deleted, and the aggregates of the key are undefined.
        plan: The plan of the collection.
    """
    # Internal aliases: a column can have any name, and an aggregate needs one.
    aliases = {name: f"c{i}" for i, name in enumerate(plan.columns.names)}
    aliased = rows.selectExpr(*(f"{quoted(name)} AS {c}" for name, c in aliases.items()), DIFF)
    row = f"struct({', '.join(aliases[name] for name in plan.order)})"
    kinds = set(plan.aggregates.values())
    sides = {Aggregate.FIRST: f"min({row}) AS row_first", Aggregate.LAST: f"max({row}) AS row_last"}
    aggregates = [
        f"min({DIFF}) AS {DIFF}",
        *(text for kind, text in sides.items() if kind in kinds),
    ]
    outputs = []
    for name, c in aliases.items():
        match plan.aggregates.get(name):
            case Aggregate.FIRST | Aggregate.LAST as side:
                outputs.append(f"row_{side}.{c} AS {quoted(name)}")
                continue
            case Aggregate.SUM:
                # Both factors have 19 digits, which keeps the product exact.
                term = f"CAST({c} AS DECIMAL(19, 0)) * CAST({DIFF} AS DECIMAL(19, 0))"
                aggregates.append(f"CAST(sum({term}) AS DECIMAL(38, 0)) AS {c}")
            case Aggregate.MINIMUM:
                aggregates.append(f"min({c}) AS {c}")
            case Aggregate.MAXIMUM:
                aggregates.append(f"max({c}) AS {c}")
            case None:
                pass
        outputs.append(f"{c} AS {quoted(name)}")
    keys = [aliases[name] for name in plan.key]
    return aliased.groupBy(*keys).agg(*map(F.expr, aggregates)).selectExpr(*outputs, DIFF)
