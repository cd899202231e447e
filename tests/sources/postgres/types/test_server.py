"""Random values of a real server: read, stored and printed as the server prints them."""

import math
import struct
from datetime import date, timedelta

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import DefiniteError
from penstock.pgclient import connect, quote_literal
from penstock.sources.postgres.types import column_type, to_text
from tests.sources.postgres.types.server import column_of, copied, printed, types_in
from tests.sources.postgres.types.test_torture import bits
from tests.sources.postgres.types.torture import CASES, SETUP, create_table, insert_rows


@pytest.fixture(scope="module")
def connection(postgres_server):
    database = postgres_server.create_database("values")
    with connect(database.url()) as connection:
        connection.execute(SETUP)
        yield connection
    database.drop()


def digits(least, most):
    return st.integers(least, most).map(str)


def decimals(precision, scale):
    """Numbers of few and of many digits that fit."""
    return st.integers(0, precision).flatmap(
        lambda size: st.integers(-(10**size) + 1, 10**size - 1).map(lambda n: f"{n}e-{scale}")
    )


def single(x: float) -> float:
    """Return the nearest number of 32 bits, which may be infinite."""
    with np.errstate(over="ignore"):
        return float(np.float32(x))


def floats(width):
    def value(number):
        return {math.inf: "Infinity", -math.inf: "-Infinity"}.get(
            number, "NaN" if math.isnan(number) else repr(number)
        )

    whole = st.tuples(st.integers(1, 10**17), st.integers(0, 24)).map(lambda p: p[0] * 10.0 ** p[1])
    bit = st.integers(0, 2**width - 1).map(
        lambda n: struct.unpack("!d" if width == 64 else "!f", n.to_bytes(width // 8))[0]
    )
    if width == 32:
        whole = whole.map(single).filter(math.isfinite)
    return st.one_of(st.floats(width=width), whole, bit).map(value)


def days(first, last):
    """Days as text, those before our era too, which Python's calendar does not have."""

    def day(number):
        cycles, within = divmod(number, 146097)
        found = date(2000, 1, 1) + timedelta(days=within)
        year = found.year + 400 * cycles
        return f"{year if year > 0 else 1 - year:04}-{found:%m-%d}", year <= 0

    return st.integers(first, last).map(day)


TIME = st.one_of(
    st.sampled_from([0, 1, 86_399_999_999, 500_000, 1_000_000, 43_200_000_000]),
    st.integers(0, 86_399_999_999),
).map(lambda us: f"{us // 3_600_000_000:02}:{us // 60_000_000 % 60:02}:{us / 1e6 % 60:09.6f}")


def timestamps(zone):
    finite = st.tuples(days(-2_451_545, 106_741_000), TIME).map(
        lambda p: f"{p[0][0]} {p[1]}{zone}{' BC' if p[0][1] else ''}"
    )
    return st.one_of(st.sampled_from(["infinity", "-infinity"]), finite)


DATES = st.one_of(
    st.sampled_from(["infinity", "-infinity"]),
    days(-2_451_545, 2_145_031_948).map(lambda p: f"{p[0]}{' BC' if p[1] else ''}"),
)
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
HEX = st.binary(max_size=40).map(lambda raw: "\\x" + raw.hex())
AWKWARD = st.text('{},"\\ \tNULnul[]:=1', max_size=6)


def quoted(text):
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def arrays(element):
    """Return literals of arrays of up to three dimensions, with own bounds and with nulls."""
    item = st.one_of(st.none(), element).map(lambda text: "NULL" if text is None else quoted(text))

    @st.composite
    def literal(pick):
        lengths = pick(st.lists(st.integers(1, 3), min_size=1, max_size=3))
        lowers = pick(st.lists(st.integers(-3, 3), min_size=3, max_size=3))

        def build(depth):
            if depth == len(lengths):
                return pick(item)
            return "{" + ",".join(build(depth + 1) for _ in range(lengths[depth])) + "}"

        bounds = [f"[{low}:{low + size - 1}]" for low, size in zip(lowers, lengths, strict=False)]
        return pick(st.sampled_from(["", "".join(bounds) + "="])) + build(0)

    flat = st.lists(item, max_size=5).map(lambda items: "{" + ",".join(items) + "}")
    return st.one_of(flat, literal())


VALUES = {
    "smallint": digits(-(2**15), 2**15 - 1),
    "integer": digits(-(2**31), 2**31 - 1),
    "bigint": digits(-(2**63), 2**63 - 1),
    "oid": digits(0, 2**32 - 1),
    "real": floats(32),
    "double precision": floats(64),
    "numeric": decimals(60, 20),
    "numeric(10,2)": decimals(10, 2),
    "numeric(18,0)": decimals(18, 0),
    "numeric(20,19)": decimals(20, 19),
    "numeric(38,7)": decimals(38, 7),
    "numeric(38,38)": decimals(38, 38),
    "text": TEXTS,
    "character(12)": TEXTS.map(lambda text: text[:12]),
    "bytea": HEX,
    "date": DATES,
    "time": TIME,
    "timestamp": timestamps(""),
    "timestamptz": timestamps("+00"),
    "uuid": st.uuids().map(str),
    "interval": st.tuples(st.integers(-9999, 9999), st.integers(-(10**12), 10**12)).map(
        lambda p: f"{p[0]} mons {p[1] // 10**6} seconds {p[1] % 10**6} microseconds"
    ),
    "text[]": arrays(st.one_of(TEXTS, AWKWARD)),
    "integer[]": arrays(digits(-(2**31), 2**31 - 1)),
    "numeric(10,2)[]": arrays(decimals(10, 2)),
    "timestamptz[]": arrays(timestamps("+00")),
    "double precision[]": arrays(floats(64)),
    "bytea[]": arrays(HEX),
    "character(3)[]": arrays(AWKWARD.map(lambda text: text[:3])),
}


@pytest.fixture(scope="module")
def column_types(connection):
    return {name: column_of(connection, name) for name in VALUES}


@pytest.mark.parametrize("name", VALUES)
def test_value_is_printed_as_the_server_prints_it(connection, column_types, name):
    column = column_types[name]

    @settings(max_examples=20)
    @given(st.lists(st.one_of(st.none(), VALUES[name]), min_size=1, max_size=30))
    def check(values):
        rows = ", ".join(
            f"({at}, {'NULL' if value is None else quote_literal(value)}::{name})"
            for at, value in enumerate(values)
        )
        source = f"FROM (VALUES {rows}) t (n, c) ORDER BY n"
        (texts,) = printed(connection, f"SELECT c {source}")
        (fields,) = copied(connection, f"SELECT {column.select.format('c')} {source}", 1)
        by_text, by_copy = column.from_text(texts), column.from_copy(fields)
        assert to_text(column.label, by_text).cast(pa.binary()) == texts
        assert bits(by_text) == bits(by_copy)

    check()


@pytest.mark.parametrize("text", ["294247-01-10 04:00:54.775807", "294276-12-31 23:59:59.999999"])
@pytest.mark.parametrize("declared", ["timestamp", "timestamptz"])
def test_last_years_of_the_server_are_rejected_in_text_and_binary(connection, declared, text):
    column = column_of(connection, declared)
    source = f"SELECT '{text} UTC'::{declared}"
    for ways in (column.from_text, *printed(connection, source)), (
        column.from_copy, *copied(connection, source, 1)
    ):  # fmt: skip
        with pytest.raises(DefiniteError, match="294246"):
            ways[0](ways[1])
    whole = column_of(connection, declared, text=True)
    (texts,) = printed(connection, source)
    assert whole.from_text(texts) == texts.cast(pa.string())


def test_nan_in_a_decimal_is_rejected_unless_stored_as_text(connection):
    column = column_of(connection, "numeric(10,2)")
    (texts,), (fields,) = (
        printed(connection, "SELECT 'NaN'::numeric(10,2)"),
        copied(connection, "SELECT 'NaN'::numeric(10,2)", 1),
    )
    for way, values in ((column.from_text, texts), (column.from_copy, fields)):
        with pytest.raises(DefiniteError, match="NaN"):
            way(values)
    whole = column_of(connection, "numeric(10,2)", text=True)
    assert whole.from_text(texts).to_pylist() == ["NaN"]


def test_newest_server_is_read_like_the_oldest(database18):
    cases = [case for case in CASES if "xml" not in case.name]  # It was built without.
    with connect(database18.url()) as connection:
        connection.execute(SETUP)
        connection.execute(create_table("public.torture", cases))
        connection.execute(insert_rows("public.torture", cases))
        for name, described in types_in(connection, "public.torture").items():
            column = column_type(described, text=False)
            source = "FROM public.torture ORDER BY id"
            (texts,) = printed(connection, f'SELECT "{name}" {source}')
            selected = column.select.format(f'"{name}"')
            (fields,) = copied(connection, f"SELECT {selected} {source}", 1)
            by_text = column.from_text(texts)
            assert to_text(column.label, by_text).cast(pa.binary()) == texts, name
            assert bits(by_text) == bits(column.from_copy(fields)), name
