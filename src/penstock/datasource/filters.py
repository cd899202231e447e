"""Filters that Spark pushes down, where Arrow evaluates them exactly as Spark does.

Spark does not evaluate a pushed filter again. Only filters on columns whose type has the same
order in both systems are accepted. Spark treats NaN as equal to itself and as the largest
number, and Arrow does not, so float columns are left to Spark.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["Condition", "Operator", "filter_rows", "supports"]


class Operator(Enum):
    """Comparison of a condition."""

    EQUAL = "equal"
    LESS = "less"
    LESS_EQUAL = "less_equal"
    GREATER = "greater"
    GREATER_EQUAL = "greater_equal"
    AMONG = "among"
    NULL = "null"


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition on one column, or its negation; for null, only NULL is true."""

    operator: Operator
    column: str
    values: tuple[Any, ...] = ()
    negated: bool = False


def supports(condition: Condition, schema: pa.Schema) -> bool:
    """Return whether Arrow evaluates `condition` on rows of `schema` exactly as Spark does."""
    if schema.names.count(condition.column) != 1:
        return False
    if condition.operator is Operator.NULL:
        return True
    kind = schema.field(condition.column).type
    return all(_is_exact(value, kind) for value in condition.values)


def filter_rows(rows: pa.Table, conditions: Sequence[Condition]) -> pa.Table:
    """Return the rows that satisfy all conditions."""
    for condition in conditions:
        rows = rows.filter(_mask(rows.column(condition.column), condition))
    return rows


def _is_exact(value: Any, kind: pa.DataType) -> bool:
    if value is None or type(value) is not _PYTHON.get(kind):
        return False
    try:
        return bool(pa.scalar(value, kind).as_py() == value)
    except (pa.ArrowException, ValueError, OverflowError):
        return False


_PYTHON: Final = {
    pa.bool_(): bool,
    pa.int8(): int,
    pa.int16(): int,
    pa.int32(): int,
    pa.int64(): int,
    pa.string(): str,
}


def _mask(column: pa.ChunkedArray, condition: Condition) -> pa.ChunkedArray:
    kind = column.type
    if condition.operator is Operator.NULL:
        return pc.is_valid(column) if condition.negated else pc.is_null(column)
    if condition.operator is Operator.AMONG:
        holds = pc.is_in(column, value_set=pa.array(condition.values, kind))
    else:
        holds = getattr(pc, condition.operator.value)(column, pa.scalar(condition.values[0], kind))
    if condition.negated:
        holds = pc.and_(pc.is_valid(column), pc.invert(pc.fill_null(holds, False)))
    return holds
