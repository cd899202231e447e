"""Values of every type, read by binary COPY and from the text of the stream."""

import pickle

import pyarrow as pa
import pytest

from penstock.data.arrow import with_integer_times
from penstock.pgclient import connect
from penstock.sources.postgres.types import column_type, to_text
from tests.fix_postgres import major
from tests.sources.postgres.types.server import copied, printed, types_in
from tests.sources.postgres.types.torture import EACH, SETUP, create_table, insert_rows, known_to


@pytest.fixture(scope="module")
def connection(postgres_server):
    database = postgres_server.create_database("torture")
    cases = known_to(major(database))
    with connect(database.url()) as connection:
        connection.execute(SETUP)
        connection.execute(create_table("public.torture", cases))
        connection.execute(insert_rows("public.torture", cases))
        yield connection
    database.drop()


@pytest.fixture(scope="module")
def columns(connection):
    return types_in(connection, "public.torture")


def bits(array: pa.Array) -> bytes:
    """Return the stored bytes of an array: NaN equals NaN, and -0 differs from 0."""
    stored = array.cast(with_integer_times(array.type))
    stored = pa.concat_arrays([stored])
    batch = pa.record_batch([stored], ["c"])
    return batch.serialize().to_pybytes()


@pytest.mark.parametrize("text", [False, True], ids=["typed", "as text"])
@pytest.mark.parametrize("case", EACH)
def test_value_is_printed_as_the_server_prints_it(connection, columns, case, text):
    kept = column_type(columns[case.name], text=text)
    source = f"SELECT {{}} FROM public.torture WHERE id < {len(case.literals)} ORDER BY id"
    quoted = f'"{case.name}"'
    (texts,) = printed(connection, source.format(quoted))
    (fields,) = copied(connection, source.format(kept.select.format(quoted)), 1)

    by_text, by_copy = kept.from_text(texts), kept.from_copy(fields)

    for array in (by_text, by_copy):
        array.validate(full=True)
        assert array.type == kept.arrow
        assert to_text(kept.label, array).cast(pa.binary()) == texts
    assert bits(by_text) == bits(by_copy)
    if text:
        assert kept.arrow == pa.string()


def test_slice_of_a_column_is_read_like_the_column(connection, columns):
    texts = printed(connection, "SELECT * FROM public.torture ORDER BY id")
    for column, cells in zip(columns.values(), texts, strict=True):
        kept = pickle.loads(pickle.dumps(column_type(column, text=False)))
        for of in (cells, cells.cast(pa.large_binary()), cells.slice(1).cast(pa.large_string())):
            read = kept.from_text(of)
            whole = to_text(kept.label, read)
            assert whole.slice(3, 5) == to_text(kept.label, kept.from_text(of.slice(3, 5)))
            assert whole.slice(3, 5) == to_text(kept.label, read.slice(3, 5))
            assert whole.slice(9) == to_text(kept.label, read.slice(9))
