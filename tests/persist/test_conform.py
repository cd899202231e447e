"""External rows in Spark types are converted to the stored types of a collection."""

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.data import DIFF, TIME
from penstock.data.spark_types import to_spark
from penstock.errors import UsageError
from penstock.persist.append.conform import check_fits, stored_rows

MIDNIGHT = 86_400_000
TIMES = st.none() | st.integers(0, MIDNIGHT - 1)
MS = pa.time32("ms")
WITHIN = {
    "plain": (MS, TIMES),
    "list": (pa.list_(MS), st.none() | st.lists(TIMES, max_size=3)),
    "large": (pa.large_list(MS), st.none() | st.lists(TIMES, max_size=3)),
    "pair": (pa.list_(MS, 2), st.none() | st.lists(TIMES, min_size=2, max_size=2)),
    "struct": (
        pa.struct([("t", MS), ("u", pa.uint8())]),
        st.none() | st.fixed_dictionaries({"t": TIMES, "u": st.integers(0, 255)}),
    ),
    "map": (
        pa.map_(pa.string(), MS),
        st.none()
        | st.dictionaries(st.text(max_size=2), TIMES, max_size=2).map(lambda d: [*d.items()]),
    ),
    "deep": (
        pa.list_(pa.struct([("t", pa.list_(MS))])),
        st.lists(st.fixed_dictionaries({"t": st.lists(TIMES, max_size=2)}), max_size=2),
    ),
}


@pytest.mark.parametrize("name", WITHIN)
@given(data=st.data())
def test_stored_rows_restore_time_values_from_spark_types(name, data):
    kind, values = WITHIN[name]
    columns = pa.schema([(name, kind)])
    rows = pa.table([pa.array(data.draw(st.lists(values, max_size=4)), kind)], schema=columns)
    shown = to_spark(rows)
    check_fits(shown.schema, columns, collection="c")
    stored = stored_rows(shown, columns, time=7, collection="c")
    stored.validate(full=True)
    assert stored.drop_columns([TIME, DIFF]).equals(rows)


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 2**32, 2**63 - 1])
@pytest.mark.parametrize("name", ["plain", "list"])
def test_stored_rows_with_time_out_of_range_raise_usage_error(name, value):
    columns = pa.schema([(name, WITHIN[name][0])])
    given_value = value if name == "plain" else [value]
    rows = pa.table({name: [given_value]})
    check_fits(rows.schema, columns, collection="c")
    with pytest.raises(UsageError, match=f'a value in column "{name}" does not fit') as refused:
        stored_rows(rows, columns, time=7, collection="c")
    assert str(value) in refused.value.detail


def test_stored_rows_in_null_column_accept_only_nulls():
    columns = pa.schema([("n", pa.null())])
    nulls = pa.table({"n": pa.nulls(3, pa.int32())})
    check_fits(nulls.schema, columns, collection="c")
    stored = stored_rows(nulls, columns, time=7, collection="c")
    assert stored.schema.field("n").type == pa.null()
    assert stored.num_rows == 3
    with pytest.raises(UsageError, match='a value in column "n" does not fit'):
        stored_rows(
            pa.table({"n": pa.array([None, 1], pa.int32())}), columns, time=7, collection="c"
        )


@pytest.mark.parametrize(
    "kind",
    [pa.list_(pa.null()), pa.struct([("a", pa.null())]), pa.list_(pa.struct([("a", pa.null())]))],
)
def test_check_fits_with_nested_null_type_raises_usage_error(kind):
    columns = pa.schema([("n", kind)])
    shown = to_spark(pa.table([pa.nulls(1, kind)], schema=columns))
    with pytest.raises(UsageError, match='column "n" of collection "c" cannot be written so'):
        check_fits(shown.schema, columns, collection="c")
    check_fits(columns, columns, collection="c")
