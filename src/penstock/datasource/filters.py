"""Conditions on rows that Spark hands down, where Arrow answers them just as Spark does.

A condition that is taken over is not looked at again, so only those are that
cannot differ: on plain columns of types whose order is one and the same. Spark
takes NaN for equal to itself and for the largest number, Arrow does not; so
columns of floats are left to Spark.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["Asks", "Condition", "filtered", "takes"]


class Asks(Enum):
    """What a condition asks."""

    EQUAL = "equal"
    LESS = "less"
    LESS_EQUAL = "less_equal"
    GREATER = "greater"
    GREATER_EQUAL = "greater_equal"
    AMONG = "among"
    NULL = "null"


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition on one column, or its negation; of a null neither holds, but NULL."""

    asks: Asks
    column: str
    values: tuple[Any, ...] = ()
    negated: bool = False


def takes(condition: Condition, schema: pa.Schema) -> bool:
    """Whether Arrow answers `condition` on rows of `schema` just as Spark does."""
    if schema.names.count(condition.column) != 1:
        return False
    if condition.asks is Asks.NULL:
        return True
    kind = schema.field(condition.column).type
    return all(_exact(value, kind) for value in condition.values)


def filtered(rows: pa.Table, conditions: Sequence[Condition]) -> pa.Table:
    """The rows for which all conditions hold."""
    for condition in conditions:
        rows = rows.filter(_mask(rows.column(condition.column), condition))
    return rows


def _exact(value: Any, kind: pa.DataType) -> bool:
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
    if condition.asks is Asks.NULL:
        return pc.is_valid(column) if condition.negated else pc.is_null(column)
    if condition.asks is Asks.AMONG:
        holds = pc.is_in(column, value_set=pa.array(condition.values, kind))
    else:
        holds = getattr(pc, condition.asks.value)(column, pa.scalar(condition.values[0], kind))
    if condition.negated:
        holds = pc.and_(pc.is_valid(column), pc.invert(pc.fill_null(holds, False)))
    return holds
