"""Results of a scan by envelope, prepared and finished in process as a Spark task does."""

import json
import pickle
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.data import DIFF
from penstock.errors import DefiniteError, UsageError
from penstock.sources.debezium.dedup import (
    Marks,
    find_duplicates,
    marks_from_json,
    marks_to_json,
    raise_marks,
)
from penstock.sources.debezium.envelope import DebeziumJson
from penstock.sources.debezium.last_by_key import last_by_key
from penstock.sources.formats import JsonFormat, TextFormat
from penstock.sources.kafka import topic_scan
from penstock.sources.kafka.output_schema import DATA, ERRORS, OutputSchema
from penstock.sources.kafka.scan import KafkaScan, output_name
from penstock.sources.kafka.topic_scan import TopicReport, TopicScan

CASES = {
    case["id"]: case
    for case in json.loads(
        (Path(__file__).parents[2] / "vectors" / "materialize.json").read_text()
    )["cases"]
    if case["id"].startswith("K")
}

KEY = TextFormat("key")
VALUE = TextFormat("value")
UPSERT = OutputSchema("upsert", VALUE, KEY)
NONE = OutputSchema("none", VALUE, KEY)
ROW = JsonFormat.of({"id": "bigint", "name": "text"})
DEBEZIUM = OutputSchema("debezium", DebeziumJson(ROW), named=("id",))


class Sent(NamedTuple):
    key: str | None
    value: str | None
    partition: int = 0
    offset: int = 0
    timestamp: int = 0


def as_read(records: Iterable[Sent]) -> pa.RecordBatch:
    """Return the records in the form of Spark's Kafka connector."""
    rows = list(records)
    columns = {
        "key": pa.array([_bytes(each.key) for each in rows], pa.binary()),
        "value": pa.array([_bytes(each.value) for each in rows], pa.binary()),
        "topic": pa.array(["clicks"] * len(rows)),
        "partition": pa.array([each.partition for each in rows], pa.int32()),
        "offset": pa.array([each.offset for each in rows], pa.int64()),
        "timestamp": pa.array([each.timestamp for each in rows], pa.timestamp("us", "UTC")),
    }
    return pa.record_batch(columns)


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode()


class Store:
    """Contents of a collection, and the results of a scan."""

    def __init__(self, output: OutputSchema, *, dead_letter: bool = True) -> None:
        self.output, self.dead_letter = output, dead_letter
        self.rows: dict[tuple[Any, ...], int] = {}
        self.errors: list[dict[str, Any]] = []
        self.marks: Marks = {}
        self.changes = 0
        self.duplicates = 0
        self.is_first = True

    def put(self, output: str, rows: pa.Table) -> None:
        if output == ERRORS:
            self.errors += rows.to_pylist()
            return
        names = self.output.schema.names
        diffs = rows.column(DIFF).to_pylist() if DIFF in rows.column_names else [1] * rows.num_rows
        for row, diff in zip(rows.select(names).to_pylist(), diffs, strict=True):
            self.changes += 1
            at = tuple(row.values())
            self.rows[at] = self.rows.get(at, 0) + diff
            if not self.rows[at]:
                del self.rows[at]

    def stored(self, _output: str, keys: pa.Table) -> pa.Table:
        wanted = {tuple(row.values()) for row in keys.to_pylist()}
        names = self.output.schema.names
        at = [names.index(name) for name in self.output.key_columns]
        found = [
            dict(zip(names, row, strict=True))
            for row in self.rows
            if tuple(row[each] for each in at) in wanted
        ]
        return pa.Table.from_pylist(found, schema=self.output.schema)

    def scan(self, *batches: Sequence[Sent], tasks: int = 1) -> Any:
        """Run one tick that reads its records in these batches."""
        topics = {"clicks": TopicScan(self.output, self.is_first, self.dead_letter, self.marks)}
        scan = KafkaScan({}, (), 0, {output_name(DATA, "clicks"): "clicks"}, topics)
        scan = pickle.loads(pickle.dumps(scan))
        prepared = [*scan.prepare([as_read(batch) for batch in batches])]
        reports: list[TopicReport] = []
        for task in range(tasks):
            mine = [
                table.filter(pa.compute.equal(scan.places(table, tasks), task))
                for table in prepared
            ]
            report = scan.finish(mine if scan.by_key and tasks > 1 else prepared, self)
            reports += report.topics.values()
            if not (scan.by_key and tasks > 1):
                break
        self.marks = marks_from_json(
            marks_to_json(raise_marks(self.marks, (report.marks for report in reports)))
        )
        self.duplicates += sum(report.duplicates for report in reports)
        self.is_first = False
        return reports


def test_all_kafka_vectors_are_covered() -> None:
    """K06 is in test_topics.py; this file covers the others."""
    assert CASES.keys() == {"K02", "K03", "K04", "K06"}


def test_envelope_none_reads_missing_key_as_null_and_rejects_missing_value() -> None:
    """Vector K03."""
    store, case = Store(NONE), CASES["K03"]
    sent = [Sent(*each)._replace(offset=at) for at, each in enumerate(case["given"]["msgs"])]
    store.scan(sent[:3])
    wanted = case["expect"]["rows_after_3"]
    assert sorted(([key, value] for key, value, *_ in store.rows), key=str) == wanted
    assert not store.errors
    store.scan(sent[3:])
    (error,) = store.errors
    assert (error["offset"], error["key"]) == (3, b"bar")
    assert "has a key and no value" in error["reason"]


def test_upsert_record_without_key_is_dead_lettered() -> None:
    """Vector K02, except for the retraction of the error: dead-lettered records are rows."""
    store = Store(UPSERT)
    msgs = CASES["K02"]["given"]["msgs"]
    store.scan([Sent(*each)._replace(offset=at) for at, each in enumerate(msgs)])
    assert not store.rows
    (error,) = store.errors
    assert "it has no key" in error["reason"]


def test_a_backlog_of_one_key_is_one_change() -> None:
    """Vector K04."""
    store, case = Store(UPSERT), CASES["K04"]
    count, each = case["given"]["updates_of_key_1"], 50_000
    firsts = range(0, count, each)
    store.scan(*([Sent("1", str(at), 0, at) for at in range(n, n + each)] for n in firsts))
    assert store.rows == {("1", str(count - 1)): 1}
    assert store.changes == case["expect"]["sink_records"]


def test_upsert_of_key_in_two_partitions_keeps_later_timestamp() -> None:
    store = Store(UPSERT)
    store.scan([Sent("k", "late", 0, 5, 20), Sent("k", "early", 1, 9, 10)])
    assert store.rows == {("k", "late"): 1}
    store.scan([Sent("k", "left", 0, 6, 30), Sent("k", "right", 1, 10, 30)])
    assert store.rows == {("k", "right"): 1}


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 3), st.booleans()), max_size=12),
    st.lists(st.integers(1, 12)),
)
def test_upsert_in_one_partition_keeps_last_offset_wherever_ticks_end(
    sent: list[tuple[str, int, bool]], cuts: list[int]
) -> None:
    """The timestamps of producers do not matter: compaction uses offsets too."""
    records = [
        Sent(key, None if gone else str(offset), 0, offset, timestamp)
        for offset, (key, timestamp, gone) in enumerate(sent)
    ]
    store, first = Store(UPSERT), 0
    for end in sorted({*cuts, len(records)}):
        store.scan(records[first:end])
        first = max(first, end)
    last = {record.key: record.value for record in records}
    assert store.rows == {item: 1 for item in last.items() if item[1] is not None}


def test_debezium_key_that_moved_to_another_partition_has_its_later_row() -> None:
    store = Store(DEBEZIUM)
    store.scan(
        [
            Sent("1", event("u", 1, "new", lsn=20), 0, 0, 200),
            Sent("1", event("c", 1, "old", lsn=10), 1, 10, 100),
        ]
    )
    assert store.rows == {(1, "new"): 1}


def test_upsert_with_unchanged_value_writes_nothing() -> None:
    store = Store(UPSERT)
    store.scan([Sent("k", "same")])
    store.scan([Sent("k", "same", offset=1)])
    assert store.rows == {("k", "same"): 1}
    assert store.changes == 1


RECORDS = st.lists(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["x", "y", None])), max_size=6),
    max_size=5,
)


@given(RECORDS, st.integers(1, 3))
def test_upsert_ticks_equal_dictionary_of_last_values(
    ticks: list[list[tuple[str, str | None]]], tasks: int
) -> None:
    store, wanted, offset = Store(UPSERT), dict[str, str](), 0
    for tick in ticks:
        sent = []
        for key, value in tick:
            sent.append(Sent(key, value, 0, offset, offset))
            offset += 1
            wanted.pop(key, None)
            if value is not None:
                wanted[key] = value
        half = len(sent) // 2
        store.scan(sent[:half], sent[half:], tasks=tasks)
        assert store.rows == dict.fromkeys(wanted.items(), 1)


def test_planted_bug_of_keeping_first_record_of_key_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    last = last_by_key
    monkeypatch.setattr(
        topic_scan,
        "last_by_key",
        lambda rows, key, order, unavailable: last(rows.slice(0, 1), key, order),
    )
    with pytest.raises(AssertionError):
        test_a_backlog_of_one_key_is_one_change()


# Debezium.


def event(
    op: str, id: int | None, name: str | None, *, lsn: int | None, at: int | None = None, **of: Any
) -> str:
    """Return a change event whose timestamp is its LSN unless `at` is given."""
    row = None if name is None else {"id": id, "name": name}
    source = {"connector": "postgresql", **of}
    if lsn is not None:
        source |= {"sequence": json.dumps([None, str(lsn)]), "ts_ms": lsn if at is None else at}
    body: dict[str, Any] = {"op": op, "before": None, "after": row}
    if op == "d":
        body["before"], body["after"] = {"id": id, "name": ""}, None
    return json.dumps({**body, "source": source})


def test_debezium_events_produce_rows_of_the_table() -> None:
    store = Store(DEBEZIUM)
    store.scan(
        [
            Sent("1", event("r", 1, "Ada", lsn=None), offset=0),
            Sent("2", event("c", 2, "Bea", lsn=10), offset=1),
            Sent("1", event("u", 1, "Ann", lsn=20), offset=2),
            Sent("2", event("d", 2, None, lsn=30), offset=3),
            Sent("2", None, offset=4),
        ]
    )
    assert store.rows == {(1, "Ann"): 1}
    assert not store.errors
    store.scan([Sent("1", event("d", 1, None, lsn=40), offset=5)])
    assert store.rows == {}


def test_events_that_a_restarted_connector_sends_again_are_dropped() -> None:
    store = Store(DEBEZIUM)
    events = [
        event("c", 1, "Ada", lsn=10),
        event("u", 1, "Ann", lsn=20),
        event("u", 1, "Eve", lsn=30),
    ]
    store.scan([Sent("1", each, offset=at) for at, each in enumerate(events)])
    # The connector had confirmed none of them. A reader in between must not see Ada again.
    store.scan([Sent("1", events[0], offset=3)])
    assert store.rows == {(1, "Eve"): 1}
    store.scan([Sent("1", events[1], offset=4), Sent("1", events[2], offset=5)])
    assert store.rows == {(1, "Eve"): 1}
    again = [event("u", 1, "Ida", lsn=40), event("u", 1, "Eve", lsn=30)]
    store.scan([Sent("1", each, offset=6 + at) for at, each in enumerate(again)])
    assert store.rows == {(1, "Ida"): 1}
    assert store.duplicates == 3


def test_debezium_event_with_lower_lsn_and_later_time_is_new() -> None:
    """After a restore the position is lower and the timestamp is later."""
    store = Store(DEBEZIUM)
    store.scan([Sent("1", event("c", 1, "Ada", lsn=1_000, at=50), offset=0)])
    store.scan([Sent("1", event("u", 1, "Ann", lsn=10, at=60), offset=1)])
    assert store.rows == {(1, "Ann"): 1}
    # From there on, the source also recognises duplicates.
    store.scan([Sent("1", event("u", 1, "Eve", lsn=20, at=70), offset=2)])
    store.scan([Sent("1", event("u", 1, "Ann", lsn=10, at=60), offset=3)])
    assert store.rows == {(1, "Eve"): 1}
    assert store.duplicates == 1


def test_debezium_positions_of_two_databases_are_not_compared() -> None:
    store = Store(DEBEZIUM)
    store.scan(
        [
            Sent("1", event("c", 1, "Ada", lsn=1_000, db="a"), offset=0),
            Sent("2", event("c", 2, "Bea", lsn=10, db="b"), offset=1),
        ]
    )
    assert store.rows == {(1, "Ada"): 1, (2, "Bea"): 1}


@given(st.data())
def test_debezium_resent_events_never_bring_back_an_earlier_state(data: st.DataObject) -> None:
    """Cover one log, timestamps that decrease a little, and resends of any unconfirmed event."""
    count = data.draw(st.integers(1, 12))
    times = [10 * n + data.draw(st.integers(-15, 15)) for n in range(count)]
    sent, n = list[int](), 0
    while n < count:
        sent.append(n)
        n = data.draw(st.integers(max(0, n - 4), n)) if data.draw(st.booleans()) else n + 1
        if len(sent) > 60:
            n = sent[-1] + 1
    store, seen = Store(DEBEZIUM), list[int]()
    offset = 0
    while offset < len(sent):
        size = data.draw(st.integers(1, 5))
        ticked = sent[offset : offset + size]
        store.scan(
            [
                Sent("1", event("u", 1, str(n), lsn=10 + n, at=times[n]), offset=offset + at)
                for at, n in enumerate(ticked)
            ]
        )
        ((_, name),) = store.rows
        seen.append(int(name))
        assert seen[-1] == max(sent[: offset + size])
        offset += size
    assert seen[-1] == count - 1


def test_planted_bug_of_applying_duplicate_events_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = find_duplicates

    def none_of_them(*given: Any) -> Any:
        again, marked = real(*given)
        return np.zeros_like(again), marked

    monkeypatch.setattr(topic_scan, "find_duplicates", none_of_them)
    with pytest.raises(AssertionError):
        test_events_that_a_restarted_connector_sends_again_are_dropped()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("not json", "it is not JSON"),
        ('{"op":"c","after":{"id":"x"}}', 'column "id" is bigint'),
        ('{"op":"c","after":{"id":99999999999999999999}}', 'column "id"'),
        ('{"op":"c"}', "it has no after"),
        ('{"op":"q","after":{"id":1}}', 'its op is "q"'),
        ('{"id":1,"name":"flattened"}', "it has no op"),
        ('{"kind":"payload"}', "it has no op"),
        ('{"a":{"payload":1}}', "it has no op"),
        ('{"op":"c","after":{"id":null,"name":"x"}}', 'column "id" of its key is null'),
        (
            '{"op":"c","after":{"id":2,"name":"__debezium_unavailable_value"}}',
            'it creates a row without the value of column "name"',
        ),
    ],
)
def test_debezium_invalid_event_is_dead_lettered_with_reason(value: str, reason: str) -> None:
    store = Store(DEBEZIUM)
    store.scan([Sent("1", value, offset=7), Sent("1", event("c", 1, "Ada", lsn=1), offset=8)])
    assert store.rows == {(1, "Ada"): 1}
    (error,) = store.errors
    assert (error["offset"], error["value"]) == (7, value.encode())
    assert reason in error["reason"]


WORD = "__debezium_unavailable_value"


@given(st.data())
def test_debezium_update_with_unavailable_value_keeps_stored_value(data: st.DataObject) -> None:
    """The earlier event may be in the same tick or in an earlier one."""
    store, wanted, sent = Store(DEBEZIUM), dict[int, str](), list[Sent]()
    for at in range(data.draw(st.integers(1, 10))):
        id, deed = data.draw(st.integers(1, 2)), data.draw(st.sampled_from(["u", "same", "d"]))
        if id not in wanted:
            wanted[id] = f"made at {at}"
            told = event("c", id, wanted[id], lsn=at)
        elif deed == "same":
            told = event("u", id, WORD, lsn=at)
        elif deed == "u":
            wanted[id] = f"changed at {at}"
            told = event("u", id, wanted[id], lsn=at)
        else:
            del wanted[id]
            told = event("d", id, None, lsn=at)
        sent.append(Sent(str(id), told, offset=at))
        if data.draw(st.booleans()):
            store.scan(sent)
            sent = []
    store.scan(sent)
    assert store.rows == dict.fromkeys(wanted.items(), 1)


def test_debezium_unavailable_value_of_missing_row_raises_definite_error() -> None:
    store = Store(DEBEZIUM)
    with pytest.raises(DefiniteError) as told:
        store.scan([Sent("1", event("u", 1, WORD, lsn=1), offset=0)])
    assert 'topic "clicks" has an update without the value of column "name"' in str(told.value)
    assert str(told.value).endswith("not known: id 1")


def test_debezium_truncate_and_delete_without_row_are_dead_lettered() -> None:
    store = Store(DEBEZIUM)
    unknown = json.dumps({"op": "d", "before": None, "after": None, "source": {}})
    store.scan([Sent("1", event("t", 0, None, lsn=1)), Sent("1", unknown, offset=1)])
    assert [error["offset"] for error in store.errors] == [0, 1]
    assert "truncated" in store.errors[0]["reason"]


def test_layout_with_missing_or_invalid_key_raises_usage_error() -> None:
    with pytest.raises(UsageError, match="needs the format of record keys"):
        OutputSchema("upsert", VALUE)
    with pytest.raises(UsageError, match="identifies rows by the keys of records: key"):
        OutputSchema("upsert", VALUE, KEY, named=("value",))
    with pytest.raises(UsageError, match="needs the key columns of the rows"):
        OutputSchema("debezium", DebeziumJson(ROW))
    with pytest.raises(UsageError, match='key column "no" does not exist'):
        OutputSchema("none", VALUE, named=("no",))


def test_bad_records_without_dead_letter_collection_are_counted_and_reported() -> None:
    store = Store(OutputSchema("none", ROW), dead_letter=False)
    (told,) = store.scan(
        [Sent(None, "{}", offset=4), Sent(None, "oops", 1, 7), Sent(None, "[", 0, 9)]
    )
    assert told.bad == 2
    assert told.first_bad[:3] == ("clicks", 0, 9)
    assert len(store.rows) == 1
