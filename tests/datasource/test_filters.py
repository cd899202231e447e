import pyarrow as pa
import pytest

from penstock.datasource.filters import Asks, Condition, filtered, takes

ROWS = pa.table(
    {
        "n": pa.array([1, 2, None, 3], pa.int32()),
        "t": pa.array(["a", None, "b", ""], pa.string()),
        "f": pa.array([0.0, -0.0, float("nan"), None], pa.float64()),
    }
)


@pytest.mark.parametrize(
    ("condition", "kept"),
    [
        (Condition(Asks.EQUAL, "n", (2,)), [2]),
        (Condition(Asks.EQUAL, "n", (2,), negated=True), [1, 3]),
        (Condition(Asks.LESS, "n", (3,)), [1, 2]),
        (Condition(Asks.LESS, "n", (2,), negated=True), [2, 3]),
        (Condition(Asks.GREATER_EQUAL, "t", ("a",)), [1, None]),
        (Condition(Asks.AMONG, "n", (1, 3, 9)), [1, 3]),
        (Condition(Asks.AMONG, "n", (1, 9), negated=True), [2, 3]),
        (Condition(Asks.NULL, "n"), [None]),
        (Condition(Asks.NULL, "f", negated=True), [1, 2, None]),
    ],
)
def test_of_a_null_neither_a_condition_nor_its_negation_holds(condition, kept):
    assert takes(condition, ROWS.schema)
    assert filtered(ROWS, [condition]).column("n").to_pylist() == kept


@pytest.mark.parametrize(
    "condition",
    [
        Condition(Asks.EQUAL, "f", (0.0,)),
        Condition(Asks.EQUAL, "n", (2**40,)),
        Condition(Asks.EQUAL, "n", (True,)),
        Condition(Asks.EQUAL, "n", (None,)),
        Condition(Asks.AMONG, "n", (1, None)),
        Condition(Asks.EQUAL, "N", (1,)),
        Condition(Asks.EQUAL, "t", ("\ud800",)),
    ],
)
def test_what_spark_might_see_otherwise_is_left_to_spark(condition):
    assert not takes(condition, ROWS.schema)
