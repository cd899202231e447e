"""CSV encoding of columns for COPY."""

import csv
import io

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from penstock.connectors.postgres.copy_csv import csv_of

TEXTS = st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=6)


@given(
    st.lists(st.tuples(st.none() | st.binary(max_size=9), st.none() | st.booleans(), TEXTS)),
    st.integers(0, 4),
)
def test_csv_of_columns_round_trips_and_distinguishes_empty_from_null(
    rows: list[tuple[bytes | None, bool | None, str | None]], skipped: int
) -> None:
    types = (pa.binary(), pa.bool_(), pa.string())
    columns = [
        pa.array([row[index] for row in rows], type_).slice(skipped)
        for index, type_ in enumerate(types)
    ]
    text = csv_of(columns).to_pybytes().decode()
    parsed_rows = [*csv.reader(io.StringIO(text, newline=""), strict=True)]
    assert parsed_rows == [[csv_text(value) for value in row] for row in rows[skipped:]]
    assert text.count('""') >= sum(row[2] == "" for row in rows[skipped:])


def csv_text(value: object) -> str:
    match value:
        case None:
            return ""
        case bool():
            return str(value).lower()
        case bytes():
            return "\\x" + value.hex()
        case _:
            return str(value)
