"""Tables of a source without a server: visibility, errors and requests for a resync."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.errors import DefiniteError, UsageError
from penstock.sources.postgres.drift_repair import DriftRepair
from penstock.sources.postgres.table_set import TableSet
from penstock.sources.postgres.table_state import TableState
from penstock.sources.postgres.tick_reader import TickReader

BOUND = 50


def tracked(oid: int, state: TableState, **changed: Any) -> SimpleNamespace:
    known = {"error": None, "snapshot_lsn": BOUND}
    table = SimpleNamespace(oid=oid, name=f"public.t{oid}")
    return SimpleNamespace(table=table, state=state, **(known | changed))


def table_set(*tables: SimpleNamespace) -> TableSet:
    """Return a table set without a server."""
    created = TableSet.__new__(TableSet)
    created.name, created.resync_request = "shop", None
    created.tables = {entry.table.oid: cast("Any", entry) for entry in tables}
    return created


class RecordingReader(TickReader):
    """Reader of a tick that records which tables fail and become visible."""

    def __init__(self, tables: TableSet, **errors: DefiniteError) -> None:
        super().__init__(cast("Any", None), tables, relations={}, order=0)
        self.errors = {int(oid[1:]): error for oid, error in errors.items()}
        self.failed: list[tuple[int, DefiniteError]] = []
        self.visible: list[int] = []

    def _fail(self, entry: Any, error: DefiniteError) -> None:
        self.failed.append((entry.table.oid, error))
        entry.state = TableState.UNTRACKABLE

    def _make_visible(self, entry: Any) -> None:
        self.visible.append(entry.table.oid)


def test_hidden_table_with_an_error_fails_and_does_not_delay_others() -> None:
    error = DefiniteError("as requested")
    tables = table_set(
        tracked(1, TableState.LOADING),
        tracked(2, TableState.LIVE),
        tracked(3, TableState.LOADED),
    )
    reader = RecordingReader(tables, t1=error, t2=DefiniteError("visible already"))
    reader.make_tables_visible(BOUND)
    assert reader.failed == [(1, error)]
    assert [*reader.errors] == [2]
    assert reader.visible == [3]


@pytest.mark.parametrize(
    ("state", "snapshot_lsn", "visible"),
    [
        (TableState.LOADING, 0, []),
        (TableState.LOADING_REJECTED, 0, []),
        (TableState.LOADED, BOUND + 1, []),
        (TableState.LOADED, BOUND, [1, 2]),
        (TableState.LOADED_REJECTED, BOUND, [1, 2]),
        (TableState.ERRORED_HIDDEN, BOUND + 1, [1, 2]),
    ],
)
def test_tables_become_visible_together_once_all_are_loaded_below_the_bound(
    state: TableState, snapshot_lsn: int, visible: list[int]
) -> None:
    tables = table_set(
        tracked(1, TableState.LOADED),
        tracked(2, state, snapshot_lsn=snapshot_lsn),
        tracked(3, TableState.LIVE, snapshot_lsn=BOUND + 1),
        tracked(4, TableState.UNTRACKABLE),
    )
    reader = RecordingReader(tables)
    reader.make_tables_visible(BOUND)
    assert reader.visible == visible
    assert reader.failed == []


FAILURE = DefiniteError("cannot be tracked")


def errored() -> TableSet:
    """Table 1 cannot be tracked, table 2 is errored, table 3 is live."""
    return table_set(
        tracked(1, TableState.UNTRACKABLE, error=FAILURE),
        tracked(2, TableState.ERRORED),
        tracked(3, TableState.LIVE),
    )


@pytest.mark.parametrize(
    ("requested", "checked"),
    [([], [2]), (["public.t2"], [2]), (["public.t3"], []), (["public.t3", "public.t2"], [2])],
)
def test_resync_request_checks_the_errored_tables_that_it_names(
    requested: list[str], checked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    monkeypatch.setattr(TableSet, "_reattach", lambda _, each: found.append(each.table.oid))
    tables = errored()
    tables.request_resync(requested)
    assert found == checked
    assert tables.resync_request == set(requested)


def test_resync_request_of_a_table_that_cannot_be_tracked_raises_its_failure() -> None:
    tables = errored()
    with pytest.raises(DefiniteError) as caught:
        tables.request_resync(["public.t1"])
    assert caught.value is FAILURE
    assert tables.resync_request is None


def test_resync_request_of_a_table_that_is_not_tracked_raises_usage_error() -> None:
    tables = errored()
    with pytest.raises(UsageError, match=r'source "shop" does not follow a table "public\.t9"'):
        tables.request_resync(["public.t3", "public.t9"])
    assert tables.resync_request is None


def test_resync_request_of_a_table_that_stays_in_error_raises_only_if_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> None:
        raise DefiniteError("still so")

    monkeypatch.setattr(TableSet, "_reattach", refuse)
    tables = errored()
    with pytest.raises(DefiniteError, match="still so"):
        tables.request_resync(["public.t2"])
    requests = [tables.resync_request]
    caplog.set_level("WARNING", "penstock")
    tables.request_resync([])
    requests.append(tables.resync_request)
    assert requests == [None, set()]
    assert "table stays in error" in caplog.messages


class RecordingRepair(DriftRepair):
    """Repair that records the drift actions it applies."""

    def __init__(self, tables: TableSet) -> None:
        self._table_set = tables
        self.compared: list[tuple[Any, ...]] = []
        self.applied: list[Any] = []

    def _due_actions(self, before: Any, after: Any) -> list[Any]:
        self.compared.append((before, after))
        return ["mark t1 errored", "mark t2 errored"]

    def _apply(self, action: Any) -> None:
        self.applied.append(action)


def test_dropped_publication_applies_the_actions_for_all_tables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, after = SimpleNamespace(publication="all"), SimpleNamespace(publication=None)
    monkeypatch.setattr(TableSet, "inspect", lambda _: after)
    tables = table_set(tracked(1, TableState.LIVE), tracked(2, TableState.LIVE))
    tables.fingerprint, tables.resync_request = cast("Any", before), {"public.t1"}
    repair = RecordingRepair(tables)
    assert repair.mark_errored_without_publication() is True
    assert repair.compared == [(before, after)]
    assert repair.applied == ["mark t1 errored", "mark t2 errored"]
    assert tables.fingerprint is cast("Any", after)
    assert tables.resync_request is None


@pytest.mark.parametrize(("known", "publication"), [(False, None), (True, "all"), (False, "all")])
def test_publication_that_exists_or_was_never_seen_changes_no_table(
    monkeypatch: pytest.MonkeyPatch, known: bool, publication: object
) -> None:
    monkeypatch.setattr(TableSet, "inspect", lambda _: SimpleNamespace(publication=publication))
    tables = table_set(tracked(1, TableState.LIVE))
    before: Any = SimpleNamespace(publication="all") if known else None
    tables.fingerprint, tables.resync_request = before, {"public.t1"}
    repair = RecordingRepair(tables)
    assert not repair.mark_errored_without_publication()
    assert repair.applied == []
    assert tables.fingerprint is before
    assert tables.resync_request == {"public.t1"}
