"""Debezium change events in JSON and Avro."""

import io
import json
from typing import Any

import fastavro
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import UsageError
from penstock.sources.debezium.envelope import DebeziumAvro, DebeziumJson
from penstock.sources.formats import AvroFormat, JsonFormat
from tests.sources.formats.given import column, decoded, reasons

JSON = DebeziumJson(JsonFormat.of({"id": "bigint", "name": "text"}))
NOTHING = dict.fromkeys(JSON.schema.names)


def event(op: Any, *, before: Any = None, after: Any = None, **more: Any) -> dict[str, Any]:
    return {"before": before, "after": after, "op": op, "ts_ms": 5, **more}


def bare(text: dict[str, Any]) -> bytes:
    return json.dumps(text).encode()


def wrapped(text: dict[str, Any] | None) -> bytes:
    schema = {"type": "struct", "fields": [{"field": "op"}, {"field": "payload"}]}
    return json.dumps({"schema": schema, "payload": text}).encode()


def postgres(commit: int | None, lsn: int, **more: Any) -> dict[str, Any]:
    sequence = json.dumps([None if commit is None else str(commit), str(lsn)])
    source = {"connector": "postgresql", "lsn": lsn, "snapshot": "false", "sequence": sequence}
    return source | more


def mysql(file: str, pos: int, row: int, **more: Any) -> dict[str, Any]:
    return {"connector": "mysql", "snapshot": "false", "file": file, "pos": pos, "row": row} | more


def sql_server(commit: str, change: str | None, serial: int | None, **more: Any) -> dict[str, Any]:
    return {
        "connector": "sqlserver", "snapshot": "false", "commit_lsn": commit,
        "change_lsn": change, "event_serial_no": serial,
    } | more  # fmt: skip


@pytest.mark.parametrize("written", [bare, wrapped], ids=["bare", "with its schema"])
def test_debezium_json_event_decodes_into_op_rows_and_transaction(written: Any):
    row = {"id": 1, "name": "x", "more": [1]}
    transaction = {"id": "571:53195829", "total_order": 3, "data_collection_order": 2}
    found = decoded(
        JSON,
        written(event("c", after=row, source=postgres(1, 2), transaction=transaction)),
        written(event("u", before=row, after=row | {"name": None}, transaction=None)),
        written(event("d", before=row)),
        written(event("d")),
        written(event("r", after=row)),
        written(event("t")),
        written(event("m", message={"prefix": "p"})),
        None,
    )
    kept = {"id": 1, "name": "x"}
    assert found.bad == ()
    assert column(found, "op") == ["c", "u", "d", "d", "r", "t", "m", None]
    assert column(found, "before") == [None, kept, kept, *[None] * 5]
    assert column(found, "after") == [kept, {"id": 1, "name": None}, None, None, kept, *[None] * 3]
    assert column(found, "transaction") == ["571:53195829", *[None] * 7]
    assert column(found, "total_order") == [3, *[None] * 7]
    assert column(found, "data_collection_order") == [2, *[None] * 7]


def test_debezium_json_batch_may_mix_records_with_and_without_schema():
    text = event("c", after={"id": 1})
    found = decoded(JSON, bare(text), wrapped(text), None, bare(text), b"x", wrapped(text))
    assert column(found, "op") == ["c", "c", None, "c", None, "c"]
    assert [bad.row for bad in found.bad] == [4]


def test_debezium_json_row_with_payload_column_is_not_taken_for_a_schema_wrapper():
    a_format = DebeziumJson(JsonFormat.of({"payload": "json", "schema": "text"}))
    row = {"payload": {"op": "x"}, "schema": "s"}
    found = decoded(a_format, bare(event("c", after=row)), wrapped(event("c", after=row)))
    assert column(found, "after") == [{"payload": '{"op": "x"}', "schema": "s"}] * 2


def test_debezium_json_record_with_null_payload_decodes_as_tombstone():
    found = decoded(JSON, wrapped(None), b'{"schema":null,"payload":null}')
    assert found.bad == ()
    assert found.rows.to_pylist() == [NOTHING] * 2


NO_EVENTS = [
    (b"{}", "it has no op, so it is not a change event of Debezium"),
    (b'{"schema":{}}', "it has no op, so it is not a change event of Debezium"),
    (wrapped({}), "it has no op, so it is not a change event of Debezium"),
    (bare(event("x")), 'its op is "x", and not one of c, u, d, r, t, m'),
    (bare(event(5)), 'column "op" is text, but the record has a number there'),
    (bare(event("c")), 'its op is "c", but it has no after'),
    (bare(event("u", before={"id": 1})), 'its op is "u", but it has no after'),
    (bare(event("c", after=[1])), "its after is not an object"),
    (bare(event("d", before="x")), "its before is not an object"),
    (bare(event("c", after={"id": "x"})),
     'after: column "id" is bigint, but the record has text there'),
    (bare(event("u", before={"name": 1}, after={})),
     'before: column "name" is text, but the record has a number there'),
    (b"[]", "it is an array, and not an object"),
    (b"", "it is empty"),
    (b"\xff", "it is not UTF-8, from byte 0 on"),
]  # fmt: skip


@pytest.mark.parametrize(("record", "reason"), NO_EVENTS)
def test_debezium_json_record_that_is_no_change_event_is_bad(record: bytes, reason: str):
    found = decoded(JSON, bare(event("d")), record, None)
    assert [(bad.row, bad.reason) for bad in found.bad] == [(1, reason)]
    assert column(found, "op") == ["d", None, None]


def positions(*sources: dict[str, Any], ops: str | None = None) -> list[bytes | None]:
    text = [
        bare(event(op, after={"id": 1}, source=source))
        for source, op in zip(sources, ops or "c" * len(sources), strict=True)
    ]
    found = decoded(JSON, *text)
    assert found.bad == ()
    return list(column(found, "position"))


IN_ORDER = [
    [postgres(None, 5), postgres(10, 11), postgres(10, 12), postgres(10, 2000), postgres(300, 15),
     postgres(2**40, 1), postgres(2**40, 2**41)],
    [mysql("mysql-bin.000009", 900, 0), mysql("mysql-bin.000010", 4, 0),
     mysql("mysql-bin.000010", 4, 1), mysql("mysql-bin.000010", 4, 10),
     mysql("mysql-bin.000010", 300, 0), mysql("mysql-bin.999999", 4, 0),
     mysql("mysql-bin.1000000", 4, 0)],
    [sql_server("00000027:00000ac0:0002", "00000027:00000ac0:0001", 1),
     sql_server("00000027:00000AC0:000a", "00000027:00000AC0:0001", None),
     sql_server("0000002a:00000001:0001", "00000001:00000001:0001", 1)],
]  # fmt: skip


@pytest.mark.parametrize("sources", IN_ORDER, ids=["postgres", "mysql", "sql server"])
def test_debezium_positions_sort_in_log_order(sources: list[dict[str, Any]]):
    found = positions(*sources)
    assert None not in found
    assert found == sorted(set(found), key=found.index)
    assert found == sorted(found)  # type: ignore[type-var]


def test_debezium_delete_position_sorts_before_create_at_same_log_position():
    for source in (postgres(1, 2), mysql("b.1", 2, 3)):
        deleted, created = positions(source, source, ops="dc")
        assert deleted is not None
        assert created is not None
        assert deleted < created


def test_sql_server_events_of_one_transaction_have_equal_positions():
    """The change_lsn of SQL Server can decrease within a transaction."""
    first = sql_server("00000027:00000ac0:0002", "00000027:00000ac0:0009", 1)
    second = sql_server("00000027:00000ac0:0002", "00000027:00000ac0:0001", 2)
    assert len(set(positions(first, second, first, ops="dcc"))) == 1


def test_debezium_origin_differs_per_server_and_database():
    sources = [
        mysql("b.1", 1, 0, server_id=1), mysql("b.1", 1, 0, server_id=2),
        postgres(1, 2, name="a", db="x"), postgres(1, 2, name="a", db="y"),
        postgres(1, 2, name="b", db="x"),
    ]  # fmt: skip
    text = [bare(event("c", after={"id": 1}, source=each)) for each in sources]
    assert len(set(column(decoded(JSON, *text), "origin"))) == len(sources)


NOWHERE = [
    postgres(1, 2, snapshot="true"),
    postgres(1, 2, snapshot=True),
    postgres(1, 2, snapshot="last"),
    postgres(1, 2, snapshot="incremental"),
    {"connector": "postgresql", "lsn": 5},
    postgres(1, 2, sequence="[]"),
    postgres(1, 2, sequence='["x","2"]'),
    postgres(1, 2, sequence=5),
    mysql("binlog", 1, 2),
    mysql("b.1", 1, 2) | {"row": None},
    mysql("b.1", -1, 2),
    mysql("b.1", 1, 2) | {"pos": "x"},
    sql_server("nonsense", "00000027:00000ac0:0002", 1),
    {"connector": "oracle", "scn": "5"},
    {},
]


@pytest.mark.parametrize("source", NOWHERE, ids=json.dumps)
def test_debezium_event_without_log_position_has_null_position(source: dict[str, Any]):
    assert positions(source) == [None]


def test_debezium_event_with_boolean_or_missing_snapshot_field_has_position():
    assert positions(postgres(1, 2, snapshot=False)) == positions(postgres(1, 2))
    assert positions({"connector": "mariadb", "file": "a.1", "pos": 1, "row": 0}) != [None]


@given(st.lists(st.tuples(st.integers(0, 2**59), st.integers(0, 2**59)), min_size=1))
def test_postgres_positions_sort_by_commit_lsn_and_lsn(pairs: list[tuple[int, int]]):
    found = positions(*(postgres(commit, lsn) for commit, lsn in pairs))
    assert sorted(range(len(pairs)), key=lambda i: pairs[i]) == sorted(
        range(len(pairs)),
        key=lambda i: found[i],  # type: ignore[arg-type,return-value]
    )


ROW = {
    "type": "record", "name": "Value", "namespace": "shop.orders",
    "fields": [{"name": "id", "type": "long"},
               {"name": "name", "type": ["null", "string"], "default": None}],
}  # fmt: skip
ENVELOPE = {
    "type": "record", "name": "Envelope", "namespace": "shop.orders",
    "fields": [
        {"name": "before", "type": ["null", ROW], "default": None},
        {"name": "after", "type": ["null", "Value"], "default": None},
        {"name": "source", "type": {"type": "record", "name": "Source", "fields": [
            {"name": "connector", "type": "string"},
            {"name": "snapshot", "type": [{"type": "string"}, "null"], "default": "false"},
            {"name": "sequence", "type": ["null", "string"], "default": None},
            {"name": "file", "type": ["null", "string"], "default": None},
            {"name": "pos", "type": ["null", "long"], "default": None},
            {"name": "row", "type": ["null", "int"], "default": None},
        ]}},
        {"name": "transaction", "type": ["null", {"type": "record", "name": "block", "fields": [
            {"name": "id", "type": "string"},
            {"name": "total_order", "type": "long"},
            {"name": "data_collection_order", "type": "long"},
        ]}], "default": None},
        {"name": "op", "type": "string"},
        {"name": "ts_ms", "type": ["null", "long"], "default": None},
    ],
}  # fmt: skip


def in_avro(text: dict[str, Any]) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(ENVELOPE), text)
    return out.getvalue()


def test_debezium_avro_and_json_decode_same_events_equally():
    transaction = {"id": "5", "total_order": 3, "data_collection_order": 2}
    row = {"id": 1, "name": None}
    events = [
        event("c", after=row, source=postgres(1, 2), transaction=transaction),
        event("u", before=row, after=row, source=postgres(1, 3)),
        event("d", before=row, source=mysql("b.5", 6, 7)),
        event("r", after=row, source=postgres(1, 2, snapshot="true")),
    ]
    events[2]["source"] |= {"sequence": None}
    avro = DebeziumAvro(AvroFormat(json.dumps(ENVELOPE)))
    found = decoded(avro, None, *map(in_avro, events))
    expected = decoded(JSON, None, *map(bare, events))
    assert found.bad == expected.bad == ()
    assert found.rows.to_pylist() == expected.rows.to_pylist()


def test_debezium_avro_record_that_is_no_change_event_is_bad():
    avro = DebeziumAvro(AvroFormat(json.dumps(ENVELOPE)))
    source = {"connector": "x"}
    found = decoded(
        avro, b"", in_avro(event("x", source=source)), in_avro(event("c", source=source)), None
    )
    assert reasons(found) == [
        "it is not Avro of its schema",
        'its op is "x", and not one of c, u, d, r, t, m',
        'its op is "c", but it has no after',
    ]


def test_debezium_avro_with_schema_without_envelope_raises_usage_error():
    for schema in (ROW, "string", ENVELOPE | {"fields": ENVELOPE["fields"][:2]}):
        with pytest.raises(UsageError, match="not an envelope of Debezium"):
            DebeziumAvro(AvroFormat(json.dumps(schema)))
