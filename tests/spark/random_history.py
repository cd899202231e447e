"""Random histories of collections, and the contents that Spark must return at every time.

A real client writes a history to files, and the model of persist records the same
updates. The model stores each value exactly as Spark returns it. The pairs of written and
returned values are listed by hand and never cast.
"""

import math
import random
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from functools import reduce
from typing import Any
from unittest import mock

import pyarrow as pa
from tests.persist.model import ModelCollection, Version
from tests.persist.shop import by_hand

import penstock.persist as persist
import penstock.spark as ps
from penstock.persist.merge import merger

NAME = "rows"


@dataclass(frozen=True)
class SparkValue:
    """Value as written, and as returned by Spark."""

    stored: Any
    returned: Any


@dataclass(frozen=True)
class Shape:
    """Row generator: schema versions, and a few values per column."""

    schemas: Sequence[pa.Schema]
    values: dict[str, Sequence[Any]]
    keys: Sequence[tuple[str, ...]]
    defaults: dict[str, Any] = field(default_factory=dict)
    """Defaults of columns added later, as stored and as returned."""


def _timestamp(us: int, *, zone: bool = False) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC if zone else None) + timedelta(microseconds=us)


PLAIN = Shape(
    schemas=[
        pa.schema([("k", pa.string()), ("n", pa.int32())]),
        pa.schema([("k", pa.string()), ("n", pa.int32()), ("note", pa.string())]),
        pa.schema(
            [
                ("k", pa.string()),
                ("n", pa.int64()),
                ("note", pa.string()),
                pa.field("m", pa.int16(), nullable=False),
            ]
        ),
    ],
    values={
        "k": ["a", "b", "a`b", "", None],
        "n": [0, 1, None],
        "note": ["new", None, "old"],
        "m": [7, 8],
    },
    keys=[(), ("k",), ("k", "n")],
    defaults={"note": "old", "m": 7},
)

FLOATS = Shape(
    schemas=[
        pa.schema([("x", pa.float64()), ("y", pa.float32())]),
        pa.schema([("x", pa.float64()), ("y", pa.float64()), ("z", pa.float32())]),
    ],
    values={
        "x": [0.0, -0.0, math.nan, None, 1.5],
        "y": [0.0, -0.0, math.nan, -math.inf],
        "z": [-0.0, 0.0, None],
    },
    keys=[(), ("x",), ("y", "x")],
    defaults={"z": -0.0},
)

_INNER = pa.struct([("a", pa.float64()), ("b", pa.list_(pa.float32())), ("c", pa.uint32())])

NESTED = Shape(
    schemas=[
        pa.schema([("k", pa.int64()), ("inner", _INNER), ("tags", pa.map_("string", "float64"))]),
        pa.schema(
            [
                ("k", pa.int64()),
                ("inner", _INNER),
                ("tags", pa.map_("string", "float64")),
                ("more", pa.list_(pa.struct([("s", pa.map_("int8", "string"))]))),
            ]
        ),
    ],
    values={
        "k": [1, 2, None],
        "inner": [
            None,
            {"a": 0.0, "b": [0.0, None], "c": 1},
            {"a": -0.0, "b": [0.0, None], "c": 1},
            {"a": 0.0, "b": [-0.0, None], "c": 1},
            {"a": None, "b": None, "c": 2**32 - 1},
            {"a": math.nan, "b": [], "c": None},
        ],
        "tags": [
            None,
            [],
            [("a", 0.0)],
            [("a", -0.0)],
            [("a", 1.0), ("b", 2.0)],
            [("b", 2.0), ("a", 1.0)],
            [("b", None)],
        ],
        "more": [
            None,
            [],
            [{"s": None}],
            [None, {"s": [(1, None)]}],
            [None, {"s": [(1, "null")]}],
        ],
    },
    keys=[(), ("k",)],
)

_FLAT: dict[str, tuple[pa.DataType, Sequence[Any]]] = {
    "boolean": (pa.bool_(), [True, False, None]),
    "i8": (pa.int8(), [-128, 127]),
    "i16": (pa.int16(), [-(2**15), None]),
    "u8": (pa.uint8(), [0, 255]),
    "u16": (pa.uint16(), [2**16 - 1, None]),
    "u32": (pa.uint32(), [2**32 - 1, 0]),
    "u64": (
        pa.uint64(),
        [SparkValue(2**64 - 1, Decimal(2**64 - 1)), SparkValue(3, Decimal(3)), None],
    ),
    "short_time": (pa.time32("ms"), [SparkValue(86_399_999, 86_399_999), None]),
    "time": (pa.time64("us"), [SparkValue(1, 1), SparkValue(86_399_999_999, 86_399_999_999)]),
    "long_time": (pa.time64("ns"), [SparkValue(1, 1), SparkValue(2, 2)]),
    "here": (pa.timestamp("ms"), [SparkValue(-1, _timestamp(-1_000)), None]),
    "ms": (pa.timestamp("ms", "UTC"), [SparkValue(1, _timestamp(1_000, zone=True)), None]),
    "us": (pa.timestamp("us"), [SparkValue(1, _timestamp(1)), SparkValue(-1, _timestamp(-1))]),
    "us_there": (
        pa.timestamp("us", "Europe/Berlin"),
        [SparkValue(1, _timestamp(1, zone=True)), None],
    ),
    "ns": (pa.timestamp("ns"), [SparkValue(1, 1), SparkValue(2, 2), None]),
    "ns_here": (pa.timestamp("ns", "UTC"), [SparkValue(10**18 + 1, 10**18 + 1)]),
    "lasted": (pa.duration("s"), [SparkValue(3, 3), SparkValue(-3, -3)]),
    "lasted_ns": (pa.duration("ns"), [SparkValue(3, 3), None]),
    "small": (pa.decimal128(10, 2), [Decimal("1.50"), Decimal("-0.01"), None]),
    "big": (pa.decimal256(38, 3), [Decimal("12345678901234567890123456789012345.678")]),
    "nothing": (pa.null(), [None]),
    "large": (pa.large_string(), ["ä", "", None]),
    "data": (pa.binary(), [b"", b"\x00\xff"]),
    "large_data": (pa.large_binary(), [b"x", None]),
    "fixed": (pa.binary(3), [b"abc", b"\x00\x00\x00", None]),
    "day": (pa.date32(), [date(2026, 11, 15), date(1, 1, 1), None]),
    "many": (pa.large_list(pa.int32()), [[1, None], [], None]),
    "two": (pa.list_(pa.int16(), 2), [[1, 2], None]),
    "deep": (pa.map_(pa.int32(), pa.list_(pa.uint8())), [[(1, [255])], [(2, None)], None]),
}

FLAT = Shape(
    schemas=[
        pa.schema([(name, kind) for name, (kind, _) in _FLAT.items()]),
        pa.schema(
            [
                (name, pa.uint16() if name == "u8" else pa.int64() if name == "u32" else kind)
                for name, (kind, _) in _FLAT.items()
            ]
            + [("later", pa.uint64()), ("latest", pa.timestamp("us", "UTC"))]
        ),
    ],
    values={name: values for name, (_, values) in _FLAT.items()}
    | {"later": [SparkValue(5, Decimal(5)), None], "latest": [None]},
    keys=[(), ("u64",), ("us_there", "small"), ("fixed", "nothing", "ns")],
    defaults={
        "later": SparkValue(5, Decimal(5)),
        "latest": SparkValue(7, _timestamp(7, zone=True)),
    },
)

ODD = Shape(
    schemas=[
        pa.schema(
            [
                ("k", pa.string()),
                ("half", pa.float16()),
                ("huge", pa.decimal256(50, 3)),
                ("in", pa.struct([("half", pa.float16()), ("at", pa.time64("ns"))])),
            ]
        ),
        pa.schema(
            [
                ("k", pa.large_string()),
                ("half", pa.float32()),
                ("huge", pa.decimal256(50, 3)),
                ("in", pa.struct([("half", pa.float16()), ("at", pa.time64("ns"))])),
                ("more", pa.float16()),
            ]
        ),
    ],
    values={
        "k": ["a", "b", None],
        "half": [0.0, -0.0, math.nan, 1.5, None],
        "huge": [
            SparkValue(Decimal(text), text)
            for text in ("12345678901234567890123456789012345678901234567.891", "-1.500")
        ],
        "in": [None, SparkValue({"half": -0.0, "at": 1}, {"half": -0.0, "at": 1})],
        "more": [0.0, -0.0],
    },
    keys=[(), ("k",), ("half",), ("huge",)],
)

SHAPES = {"plain": PLAIN, "floats": FLOATS, "nested": NESTED, "flat": FLAT, "odd": ODD}


def as_returned(value: Any) -> Any:
    """Return a value as Spark returns it."""
    return value.returned if isinstance(value, SparkValue) else value


def stored(value: Any) -> Any:
    """Return a value as the client writes it."""
    return value.stored if isinstance(value, SparkValue) else value


def printed(value: Any) -> str:
    """Return an exact text of a value. All NaN values have the same text."""
    match value:
        case float():
            return "nan" if math.isnan(value) else struct.pack(">d", value).hex()
        case datetime() if value.tzinfo is not None:
            return f"{value.astimezone(UTC).replace(tzinfo=None)}Z"
        case dict():
            return f"{{{','.join(f'{name}:{printed(inner)}' for name, inner in value.items())}}}"
        case list() | tuple():
            return f"[{','.join(map(printed, value))}]"
        case _:
            return repr(value)


class ReturnedModel(ModelCollection):
    """Model with rows as returned by Spark."""

    def filled(self, row: dict[str, Any], columns: tuple[str, ...]) -> tuple[str, ...]:
        defaults = {name: value for v in self.versions for name, value in v.defaults.items()}
        return tuple(printed(as_returned(row.get(name, defaults.get(name)))) for name in columns)


class RandomHistory:
    """History of one collection at `url`, and its model."""

    def __init__(self, url: str, shape: Shape, rng: random.Random, **settings: int) -> None:
        self.url = url
        self.shape = shape
        self.rng = rng
        self.key = rng.choice(shape.keys)
        self.settings = {
            "inline_bytes": rng.choice([0, 0, 2_000]),
            "part_bytes": rng.choice([200, 100_000]),
            "merge_bytes": rng.choice([4_000, 1 << 20]),
            "fan_in": 2,
            "young_ms": 3_600_000,
        } | settings
        self.fold_bytes = rng.choice([1, 1 << 20])
        self.model = ReturnedModel([Version(0, tuple(shape.schemas[0].names))])
        self.done: list[str] = []

    def __repr__(self) -> str:
        return (
            f"RandomHistory(key={self.key}, {self.settings}, fold {self.fold_bytes}: {self.done})"
        )

    @contextmanager
    def open(self) -> Iterator[tuple[persist.Client, persist.Collection]]:
        """Yield a writing client and its collection."""
        with (
            mock.patch.object(merger, "FOLD_BYTES", self.fold_bytes),
            persist.open(self.url, writer="w", settings=by_hand(**self.settings)) as client,
        ):
            schema = self.shape.schemas[len(self.model.versions) - 1]
            yield client, client.create_or_load(NAME, schema=schema, key_columns=self.key)

    def run_steps(self, steps: int) -> None:
        """Execute random steps."""
        with self.open() as (client, table):
            for _ in range(steps):
                self._step(client, table)
            if self.model.upper == 0:
                self._seal(table, 1)

    def advance_since(self) -> None:
        """Advance since to a random retained time, and compact."""
        with self.open() as (client, table):
            latest = max(self.model.upper - 2, self.model.since)
            reached = self.rng.randint(self.model.since, latest)
            self._allow(table, reached)
            client.compact()
            client.compact()
            self.done.append("compact")

    def write(self, table: persist.Collection, *updates: tuple[dict[str, Any], int, int]) -> None:
        """Write updates to the collection and to the model."""
        self.model.updates += updates
        exact = [({n: stored(v) for n, v in row.items()}, time, d) for row, time, d in updates]
        table.write(exact).result()
        self.done.append(
            f"write {[(*self.model.filled(r, tuple(r)), t, d) for r, t, d in updates]}"
        )

    def _step(self, client: persist.Client, table: persist.Collection) -> None:
        match self.rng.choice("wwwwssssacud"):
            case "w":
                self._write_some(table)
            case "s":
                self._write_some(table)
                self._seal(table, self.rng.randint(1, 2))
            case "a" if len(self.model.versions) < len(self.shape.schemas):
                self.alter(table)
            case "c":
                self._allow(table, min(self.model.since + 1, self.model.upper))
                client.compact()
                self.done.append("compact")
            case "u":
                client.run_maintenance()
                self.done.append("maintenance")
            case "d":
                client.discard_unsealed()
                self.model.updates = [u for u in self.model.updates if u[1] < self.model.upper]
                self.done.append("discard")

    def alter(self, table: persist.Collection) -> None:
        """Alter the collection to the next schema version."""
        old, new = self.shape.schemas[len(self.model.versions) - 1 :][:2]
        added = {n: self.shape.defaults[n] for n in new.names if n in self.shape.defaults}
        added = {name: value for name, value in added.items() if name not in old.names}
        table.alter(new, defaults={name: stored(value) for name, value in added.items()})
        self.model.versions.append(Version(self.model.upper, tuple(new.names), added))
        self.done.append("alter")

    def _seal(self, table: persist.Collection, by: int) -> None:
        self.model.upper += by
        table.seal(self.model.upper).result()
        self.done.append(f"seal {self.model.upper}")

    def _allow(self, table: persist.Collection, since: int) -> None:
        self.model.since = max(self.model.since, since)
        table.allow_compaction(self.model.since).result()
        self.done.append(f"allow {self.model.since}")

    def _write_some(self, table: persist.Collection) -> None:
        for _ in range(self.rng.randint(1, 5)):
            time = self.model.upper + self.rng.choice([0, 0, 1, 2])
            existing_row = self._existing_row(time) if self.rng.random() < 0.45 else None
            if existing_row is not None:
                self.write(table, (existing_row, time, -1))
                continue
            columns = self.model.versions[-1].columns
            row = {name: self.rng.choice(self.shape.values[name]) for name in columns}
            self.write(table, (row, time, self.rng.choice([1, 1, 1, 2])))

    def _existing_row(self, time: int) -> dict[str, Any] | None:
        """Return a row that exists at `time` and at every later time, in the current schema."""
        columns = self.model.versions[-1].columns
        defaults = {n: v for version in self.model.versions for n, v in version.defaults.items()}
        least: dict[tuple[str, ...], int] = {}
        for later in range(time, self.model.upper + 4):
            counts: Counter[tuple[str, ...]] = Counter()
            for row, update_time, diff in self.model.updates:
                if update_time <= later:
                    counts[self.model.filled(row, columns)] += diff
            least = {row: min(n, least.get(row, n)) for row, n in counts.items()}
            if later == time:
                first = least
        sure = sorted(row for row, n in least.items() if n > 0 and row in first)
        if not sure:
            return None
        selected = self.rng.choice(sure)
        for row, _, _ in self.model.updates:
            if self.model.filled(row, columns) == selected:
                return {name: row.get(name, defaults.get(name)) for name in columns}
        return None


def check(spark: Any, history: RandomHistory) -> None:
    """Assert that Spark and the model agree on contents at every time and on changes."""
    model = history.model
    with persist.open(history.url, hold=False) as client:
        state = client.collection(NAME).state
    assert (state.since, state.upper) == (model.since, model.upper), history
    first = model.since + 1 if model.since else 0
    bounds = [(first, model.upper)] if first <= model.upper else []
    if first < model.upper:
        lower = history.rng.randint(first, model.upper - 1)
        bounds = [*{*bounds, (lower, history.rng.randint(lower, model.upper))}]
    contents, changes = read_history(spark, history.url, range(model.since, model.upper), bounds)
    for as_of in range(model.since, model.upper):
        expected = model.contents(as_of)
        assert contents[as_of] == expected, _mismatch(contents[as_of], expected, history, as_of)
    for lower, upper in bounds:
        columns = model.columns_as_of(max(upper - 1, 0))
        expected = model.changes(lower, upper, columns)
        assert changes[lower, upper] == expected, _mismatch(
            changes[lower, upper], expected, history, lower, upper
        )


def _mismatch(
    got: "Counter[Any]", expected: "Counter[Any]", history: RandomHistory, *times: int
) -> str:
    over, less = got - expected, expected - got
    return f"as of {times} Spark has {dict(over)} too much, {dict(less)} too few: {history}"


Contents = dict[int, "Counter[Any]"]
Changes = dict[tuple[int, int], "Counter[Any]"]


def read_history(
    spark: Any,
    url: str,
    times: Sequence[int],
    bounds: Sequence[tuple[int, int]] = (),
    name: str = NAME,
) -> tuple[Contents, Changes]:
    """Return contents as of every time and consolidated changes, with one job per schema."""
    from pyspark.sql import functions as F  # noqa: N812

    frames: dict[tuple[Any, ...], list[Any]] = {}
    for as_of in times:
        frame = ps.read(spark, url, name, as_of, hold=False)
        marked = frame.select("*", F.lit(0).cast("bigint"), F.lit(1).cast("bigint"))
        frames.setdefault(_kind(frame), []).append(marked.select("*", F.lit(f"{as_of}")))
    for lower, upper in bounds:
        frame = ps.changes(spark, url, name, lower, upper, hold=False)
        kind = _kind(frame.drop("mz_timestamp", "mz_diff"))
        frames.setdefault(kind, []).append(frame.select("*", F.lit(f"{lower} {upper}")))
    contents: Contents = {time: Counter() for time in times}
    changes: Changes = {bounds_: Counter() for bounds_ in bounds}
    for same in frames.values():
        table = reduce(lambda a, b: a.unionAll(b), same).toArrow()
        columns = [[printed(v) for v in column.to_pylist()] for column in table.columns[:-3]]
        rows = zip(*columns, strict=True) if columns else [()] * table.num_rows
        marks = [column.to_pylist() for column in table.columns[-3:]]
        for row, time, diff, mark in zip(rows, *marks, strict=True):
            match [int(word) for word in mark.split()]:
                case [as_of]:
                    contents[as_of][row] += diff
                case [lower, upper]:
                    changes[lower, upper][row, time] += diff
    for counter in (*contents.values(), *changes.values()):
        for row in [row for row, n in counter.items() if n == 0]:
            del counter[row]
    return contents, changes


def _kind(frame: Any) -> tuple[Any, ...]:
    return tuple((f.name, f.dataType.simpleString()) for f in frame.schema)
