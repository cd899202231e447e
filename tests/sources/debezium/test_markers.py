"""Debezium transaction metadata records in JSON and Avro."""

import io
import json
from typing import Any

import fastavro
import pytest

from penstock.sources.debezium.markers import MarkersAvro, MarkersJson
from penstock.sources.formats import AvroFormat
from tests.sources.formats.given import column, decoded, reasons

SCHEMA = {
    "type": "record",
    "name": "TransactionMetadataValue",
    "fields": [
        {"name": "status", "type": "string"},
        {"name": "id", "type": "string"},
        {"name": "event_count", "type": ["null", "long"]},
        {
            "name": "data_collections",
            "type": [
                "null",
                {
                    "type": "array",
                    "items": {
                        "type": "record",
                        "name": "Block",
                        "fields": [
                            {"name": "data_collection", "type": "string"},
                            {"name": "event_count", "type": "long"},
                        ],
                    },
                },
            ],
        },
        {"name": "ts_ms", "type": "long"},
    ],
}
BEGIN = {
    "status": "BEGIN",
    "id": "571:53195829",
    "event_count": None,
    "data_collections": None,
    "ts_ms": 3,
}
END = BEGIN | {
    "status": "END",
    "id": "571:53195832",
    "event_count": 3,
    "data_collections": [
        {"data_collection": "s.a", "event_count": 2},
        {"data_collection": "s.b", "event_count": 1},
    ],
}


def bare(text: Any) -> bytes:
    return json.dumps(text).encode()


def wrapped(text: Any) -> bytes:
    return json.dumps({"schema": {"type": "struct"}, "payload": text}).encode()


def in_avro(text: Any) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, SCHEMA, text)
    return out.getvalue()


@pytest.mark.parametrize(
    ("markers", "written"),
    [
        (MarkersJson(), bare),
        (MarkersJson(), wrapped),
        (MarkersAvro(AvroFormat(json.dumps(SCHEMA))), in_avro),
    ],
    ids=["json", "json with its schema", "avro"],
)
def test_transaction_metadata_record_decodes_into_status_id_and_event_counts(
    markers: Any, written: Any
) -> None:
    empty = END | {"data_collections": None}
    found = decoded(markers, written(BEGIN), None, written(END), written(empty))
    assert found.bad == ()
    assert column(found, "status") == ["BEGIN", None, "END", "END"]
    assert column(found, "id") == ["571:53195829", None, "571:53195832", "571:53195832"]
    assert column(found, "counts") == [None, None, '{"s.a":2,"s.b":1}', "{}"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"{", "JSON"),
        (bare({"op": "c"}), "does not name the transaction"),
        (bare({"status": "END"}), "does not name the transaction"),
        (bare({"status": "OVER", "id": "1"}), "does not name the transaction"),
        (bare(END | {"data_collections": [{"n": 1}]}), "does not have the number of events"),
    ],
)
def test_transaction_metadata_record_that_is_malformed_is_bad(text: bytes, reason: str) -> None:
    (told,) = reasons(decoded(MarkersJson(), text))
    assert reason in told
