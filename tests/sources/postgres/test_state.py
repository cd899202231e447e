"""Values in the state store: they are a format at rest and must not change."""

from collections.abc import Mapping
from typing import Any

import pytest

from penstock.errors import DefiniteError
from penstock.sources.postgres import state
from penstock.sources.postgres.stream_reader import StreamTransaction
from penstock.sources.postgres.table_state import TableState
from penstock.sources.postgres.tracked_table import TrackedTable
from tests.sources.postgres.test_stream_reader import OID, table

ERROR = {"error": "it failed", "error_detail": "Why.", "error_hint": "Fix it."}
NO_ERROR = {"error": "", "error_detail": "", "error_hint": ""}

GOLDEN: Mapping[TableState, Mapping[str, Any]] = {
    TableState.LOADING: {"phase": "loading", "seen": False, **NO_ERROR, "has_collection": True},
    TableState.LOADING_REJECTED: {
        "phase": "loading", "seen": False, **ERROR, "has_collection": True,
    },
    TableState.LOADED: {"phase": "loaded", "seen": False, **NO_ERROR, "has_collection": True},
    TableState.LOADED_REJECTED: {
        "phase": "loaded", "seen": False, **ERROR, "has_collection": True,
    },
    TableState.LIVE: {"phase": "live", "seen": True, **NO_ERROR, "has_collection": True},
    TableState.ERRORED: {"phase": "errored", "seen": True, **ERROR, "has_collection": True},
    TableState.ERRORED_HIDDEN: {
        "phase": "errored", "seen": False, **ERROR, "has_collection": True,
    },
    TableState.UNTRACKABLE: {
        "phase": "errored", "seen": False, **ERROR, "has_collection": False,
    },
}  # fmt: skip
"""Fields of a stored table that depend on its state, as earlier versions wrote them."""


def column_value(name: str, number: int, oid: int, kind: str, category: str) -> dict[str, Any]:
    column_type = {
        "oid": oid, "name": kind, "kind": "b", "category": category,
        "element": None, "base": None, "typmod": -1,
    }  # fmt: skip
    return {
        "name": name, "number": number, "type": column_type, "typmod": -1, "dimensions": 0,
        "nullable": True, "generated": False, "missing": None, "has_missing": False,
    }  # fmt: skip


COLUMNS = [
    column_value("id", 1, 23, "integer", "N"),
    column_value("title", 2, 25, "text", "S"),
    column_value("body", 3, 25, "text", "S"),
]

COMMON: Mapping[str, Any] = {
    "source": "shop",
    "described": {
        "oid": 16400, "schema": "public", "name": "posts", "kind": "r", "persistence": "p",
        "replica_identity": "d", "columns": COLUMNS, "primary_key": ["id"], "identity": ["id"],
        "published": True, "published_columns": None, "streamed": ["id", "title", "body"],
        "row_filter": None, "filter_columns": [], "leaves": [], "ancestors": [], "pages": 1,
        "estimated_rows": 1, "bytes": 1,
    },
    "spec": {"name": {"schema": "public", "name": "posts"}, "exclude": [], "text": []},
    "snapshot_lsn": 100,
    "attempt": "a1",
    "kept": [{"shape": column, "learned": False} for column in COLUMNS],
    "key_columns": ["id"],
    "collection": "shop.public.posts",
    "truncate_order": 3,
}  # fmt: skip


class StoredValues:
    """State store in memory."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = dict(values)

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def names(self) -> list[str]:
        return sorted(self.values)

    def put(self, values: Mapping[str, Any]) -> None:
        self.values |= values


def tracked(table_state: TableState) -> TrackedTable:
    error = DefiniteError("it failed", detail="Why.", hint="Fix it.")
    return TrackedTable(
        table(),
        table_state,
        100,
        "a1",
        truncate_order=3,
        error=error if table_state.stored.has_error else None,
    )


def test_every_durable_state_has_a_golden_value() -> None:
    assert GOLDEN.keys() == {*TableState} - {TableState.REMOVED}


@pytest.mark.parametrize("table_state", GOLDEN, ids=lambda each: each.name)
def test_stored_table_equals_golden_value(table_state: TableState) -> None:
    stored = state.tables([tracked(table_state)])
    assert stored == {f"table/{OID}": {**COMMON, **GOLDEN[table_state]}}


@pytest.mark.parametrize("table_state", GOLDEN, ids=lambda each: each.name)
def test_durable_state_is_read_back_from_golden_value(table_state: TableState) -> None:
    values = StoredValues({f"table/{OID}": {**COMMON, **GOLDEN[table_state]}})
    (read,) = state.read_state(values).tables
    expected = tracked(table_state)
    assert read.state is table_state
    assert (read.table, read.pending) == (expected.table, expected.pending)
    assert (read.snapshot_lsn, read.truncate_order) == (100, 3)
    if expected.error is None:
        assert read.error is None
    else:
        assert read.error is not None
        texts = (str(read.error), read.error.detail, read.error.hint)
        assert texts == ("it failed", "Why.", "Fix it.")


def test_state_of_removed_table_is_deleted() -> None:
    removed = TrackedTable(table(), TableState.REMOVED)
    assert state.tables([removed]) == {f"table/{OID}": None}


def test_values_of_slot_and_stream_equal_golden_values() -> None:
    transaction = StreamTransaction(xid=7, commit_lsn=100, committed_us=1)
    assert state.streamed(120, transaction) == {
        "streamed": {"lsn": 120, "last": {"xid": 7, "commit_lsn": 100, "committed_us": 1}}
    }
    assert state.streamed(120, None) == {"streamed": {"lsn": 120, "last": None}}
    assert state.slot_intended("s", replaces="r") == {
        "slot": {"name": "s", "consistent_point": 0, "replaces": "r"}
    }
    assert state.slot_created("s", 9) == {
        "slot": {"name": "s", "consistent_point": 9, "replaces": ""}
    }
    lost = state.LostStream("s", "why", shared=True)
    assert state.lost(lost) == {"lost": {"slot": "s", "reason": "why", "shared": True}}
    assert state.lost(None) == {"lost": None}
    assert state.order(4) == {"order": 4}
