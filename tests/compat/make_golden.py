"""Make the golden location of this release, which every later release must open.

    .venv/bin/python -m tests.compat.make_golden tests/compat/v0.1

Run it by hand when a release changes the encoding, never to repair an old location.
The same code writes the same bytes, except for the version of the Parquet writer,
which each file records.

A dictionary computes the expected contents from the written updates. They are
stored in `expected.json` next to the location.
"""

import json
import os
import random
import shutil
import socket
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa

from penstock import persist
from penstock.durable import Log, open_blob
from penstock.errors import Fenced
from penstock.persist.encoding import encode_entry
from penstock.persist.state import Entry, Seal
from penstock.testing.clocks import ManualClock
from tests.compat.reader import render

SETTINGS: dict[str, Any] = {
    "background": False,
    "notify": "",
    "inline_bytes": 1_000,
    "part_bytes": 1_500,
    "young_ms": 0,
}

MOOD_1 = persist.UserCodec("mood", 1, lambda value: value.encode(), lambda data, _: data.decode())
MOOD_2 = persist.UserCodec(
    "mood",
    2,
    lambda value: value[::-1].encode(),
    lambda data, version: data.decode() if version == 1 else data.decode()[::-1],
)
"""Codec whose second version writes text backwards, and still reads the first version."""

ORDERS_1 = pa.schema([pa.field("id", pa.int32(), nullable=False), ("item", pa.string())])
ORDERS_2 = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        ("item", pa.string()),
        pa.field("count", pa.int32(), nullable=False),
        ("price", pa.decimal128(9, 2)),
    ]
)

LABEL = {b"penstock.label": b"timestamptz"}

CODECS = {
    "text": (persist.TEXT, "tea", "Tee ☕"),
    "bytes": (persist.BYTES, b"\x00\xff", b""),
    "int64": (persist.INT64, -(2**63), 2**63 - 1),
    "bigint": (persist.BIGINT, -(10**40), 7),
    "json": (persist.JSON, {"b": [1, 2.5, None], "a": True}, "text"),
    "unit": (persist.UNIT, None, None),
}


class Written:
    """Written updates, consolidated without any of the code under test."""

    def __init__(self) -> None:
        self.updates: dict[str, list[tuple[Any, int, int]]] = {}

    def note(self, name: str, updates: list[tuple[Any, int, int]]) -> None:
        self.updates.setdefault(name, []).extend(updates)

    def as_of(self, name: str, time: int) -> dict[str, int]:
        """Return each row as JSON, in the schema of that time, with its multiplicity."""
        total: Counter[str] = Counter()
        for data, at, diff in self.updates.get(name, []):
            if at <= time:
                grown = {"count": 1, "price": None} if name == "orders" and time >= 20 else {}
                total[render(grown | data if grown else data)] += diff
        return {row: count for row, count in sorted(total.items()) if count}


def make(folder: Path) -> dict[str, Any]:
    """Write the location into `folder`, and return its expected contents."""
    written = Written()
    url = f"file:{folder}"
    settings = persist.Settings(**SETTINGS, clock=ManualClock(), chance=random.Random(20_261_115))

    first = persist.open(url, writer="golden", settings=settings)
    write_codecs(first, written)
    write_moods(first, MOOD_1, written, [(("calm", None), 1, +1), (("glad", None), 1, +1)], 2)
    write_orders(first, written)
    write_tracked(first, written)
    gone = first.create_or_load("gone", key=persist.TEXT, value=persist.UNIT)
    gone.compare_and_append([((f"word {n}", None), 0, +1) for n in range(60)], 0, 1)
    first.collection("codec-int64").allow_compaction(2).result()
    first.compact()  # A merge, and the first rollup.
    gone.destroy()
    first.hold("reporting").move({"orders": 20, "codec-text": 1})
    first.compact()  # The second rollup, which truncates the log to the first.

    # A takeover, as after a kill: the first writer never released the lock.
    second = persist.open(url, writer="golden", settings=settings)
    with suppress(Fenced):
        first.create_or_load("too-late", key=persist.TEXT, value=persist.UNIT)
    with suppress(Fenced):
        first.close()
    void_entry(url, second)
    write_moods(second, MOOD_2, written, [(("calm", None), 2, -1), (("bored", None), 3, +1)], 5)
    orders = second.collection("orders")
    orders.allow_compaction(30).result()  # The hold keeps since at 20.
    leave_unsealed(second, written)
    write_later_orders(second, written)
    second.close()
    return expected(folder, written)


def write_codecs(client: persist.Client, written: Written) -> None:
    """Write one collection for each built-in codec, with keys that appear and disappear."""
    for name, (codec, one, other) in CODECS.items():
        collection = client.create_or_load(f"codec-{name}", key=codec, value=codec)
        updates: list[Any] = [((one, other), 1, +1), ((other, one), 1, +2), ((one, other), 3, -1)]
        collection.compare_and_append(updates, 0, 5)
        written.note(f"codec-{name}", updates)


def write_moods(
    client: persist.Client, codec: persist.Codec, written: Written, updates: list[Any], upper: int
) -> None:
    """Append keys of a user-defined codec, in either version."""
    moods = client.create_or_load("moods", key=codec, value=persist.UNIT)
    moods.compare_and_append(updates, moods.upper, upper)
    written.note("moods", updates)


def write_orders(client: persist.Client, written: Written) -> None:
    """Write rows in two schema versions, in Parquet objects and in log entries."""
    orders = client.create_or_load("orders", schema=ORDERS_1, key_columns=["id"])
    many = [({"id": n, "item": f"item {n}"}, n % 10, +1) for n in range(60)]
    orders.compare_and_append(many, 0, 10)
    few = [({"id": 3, "item": "item 3"}, 12, -1), ({"id": 3, "item": None}, 15, +1)]
    orders.compare_and_append(few, 10, 20)
    written.note("orders", [*many, *few])
    orders.alter(ORDERS_2, defaults={"count": 1})


def write_later_orders(client: persist.Client, written: Written) -> None:
    """Write rows of the second schema, and delete a row of the first.

    The same entry fails the tracked collection again, recovers it, and fails it permanently.
    """
    orders, followed = client.collection("orders"), client.collection("shop.public.visits")
    rows: list[Any] = [
        ({"id": 2**40, "item": "big", "count": 3, "price": "1234567.89"}, 22, +1),
        ({"id": 7, "item": "item 7", "count": 1, "price": None}, 25, -1),
    ]
    table = pa.Table.from_pylist(
        [row | {"price": pa.scalar(row["price"]).cast(pa.decimal128(9, 2))} for row, _, _ in rows],
        schema=ORDERS_2,
    )
    table = table.append_column("mz_timestamp", pa.array([time for _, time, _ in rows], pa.int64()))
    table = table.append_column("mz_diff", pa.array([diff for _, _, diff in rows], pa.int64()))
    lost = persist.StoredError("Truncated", "what came is not known")
    client.append_all(
        [persist.AppendTo(orders, table, 20, 40), persist.AppendTo(followed, [], 120, 140)],
        [
            persist.Fail(followed, 125, lost),
            persist.Recover(followed, 127),
            persist.Fail(followed, 135, lost),
        ],
    )
    written.note("orders", rows)


def leave_unsealed(client: persist.Client, written: Written) -> None:
    """Write updates that are discarded, and updates that are neither sealed nor discarded."""
    words = client.create_or_load("words", key=persist.TEXT, value=persist.UNIT)
    words.write([(("sealed", None), 1, +1), (("discarded", None), 9, +1)]).result()
    words.seal(5).result()
    client.discard_unsealed(["words"])
    words.seal(10).result()
    words.write([(("unsealed", None), 12, +1)]).result()
    written.note("words", [(("sealed", None), 1, +1), (("unsealed", None), 12, +1)])


def write_tracked(client: persist.Client, written: Written) -> None:
    """Write a tracked collection that begins, fails and recovers, and a hidden collection."""
    labelled = [pa.field("id", pa.int64()), pa.field("at", pa.string(), metadata=LABEL)]
    followed = client.create_or_load(
        "shop.public.visits", schema=pa.schema(labelled), key_columns=["id"], owner="shop"
    )
    state = client.create_or_load("shop/state", key=persist.TEXT, value=persist.JSON, owner="shop")
    lost = persist.StoredError("SlotLost", "slot is gone", "It was dropped.", "Copy again.")
    visits: list[Any] = [({"id": n, "at": f"noon {n}"}, 100, +1) for n in range(50)]
    client.append_all(
        [persist.AppendTo(followed, visits, 0, 101)],
        [persist.Begin(followed, 100), persist.WriteTo(state, [(("lsn", "16/0"), 3, +1)])],
    )
    client.append_all(
        [persist.AppendTo(followed, [], 101, 110), persist.AppendTo(state, [], 0, 5)],
        [persist.Fail(followed, 103, lost)],
    )
    gone: list[Any] = [({"id": 7, "at": "noon 7"}, 112, -1)]
    client.append_all(
        [persist.AppendTo(followed, gone, 110, 120)], [persist.Recover(followed, 112)]
    )
    written.note("shop.public.visits", [*visits, *gone])
    written.note("shop/state", [(("lsn", "16/0"), 3, +1)])


def void_entry(url: str, client: persist.Client) -> None:
    """Create the entry that the first writer had in flight when it was fenced."""
    state = client.state
    late = Entry(
        location=state.location, epoch=1, token="late", at_ms=0, operations=(Seal(1, 1_000),)
    )
    blob = open_blob(url, writing=True)
    assert Log(blob).create(state.seqno, encode_entry(late))
    blob.close()


def expected(folder: Path, written: Written) -> dict[str, Any]:
    """Return the expected contents as of the first and last readable time, and some between."""
    found: dict[str, Any] = {}
    with persist.open(f"file:{folder}", hold=False) as client:
        for name in client.collections(hidden=True):
            state = client.collection(name).state
            since, upper = state.since, state.upper
            times = {since, upper - 1, *range(since, upper, 1 if upper < 10 else 5)}
            errors = [(span.lower, min(span.upper, upper)) for span in state.errors]
            failing = {time for lower, beyond in errors for time in range(lower, beyond)}
            found[name] = {
                "since": since,
                "upper": upper,
                "as_of": {str(t): written.as_of(name, t) for t in sorted(times - failing)},
                "in_error": sorted(failing),
            }
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    # Host and process id are meaningless to a later reader, and differ in each run.
    with (
        mock.patch.object(socket, "gethostname", return_value="golden"),
        mock.patch.object(os, "getpid", return_value=4242),
    ):
        contents = make(folder / "location")
    shutil.rmtree(folder / "location" / "tmp")
    (folder / "expected.json").write_text(json.dumps(contents, indent=1) + "\n")


if __name__ == "__main__":
    main()
