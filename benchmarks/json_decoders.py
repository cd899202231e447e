"""JSON records of a Kafka topic decoded into Arrow columns: the compiled scanner against msgspec.

Both sides get the same chunk of record bytes and return the same Arrow table, as the Kafka source
needs it. The scanner is `JsonFormat.decode`. msgspec is used in two ways:

    typed   a Struct with Python types; values become Arrow columns through Python objects.
            Fastest form of msgspec, but not exact: see `EXACTNESS`
    exact   a Struct with the JSON text of each value (`msgspec.Raw`), which the compiled text
            kernels then convert, as they do for the scanner

The last line is a JSON object: for each case the records/s of each side, and the ratio of the
scanner's time to msgspec's time (less than 1 means that the scanner is faster).
"""

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from penstock.data.text_kernels.located_values import (
    ARRAY,
    ESCAPED,
    FALSE,
    NOTHING,
    NUMBER,
    OBJECT,
    STRING,
    TRUE,
    LocatedValues,
)
from penstock.sources.formats import JsonFormat
from penstock.sources.formats.column_reader import read_column

RECORDS = 20_000
REPEATS = 9

CASES: dict[str, tuple[dict[str, str], Callable[[random.Random, int], dict[str, Any]]]] = {
    "click, 3 of 3 columns": (
        {"customer": "bigint", "page": "text", "product": "bigint"},
        lambda rng, n: {"customer": rng.randrange(10_000), "page": f"/p/{n}", "product": n},
    ),
    "order, 8 of 8 columns": (
        {
            "id": "bigint",
            "customer": "int",
            "status": "text",
            "total": "numeric(12,2)",
            "weight": "double",
            "paid": "boolean",
            "created": "timestamptz",
            "note": "text",
        },
        lambda rng, n: {
            "id": n,
            "customer": rng.randrange(1 << 20),
            "status": rng.choice(["new", "paid", "shipped"]),
            "total": f"{rng.randrange(10**6)}.{rng.randrange(100):02}",
            "weight": rng.random() * 100,
            "paid": rng.random() > 0.5,
            "created": f"2026-01-{1 + n % 28:02}T12:00:{n % 60:02}.{rng.randrange(10**6):06}Z",
            "note": "x" * rng.randrange(40),
        },
    ),
    "event, 5 of 40 columns, 1 KB": (
        {"f0": "bigint", "f9": "text", "f18": "bigint", "f27": "text", "f36": "bigint"},
        lambda rng, n: (
            {
                f"f{i}": "v" * rng.randrange(30) if i % 3 == 0 and i % 9 else rng.getrandbits(40)
                for i in range(40)
            }
            | {"f9": f"text {n}", "f27": "y" * rng.randrange(20), "nested": {"a": [1, 2, {"b": n}]}}
        ),
    ),
}

PYTHON_TYPES: dict[str, Any] = {
    "bigint": int,
    "int": int,
    "text": str,
    "numeric(12,2)": str,
    "double": float,
    "boolean": bool,
    "timestamptz": str,
}

EXACTNESS = {
    "integer beyond 64 bits": (b'{"a":9223372036854775808}', "bigint"),
    "integer with a fraction of zero": (b'{"a":1.0}', "bigint"),
    "number in a numeric column": (b'{"a":0.1000000000000000055511151231257827}', "numeric(38,34)"),
    "number in a double column": (b'{"a":1e400}', "double"),
    "timestamp finer than a microsecond": (b'{"a":"2026-01-01T00:00:00.1234567Z"}', "timestamptz"),
    "duplicate member": (b'{"a":1,"a":2}', "bigint"),
    "half of a surrogate pair": (b'{"a":1,"b":"\\ud800"}', "bigint"),
    "invalid UTF-8 in another member": (b'{"a":1,"b":"\xff"}', "bigint"),
}


def main() -> None:
    """Run all cases and print the figures."""
    parser = argparse.ArgumentParser(description="Compare decoders of JSON records.")
    parser.add_argument("--records", type=int, default=RECORDS, help="Records per chunk.")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="Runs of each side.")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    figures: dict[str, Any] = {"load": round(load, 2), "records": options.records}
    for name, (columns, record) in CASES.items():
        rng = random.Random(1)
        values = [json.dumps(record(rng, n)).encode() for n in range(options.records)]
        figures[name] = measure(name, values, columns, options.repeats)
    figures["exactness"] = compare_exactness()
    print(json.dumps(figures))


def measure(
    name: str, values: Sequence[bytes], columns: dict[str, str], repeats: int
) -> dict[str, float]:
    """Return records/s of each side, and the ratios of the medians."""
    chunk = pa.chunked_array([pa.array(values, pa.binary())])
    scanner = JsonFormat.of(columns)
    typed, exact = Typed(columns, scanner.schema), Exact(columns, scanner)
    sides: dict[str, Callable[[], pa.Table]] = {
        "scanner": lambda: scanner.decode(chunk).rows,
        "typed": lambda: typed.decode(chunk),
        "exact": lambda: exact.decode(chunk),
    }
    results = {side: decode() for side, decode in sides.items()}  # Also compiles the kernels.
    assert results["exact"].equals(results["scanner"]), name
    assert results["typed"].equals(results["scanner"]), name
    times: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(repeats):
        order = list(sides) if number % 2 else list(sides)[::-1]
        for side in order:
            begin = time.process_time()
            sides[side]()
            times[side].append(time.process_time() - begin)
    medians = {side: statistics.median(some) for side, some in times.items()}
    figures = {f"{side} records/s": round(len(values) / medians[side]) for side in sides}
    for side in ("typed", "exact"):
        figures[f"scanner vs {side}"] = round(medians["scanner"] / medians[side], 3)
    print(f"{name}: {figures}")
    return figures


class Typed:
    """Decoding by msgspec into Python values, then into Arrow columns."""

    def __init__(self, columns: dict[str, str], schema: pa.Schema) -> None:
        fields = [(name, PYTHON_TYPES[type_] | None, None) for name, type_ in columns.items()]
        self._decoder = msgspec.json.Decoder(msgspec.defstruct("Record", fields, gc=False))
        self._schema = schema

    def decode(self, chunk: pa.ChunkedArray) -> pa.Table:
        """Return the records as a table."""
        decode = self._decoder.decode
        records = [decode(value) for value in chunk.to_pylist()]
        arrays = []
        for field in self._schema:
            values = [getattr(record, field.name) for record in records]
            is_text = bool(values) and isinstance(values[0], str)
            array = pa.array(values, pa.string() if is_text else field.type)
            arrays.append(array.cast(field.type))
        return pa.table(arrays, schema=self._schema)


class Exact:
    """Location of values by msgspec, then conversion of their text by the compiled kernels."""

    def __init__(self, columns: dict[str, str], scanner: JsonFormat) -> None:
        fields = [(name, msgspec.Raw, msgspec.Raw(b"null")) for name in columns]
        self._decoder = msgspec.json.Decoder(msgspec.defstruct("Record", fields, gc=False))
        self._columns = scanner.columns or ()
        self._schema = scanner.schema

    def decode(self, chunk: pa.ChunkedArray) -> pa.Table:
        """Return the records as a table."""
        decode = self._decoder.decode
        records = [decode(value) for value in chunk.to_pylist()]
        arrays = []
        for column in self._columns:
            texts = [getattr(record, column.name) for record in records]
            array, bad = read_column(_located(texts), 0, column)
            assert not bad
            arrays.append(array)
        return pa.table(arrays, schema=self._schema)


def _located(texts: list[msgspec.Raw]) -> LocatedValues:
    joined = b"".join(texts)
    data = np.frombuffer(joined, np.uint8)
    ends = np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)))
    starts = np.concatenate([[0], ends[:-1]])
    kinds = KIND_BY_FIRST_BYTE[data[starts]]
    if b"\\" in joined:
        is_escaped = np.fromiter((b"\\" in bytes(text) for text in texts), np.bool_, len(texts))
        kinds[is_escaped & (kinds == STRING)] = ESCAPED
    return LocatedValues(data, kinds[np.newaxis], starts[np.newaxis], ends[np.newaxis])


KIND_BY_FIRST_BYTE = np.full(256, NUMBER, np.uint8)
for _byte, _kind in {
    '"': STRING,
    "t": TRUE,
    "f": FALSE,
    "n": NOTHING,
    "{": OBJECT,
    "[": ARRAY,
}.items():
    KIND_BY_FIRST_BYTE[ord(_byte)] = _kind


def compare_exactness() -> dict[str, dict[str, str]]:
    """Return the result of the scanner and of typed msgspec for values that are hard to decode."""
    results = {}
    for name, (record, type_) in EXACTNESS.items():
        decoded = JsonFormat.of({"a": type_}).decode(pa.chunked_array([[record]], pa.binary()))
        scanner = decoded.bad[0].reason if decoded.bad else str(decoded.rows.column("a")[0])
        python_type = datetime if type_ == "timestamptz" else PYTHON_TYPES.get(type_, Decimal)
        decoder = msgspec.json.Decoder(msgspec.defstruct("Record", [("a", python_type)]))
        try:
            typed = str(decoder.decode(record).a)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            typed = f"rejected: {error}"
        results[name] = {"scanner": scanner, "msgspec": typed}
        print(f"{name}: {results[name]}")
    return results


if __name__ == "__main__":
    main()
