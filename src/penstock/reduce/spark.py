"""Reductions as aggregates of Spark: the rows of each key become one, and no document is read.

Ordered ones go by the greatest or the least row of a key, as one struct in the fold order.
Spark cannot update a struct in its hash table, so with such an aggregate it sorts by key;
all others it hashes, which takes about half the time.
"""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as Spark's users write it.

from penstock.data import DIFF
from penstock.persist.scan.consolidation_sql import quoted
from penstock.reduce.native import Aggregate, NativePlan

__all__ = ["aggregated"]


def aggregated(rows: DataFrame, plan: NativePlan) -> DataFrame:
    """One row for each key, with the columns of the plan, and the least `mz_diff` of its rows.

    Args:
        rows: the collection's columns and `mz_diff`: how often a row is there. A row may come in
            several parts, as it does before compaction. Where the least of them is below 0, a
            row was taken away, and what came of the others means nothing.
        plan: of that collection.
    """
    # Names of ours: a column may have any, and an aggregate needs one.
    ours = {name: f"c{at}" for at, name in enumerate(plan.columns.names)}
    plain = rows.selectExpr(*(f"{quoted(name)} AS {c}" for name, c in ours.items()), DIFF)
    row = f"struct({', '.join(ours[name] for name in plan.order)})"
    kinds = set(plan.aggregates.values())
    sides = {Aggregate.FIRST: f"min({row}) AS row_first", Aggregate.LAST: f"max({row}) AS row_last"}
    found = [f"min({DIFF}) AS {DIFF}", *(text for kind, text in sides.items() if kind in kinds)]
    chosen = []
    for name, c in ours.items():
        match plan.aggregates.get(name):
            case Aggregate.FIRST | Aggregate.LAST as side:
                chosen.append(f"row_{side}.{c} AS {quoted(name)}")
                continue
            case Aggregate.SUM:
                # 19 digits each, so that no product is ever rounded.
                term = f"CAST({c} AS DECIMAL(19, 0)) * CAST({DIFF} AS DECIMAL(19, 0))"
                found.append(f"CAST(sum({term}) AS DECIMAL(38, 0)) AS {c}")
            case Aggregate.MINIMUM:
                found.append(f"min({c}) AS {c}")
            case Aggregate.MAXIMUM:
                found.append(f"max({c}) AS {c}")
            case None:
                pass
        chosen.append(f"{c} AS {quoted(name)}")
    keys = [ours[name] for name in plan.key]
    return plain.groupBy(*keys).agg(*map(F.expr, found)).selectExpr(*chosen, DIFF)
