import pyarrow as pa
import pytest

from penstock.datasource.filters import Condition, Operator, filter_rows, supports

ROWS = pa.table(
    {
        "n": pa.array([1, 2, None, 3], pa.int32()),
        "t": pa.array(["a", None, "b", ""], pa.string()),
        "f": pa.array([0.0, -0.0, float("nan"), None], pa.float64()),
    }
)


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        (Condition(Operator.EQUAL, "n", (2,)), [2]),
        (Condition(Operator.EQUAL, "n", (2,), negated=True), [1, 3]),
        (Condition(Operator.LESS, "n", (3,)), [1, 2]),
        (Condition(Operator.LESS, "n", (2,), negated=True), [2, 3]),
        (Condition(Operator.GREATER_EQUAL, "t", ("a",)), [1, None]),
        (Condition(Operator.AMONG, "n", (1, 3, 9)), [1, 3]),
        (Condition(Operator.AMONG, "n", (1, 9), negated=True), [2, 3]),
        (Condition(Operator.NULL, "n"), [None]),
        (Condition(Operator.NULL, "f", negated=True), [1, 2, None]),
    ],
)
def test_filter_rows_excludes_null_from_condition_and_negation(condition, expected):
    assert supports(condition, ROWS.schema)
    assert filter_rows(ROWS, [condition]).column("n").to_pylist() == expected


@pytest.mark.parametrize(
    "condition",
    [
        Condition(Operator.EQUAL, "f", (0.0,)),
        Condition(Operator.EQUAL, "n", (2**40,)),
        Condition(Operator.EQUAL, "n", (True,)),
        Condition(Operator.EQUAL, "n", (None,)),
        Condition(Operator.AMONG, "n", (1, None)),
        Condition(Operator.EQUAL, "N", (1,)),
        Condition(Operator.EQUAL, "t", ("\ud800",)),
    ],
)
def test_supports_rejects_conditions_that_spark_evaluates_differently(condition):
    assert not supports(condition, ROWS.schema)
