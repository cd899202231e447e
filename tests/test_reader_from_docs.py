"""Consistency of the reference pages with the code, and a reader written from one."""

import ast
import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import msgspec
import pyarrow as pa
import pytest

import penstock.errors
import penstock.persist.errors
from penstock import persist
from penstock.data.spark_types import _SMALL, is_native
from penstock.datasource import options
from penstock.durable import Log, open_blob
from penstock.durable.log import entry_key
from penstock.persist import encoding, state
from penstock.persist.encoding import encode_entry
from penstock.persist.holds import Hold
from penstock.persist.state import Batch, Entry, Link, Operation, Seal, Stored
from penstock.testing.clocks import ManualClock
from tests.compat import make_golden, reader

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference"
GOLDEN = sorted((ROOT / "tests" / "compat").glob("v*"))


def settings(**others: Any) -> persist.Settings:
    return persist.Settings(
        background=False,
        notify="",
        inline_bytes=800,
        part_bytes=2_000,
        young_ms=0,
        clock=ManualClock(),
        chance=random.Random(8),
        **others,
    )


def contents(snapshot: persist.Snapshot) -> Counter[Any]:
    """Count rows in the notation of the reader."""
    counts: Counter[Any] = Counter()
    for data, _, diff in snapshot:
        counts[reader.render(data)] += diff
    return counts


def changes(given: persist.Changes) -> Counter[Any]:
    counts: Counter[Any] = Counter()
    for data, time, diff in given:
        counts[reader.render(data), time] += diff
    return counts


def assert_equal_reads(location: reader.Location, client: persist.Client) -> None:
    """Compare names, bounds, contents as of every time, and changes."""
    assert location.names() == client.collections()
    for name in client.collections():
        collection = client.collection(name)
        stored = location.collection(name)
        assert (stored.get("since", 0), stored.get("upper", 0)) == (
            collection.since,
            collection.upper,
        )
        ids = [batch.id for batch in collection.state.batches]
        assert [batch["id"] for batch in stored.get("batches", [])] == ids
        for time in range(collection.since, collection.upper):
            snapshot = collection.snapshot(time)
            assert location.as_of(name, time) == contents(snapshot), (name, time)
        with collection.listen(collection.since) as listener:
            given = listener.next_changes(timeout_ms=0)
        if given is not None:
            assert location.changes(name, given.lower, given.upper) == changes(given), name


def test_reader_does_not_import_penstock():
    tree = ast.parse(Path(reader.__file__).read_text())
    imported = {
        (node.module or "") if isinstance(node, ast.ImportFrom) else alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert not {name for name in imported if name.startswith(("penstock", "tests"))}


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda folder: folder.name)
def test_reader_reads_golden_locations(golden):
    codecs = {"mood": make_golden.MOOD_2.decode}
    location = reader.Location(golden / "location", codecs)
    expected = json.loads((golden / "expected.json").read_text())
    assert location.names() == sorted(expected)
    for name, listed in expected.items():
        for time, rows in listed["as_of"].items():
            assert (name, time, location.as_of(name, int(time))) == (name, time, rows)


def test_golden_location_covers_all_features():
    location = reader.Location(GOLDEN[-1] / "location")
    floor, head = location.marks()
    assert 0 < floor < head == location.state["seqno"]
    assert location.void
    assert location.state["epoch"] == 2
    assert len(location.collection("orders")["schemas"]) == 2
    batches = [b for c in location.state["collections"].values() for b in c.get("batches", [])]
    assert {part["type"] for batch in batches for part in batch["parts"]} == {"inline", "stored"}
    assert any(len(batch["parts"]) > 1 for batch in batches)
    assert {batch.get("merged", False) for batch in batches} == {True, False}
    assert any("until" in batch for batch in batches)
    assert any(batch.get("since") for batch in batches)


def test_reader_after_writes_and_compaction_equals_client(tmp_path):
    url = f"file:{tmp_path}/location"
    with persist.open(url, writer="w", settings=settings()) as client:
        write_history(client)
        client.compact()
        write_more_history(client)
        client.compact()
        plant(url, client, epoch=0, operation=SEAL)
        client.compact()
        client.collection("words").write([(("unsealed", None), 99, +1)]).result()
        client.discard_unsealed()
        client.collection("words").write([(("unsealed", None), 77, +1)]).result()
        location = reader.Location(tmp_path / "location")
        assert location.state["seqno"] == client.state.seqno
        assert location.state["next_id"] == client.state.next_id
        assert location.state["garbage"] == dict(client.state.garbage)
        assert location.state["rollups"] == list(client.state.rollups)
        assert_equal_reads(location, client)
        assert (tmp_path / "location" / "rollup").is_dir()
        assert not (tmp_path / "location" / "log" / f"{0:017d}" / "000").exists()


def test_reader_without_rollup_replays_complete_log(tmp_path):
    url = f"file:{tmp_path}/location"
    with persist.open(url, writer="w", settings=settings()) as client:
        write_history(client)
        for _ in range(20):
            client.run_maintenance()  # Merges, but does not write a rollup yet.
        write_more_history(client)
        plant(url, client, epoch=1, operation=LINK_UNDER_A_CLOSED_ID)
        client.create_or_load("after the void", key=persist.UNIT, value=persist.UNIT)
        location = reader.Location(tmp_path / "location")
        assert len(location.void) == 1
        assert_equal_reads(location, client)
        assert not (tmp_path / "location" / "rollup").exists()


def test_reader_after_takeover_equals_new_writer(tmp_path):
    url = f"file:{tmp_path}/location"
    first = persist.open(url, writer="w", settings=settings())
    write_history(first)
    with persist.open(url, writer="w", settings=settings()) as second:
        plant(url, second, epoch=1, operation=SEAL)
        write_more_history(second)
        location = reader.Location(tmp_path / "location")
        assert len(location.void) == 1
        assert_equal_reads(location, second)
    with pytest.raises(penstock.errors.Fenced):
        first.collection("words").seal(1_000).result()
    with pytest.raises(penstock.errors.Fenced):
        first.close()


def test_reader_ignores_entries_after_release(tmp_path):
    url = f"file:{tmp_path}/location"
    with persist.open(url, writer="w", settings=settings()) as client:
        write_history(client)
    with persist.open(url, hold=False, settings=settings()) as client:
        plant(url, client, epoch=1, operation=SEAL)
        location = reader.Location(tmp_path / "location")
        assert len(location.void) == 1
        assert_equal_reads(location, client)


def write_history(client: persist.Client) -> None:
    words = client.create_or_load("words", key=persist.TEXT, value=persist.UNIT)
    for time in range(30):
        words.write([((f"word {time % 7}", None), time, +1)])
        words.write([((f"word {time % 5}", None), time + 3, -1)]).result()
        words.seal(time).result()
    documents = client.create_or_load("documents", key=persist.BIGINT, value=persist.JSON)
    documents.compare_and_append(
        [((10**30, value), 1, +1) for value in (1, 1.0, True, None, "x", {"b": 1, "a": [2]})], 0, 9
    )
    narrow = pa.schema([("id", pa.int32()), ("f", pa.float32()), ("l", pa.list_(pa.int8()))])
    rows = client.create_or_load("rows", schema=narrow, key_columns=["id"])
    rows.compare_and_append(
        [({"id": n, "f": n / 4, "l": [n % 3]}, n % 9, +1) for n in range(100)], 0, 9
    )
    rows.compare_and_append([({"id": 3, "f": 0.75, "l": [0]}, 9, -1)], 9, 11)
    wide = pa.schema(
        [("id", pa.int64()), ("f", pa.float64()), ("l", pa.list_(pa.int8())), ("n", pa.int32())]
    )
    rows.alter(wide, defaults={"n": 7})
    gone = client.create_or_load("gone", key=persist.INT64, value=persist.BYTES)
    gone.compare_and_append([((n, b"x" * 40), 0, +1) for n in range(100)], 0, 1)


def write_more_history(client: persist.Client) -> None:
    rows = client.collection("rows")
    rows.compare_and_append(
        [
            ({"id": 4, "f": 1.0, "l": [1], "n": 7}, 11, -1),  # Equal to the narrow row.
            ({"id": 2**40, "f": -0.0, "l": None, "n": None}, 12, +1),
            ({"id": 2**40, "f": 0.0, "l": None, "n": None}, 12, +1),
        ],
        11,
        20,
    )
    client.collection("gone").destroy()
    again = client.create_or_load("gone", key=persist.TEXT, value=persist.TEXT)
    again.compare_and_append([(("back", "again"), 5, +1)], 0, 6)
    words = client.collection("words")
    words.write([(("half", None), 32, +1), (("late", None), 50, +1)]).result()
    words.seal(40).result()
    client.discard_unsealed(["words"])
    words.seal(60).result()
    words.allow_compaction(10).result()
    empty = client.create_or_load("empty", key=persist.TEXT, value=persist.UNIT)
    empty.compare_and_append([(("x", None), 1, +1), (("x", None), 2, -1)], 0, 3)
    empty.allow_compaction(2).result()


def plant(url: str, client: persist.Client, *, epoch: int, operation: Operation) -> None:
    """Append an entry that only a fenced or faulty writer would create."""
    entry = Entry(
        location=client.state.location,
        epoch=epoch,
        token="planted",
        at_ms=0,
        operations=(operation,),
    )
    blob = open_blob(url, writing=True)
    assert Log(blob).create(client.state.seqno, encode_entry(entry))
    blob.close()


SEAL = Seal(1, 1_000)
CLOSED = Stored(key="batch/7-7/never.parquet", size=1, checksum=1, footer=1, footer_checksum=1)
LINK_UNDER_A_CLOSED_ID = Link(
    1, (Batch(schema=0, lower=0, upper=1, rows=1, size=1, parts=(CLOSED,)),)
)


def section(page: str, heading: str) -> str:
    text = (REFERENCE / page).read_text()
    return re.split(r"\n#", text.partition(f"# {heading}\n")[2])[0]


STRUCTURES = {
    "Entry": Entry,
    "Writer": state.Writer,
    "Schema version": state.SchemaVersion,
    "Batch": Batch,
    "Collection": state.CollectionState,
    "Rollup": encoding._Rollup,
    "Hold": Hold,
}


@pytest.mark.parametrize("heading", STRUCTURES)
def test_format_page_lists_fields_of(heading):
    kind = STRUCTURES[heading]
    listed = re.findall(r"^\| `(\w+)` \| ([^|]*)", section("format.md", heading), re.MULTILINE)
    fields = msgspec.structs.fields(kind)
    assert [name for name, _ in listed] == [field.encode_name for field in fields]
    omitted = kind.__struct_config__.omit_defaults
    for field, (_, shown) in zip(fields, listed, strict=True):
        default = re.search(r"`= (.*)`", shown)
        assert (default is not None) == (omitted and field.default is not msgspec.NODEFAULT)
        if default is not None:
            assert DEFAULTS.get(default[1], default[1]) == field.default


DEFAULTS = {
    '""': "",
    "0": 0,
    "[]": (),
    "empty": b"",
    "END": persist.END,
    "false": False,
    "nil": None,
}


@pytest.mark.parametrize("heading", ["Operations", "Part"])
def test_format_page_lists_every_kind_of(heading):
    union = {"Operations": state.Operation, "Part": state.Part}[heading]
    listed = re.findall(r"^\| `(\w+)` \| (.*) \|$", section("format.md", heading), re.MULTILINE)
    kinds = {kind.__struct_config__.tag: kind for kind in get_args(union)}
    assert [name for name, _ in listed] == list(kinds)
    for name, fields in listed:
        config, defined = kinds[name].__struct_config__, msgspec.structs.fields(kinds[name])
        assert config.tag_field == "type"
        listed = dict(re.findall(r"`(\w+)`: ([^;]*)", fields))
        assert list(listed) == [field.encode_name for field in defined]
        for field in defined:
            default = re.search(r"`= (.*?)`", listed[field.encode_name])
            omitted = config.omit_defaults and field.default is not msgspec.NODEFAULT
            assert (default is not None) == omitted
            assert default is None or DEFAULTS[default[1]] == field.default


def test_format_page_replay_lists_every_operation():
    listed = re.findall(r"^\| `(\w+)` \|", section("format.md", "Replay"), re.MULTILINE)
    assert listed == [kind.__struct_config__.tag for kind in get_args(state.Operation)]


def test_format_page_has_the_key_of_an_entry():
    assert f"entry 1234 is `{entry_key(1234)}`" in section("format.md", "Objects")


def table_rows(page: str, first: str) -> list[list[str]]:
    """Return the cells of every row of the tables whose first heading is `first`."""
    rows: list[list[str]] = []
    inside = False
    for line in (REFERENCE / page).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if not line.startswith("|"):
            inside = False
        elif cells[0] == first:
            inside = True
        elif inside and not line.startswith("|---"):
            rows.append(cells)
    return rows


OPTIONS = {
    "Read": options._COMMON + options._BATCH,
    "Stream": options._COMMON + options._STREAM,
    "Write": options._COMMON[:2] + options._WRITE,
}


@pytest.mark.parametrize("heading", OPTIONS)
def test_spark_page_lists_every_option_to(heading):
    listed = re.findall(r"^\| `(\w+)` \|", section("spark.md", heading), re.MULTILINE)
    assert listed == list(OPTIONS[heading])


@pytest.mark.parametrize("heading", OPTIONS)
def test_spark_page_has_the_default_of_every_option_to(heading):
    parse = options.parse_write_options if heading == "Write" else options.parse_read_options
    rows = re.findall(r"^\| `(\w+)` \| (\S+) \|", section("spark.md", heading), re.MULTILINE)
    required = {name: "1" for name, default in rows if default == "required"}
    for name, default in rows:
        if default == "required":
            others = {option: "1" for option in required if option != name}
            # Without startAt, the options select a batch read.
            assert name == "startAt" or raises_usage(parse, others), name
        elif default != "none":
            assert parse({**required, name: default.strip("`")}) == parse(required), name


def raises_usage(function: Any, *given: Any) -> bool:
    with pytest.raises(penstock.errors.UsageError):
        function(*given)
    return True


def test_spark_page_lists_the_spark_type_of_arrow_types():
    from penstock.persist.scan.spark import _spark_schema

    rows = table_rows("spark.md", "Arrow")
    kinds = [eval(arrow.strip("`"), {"pa": pa}) for arrow, _, _ in rows]
    for kind, (_, listed, natively) in zip(kinds, rows, strict=True):
        columns = pa.schema([("c", kind)])
        assert _spark_schema(columns).simpleString() == f"struct<c:{listed.strip('`')}>"
        assert natively == ("yes" if is_native(columns) else "no")
    assert set(_SMALL) - set(kinds) == set()


def test_spark_page_lists_options_of_each_read():
    from penstock.persist.scan.spark import BROADCAST_ROWS, PER_READ

    page = section("spark.md", "Options of each read")
    assert dict(re.findall(r"^\| `(\S+)` \| `(\w+)` \|", page, re.MULTILINE)) == PER_READ
    assert f"{BROADCAST_ROWS:_}" in (REFERENCE / "spark.md").read_text()
