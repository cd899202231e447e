"""Status of tasks: the stored JSON objects, and what older releases stored."""

import pytest

from penstock.errors import DefiniteError, InternalError
from penstock.supervisor.status import (
    ErrorStatus,
    MaterializationStatus,
    SourceStatus,
    State,
    TaskStatus,
)

POSTGRES = {
    "kind": "postgres",
    "server": "db.example:5432/shop",
    "phase": "following",
    "lsn": "0/1A2B000",
    "lag_bytes": 0,
    "lag_ms": 0,
    "slot": "penstock_shop",
    "slot_bytes": None,
    "slot_warning": "",
    "waits_for": "",
    "tables": [
        {
            "name": "public.t",
            "collection": "shop.public.t",
            "phase": "errored",
            "rows": 3,
            "estimated_rows": 5,
            "bytes": 8_192,
            "error": "table public.t has changed",
            "error_detail": "Its key is another.",
            "error_hint": "Copy it again.",
        }
    ],
    "connected": True,
    "catching_up": False,
    "rows": 3,
    "bytes": 120,
    "counted_since_ms": 1_700_000_000_000,
    "as_of": None,
    "written_ms": 1_700_000_000_500,
}
DISCONNECTED = {
    **POSTGRES,
    "phase": "retrying",
    "lag_bytes": None,
    "lag_ms": None,
    "waits_for": "no route to host.",
    "connected": False,
    "disconnected_since_ms": 1_700_000_000_400,
    "disconnected_reason": "no route to host.",
    "error": None,
}
OPENING = {
    "kind": "kafka",
    "phase": "opening",
    "waits_for": "",
    "error": None,
    "connected": False,
    "disconnected_since_ms": 1_700_000_000_000,
    "disconnected_reason": "the connection is being opened",
    "written_ms": 1_700_000_000_000,
}
STOPPED = {
    **OPENING,
    "phase": "stopped",
    "error": {"message": "topic was deleted", "detail": "", "hint": "Drop it."},
}
KAFKA = {
    "kind": "kafka-topics",
    "server": "broker:9092/a, b",
    "phase": "copying",
    "topic_id": "Zm9v",
    "position": "a-0:3",
    "lag_records": None,
    "bad_records": 1,
    "sent_again": 0,
    "waiting_events": 2,
    "waits_for": "",
    "partitions": [
        {"partition": "a-0", "offset": 3, "end": 5},
        {"partition": 1, "offset": 0, "end": 0},
    ],
    "tables": [],
    "connected": True,
    "catching_up": True,
    "rows": 0,
    "bytes": 0,
    "counted_since_ms": 1_700_000_000_000,
    "as_of": 1_700_000_000_000,
    "written_ms": 1_700_000_000_000,
}
MATERIALIZATION = {
    "phase": "degraded",
    "upper": 45,
    "lag_ms": None,
    "waits_for": "commit since 2023-11-14T22:13:20Z",
    "waiting": {"step": "commit", "since_ms": 1_700_000_000_000},
    "left_behind": ["shop.t"],
    "degraded": [
        {
            "collection": "shop.t",
            "time": 45,
            "message": "slot is gone",
            "detail": "It was dropped.",
            "hint": "Copy it again.",
        }
    ],
    "documents": 7,
    "bytes": 70,
    "transactions": 2,
    "counted_since_ms": 1_700_000_000_000,
    "last_transaction": {"opened_ms": 1, "read_ms": 2, "stored_ms": 3, "committed_ms": 4},
    "bindings": [
        {
            "collection": "shop.t",
            "resource": "t",
            "delta_updates": False,
            "deletes": True,
            "documents": 7,
            "bytes": 70,
        }
    ],
    "error": None,
}
OLD_MATERIALIZATION = {
    key: value
    for key, value in MATERIALIZATION.items()
    if key not in ("waiting", "degraded", "counted_since_ms")
}
"""Status of a release that stored fewer keys."""


@pytest.mark.parametrize("stored", [POSTGRES, DISCONNECTED, OPENING, STOPPED, KAFKA, {}])
def test_source_status_is_stored_with_the_same_keys_and_values(stored):
    assert SourceStatus.parse(stored).to_json() == stored


@pytest.mark.parametrize("stored", [MATERIALIZATION, OLD_MATERIALIZATION, {}])
def test_materialization_status_is_stored_with_the_same_keys_and_values(stored):
    assert MaterializationStatus.parse(stored).to_json() == stored


def test_updated_status_has_the_added_keys():
    status = SourceStatus.parse({"kind": "postgres"}).updated(as_of=None, rows=2)
    assert status.to_json() == {"kind": "postgres", "as_of": None, "rows": 2}


def test_unknown_keys_of_stored_status_are_ignored():
    status = SourceStatus.parse({"kind": "postgres", "keys": 7, "colour": "red"})
    assert status.to_json() == {"kind": "postgres"}


def test_stored_status_with_wrong_type_raises_internal_error():
    with pytest.raises(InternalError, match="stored status is malformed"):
        SourceStatus.parse({"rows": "many"})


@pytest.mark.parametrize(
    ("stored", "error"),
    [
        (None, None),
        ("", None),
        ("slot is lost", ErrorStatus("slot is lost")),
        ({"message": "slot is lost", "hint": None}, ErrorStatus("slot is lost")),
    ],
)
def test_stored_error_is_an_object_or_a_message(stored, error):
    assert ErrorStatus.parse(stored) == error


def test_error_status_of_an_error_has_its_texts():
    error = DefiniteError("slot is lost", detail="It was dropped.", hint="Create it.")
    assert ErrorStatus.of(error) == ErrorStatus("slot is lost", "It was dropped.", "Create it.")
    assert ErrorStatus.of(OSError("boom")) == ErrorStatus("OSError('boom')")


def test_task_status_as_json_has_the_kind_of_the_task():
    error = ErrorStatus("away")
    status = TaskStatus("source", State.RESTARTING, 2, error, SourceStatus.parse(OPENING))
    assert status.to_json() == {
        **OPENING,
        "kind": "source",
        "state": "restarting",
        "restarts": 2,
        "error": {"message": "away", "detail": "", "hint": ""},
    }
    assert (status.phase, status.source.connected, status.materialization.upper) == (
        "opening",
        False,
        0,
    )
