"""The tables of a source, without a server: when they are seen, failed or resynced."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.errors import DefiniteError, UsageError
from penstock.sources.postgres.followed import Followed
from penstock.sources.postgres.reading import Phase, Reading

BOUND = 50


class Recorder:
    """A reading that records which tables are failed and revealed."""

    def __init__(self, **broken: DefiniteError) -> None:
        self.broken = {int(oid[1:]): error for oid, error in broken.items()}
        self.failed: list[tuple[int, DefiniteError]] = []
        self.revealed: list[int] = []

    def fail(self, entry: Any, error: DefiniteError) -> None:
        self.failed.append((entry.table.oid, error))
        entry.has_collection = False

    def reveal(self, entry: Any) -> None:
        self.revealed.append(entry.table.oid)


def tracked(oid: int, phase: Phase, **changed: Any) -> SimpleNamespace:
    known = {"seen": False, "has_collection": True, "failure": None, "snapshot_lsn": BOUND}
    table = SimpleNamespace(oid=oid, name=f"public.t{oid}")
    return SimpleNamespace(table=table, phase=phase, **(known | changed))


def table_set(*tables: SimpleNamespace) -> Followed:
    made = Followed.__new__(Followed)
    made.name, made._asked = "shop", None
    made.tables = {each.table.oid: cast("Any", each) for each in tables}
    return made


def reveal(tables: Followed, recorder: Recorder) -> None:
    tables.reveal(cast("Reading", recorder), BOUND)


def test_reveal_of_a_broken_table_that_is_not_seen_fails_it_with_its_error() -> None:
    error = DefiniteError("as asked")
    recorder = Recorder(t1=error, t2=DefiniteError("seen already"))
    reveal(
        table_set(
            tracked(1, Phase.LOADING),
            tracked(2, Phase.LIVE, seen=True),
            tracked(3, Phase.LOADED),
        ),
        recorder,
    )
    assert recorder.failed == [(1, error)]
    assert [*recorder.broken] == [2]
    assert recorder.revealed == [3]  # Not delayed by the broken table.


@pytest.mark.parametrize(
    ("phase", "snapshot_lsn", "revealed"),
    [
        (Phase.LOADING, 0, []),
        (Phase.LOADED, BOUND + 1, []),
        (Phase.LOADED, BOUND, [1, 2]),
        (Phase.ERRORED, BOUND + 1, [1, 2]),
    ],
)
def test_tables_are_revealed_together_once_all_are_loaded_below_the_bound(
    phase: Phase, snapshot_lsn: int, revealed: list[int]
) -> None:
    recorder = Recorder()
    reveal(
        table_set(
            tracked(1, Phase.LOADED),
            tracked(2, phase, snapshot_lsn=snapshot_lsn),
            tracked(3, Phase.LIVE, seen=True, snapshot_lsn=BOUND + 1),
            tracked(4, Phase.LOADING, has_collection=False),
        ),
        recorder,
    )
    assert recorder.revealed == revealed
    assert recorder.failed == []


FAILURE = DefiniteError("cannot be tracked")


def errored() -> Followed:
    """Table 1 cannot be tracked, table 2 is errored, table 3 is live."""
    return table_set(
        tracked(1, Phase.ERRORED, failure=FAILURE, has_collection=False),
        tracked(2, Phase.ERRORED),
        tracked(3, Phase.LIVE),
    )


@pytest.mark.parametrize(
    ("requested", "checked"),
    [([], [2]), (["public.t2"], [2]), (["public.t3"], []), (["public.t3", "public.t2"], [2])],
)
def test_resync_request_checks_the_errored_tables_that_it_names(
    requested: list[str], checked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    monkeypatch.setattr(Followed, "_take_up", lambda _, each: found.append(each.table.oid))
    tables = errored()
    tables.ask_for_resync(requested)
    assert found == checked
    assert tables._asked == set(requested)


def test_resync_request_of_a_table_that_cannot_be_tracked_raises_its_failure() -> None:
    tables = errored()
    with pytest.raises(DefiniteError) as caught:
        tables.ask_for_resync(["public.t1"])
    assert caught.value is FAILURE
    assert tables._asked is None


def test_resync_request_of_a_table_that_is_not_tracked_raises_usage_error() -> None:
    tables = errored()
    with pytest.raises(UsageError, match=r'source "shop" does not follow a table "public\.t9"'):
        tables.ask_for_resync(["public.t3", "public.t9"])
    assert tables._asked is None


def test_resync_request_of_a_table_that_stays_in_error_raises_only_if_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> None:
        raise DefiniteError("still so")

    monkeypatch.setattr(Followed, "_take_up", refuse)
    tables = errored()
    with pytest.raises(DefiniteError, match="still so"):
        tables.ask_for_resync(["public.t2"])
    assert tables._asked is None
    caplog.set_level("WARNING", "penstock")
    tables.ask_for_resync([])
    assert tables._asked == set()
    assert "table stays in error" in caplog.messages


class Catalog:
    """Answers in place of the server, and records the drift actions that are carried out."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, publication: object) -> None:
        self.fingerprint = SimpleNamespace(publication=publication)
        self.compared: list[tuple[Any, ...]] = []
        self.done: list[tuple[Any, ...]] = []
        monkeypatch.setattr(Followed, "_look", lambda _: self.fingerprint)
        monkeypatch.setattr(Followed, "_wanted", self._actions)
        monkeypatch.setattr(Followed, "_obey", lambda _, *given: self.done.append(given))

    def _actions(self, *given: Any) -> list[str]:
        self.compared.append(given[-3:])
        return ["mark t1 errored", "mark t2 errored"]


def test_dropped_publication_carries_out_the_actions_for_all_tables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    catalog = Catalog(monkeypatch, publication=None)
    tables = table_set(tracked(1, Phase.LIVE), tracked(2, Phase.LIVE))
    before: Any = SimpleNamespace(publication="all")
    tick, reading = cast("Any", "tick"), cast("Any", "reading")
    tables.fingerprint, tables._asked = before, {"public.t1"}
    assert tables.give_up_without_publication(tick, reading) is True
    assert catalog.compared == [(before, catalog.fingerprint, reading)]
    assert catalog.done == [(tick, reading, f"mark t{oid} errored") for oid in (1, 2)]
    assert tables.fingerprint is cast("Any", catalog.fingerprint)
    assert tables._asked is None


@pytest.mark.parametrize(("known", "publication"), [(False, None), (True, "all"), (False, "all")])
def test_publication_that_exists_or_was_never_seen_changes_no_table(
    monkeypatch: pytest.MonkeyPatch, known: bool, publication: object
) -> None:
    catalog = Catalog(monkeypatch, publication)
    tables = table_set(tracked(1, Phase.LIVE))
    before: Any = SimpleNamespace(publication="all") if known else None
    tables.fingerprint, tables._asked = before, {"public.t1"}
    assert not tables.give_up_without_publication(cast("Any", "tick"), cast("Any", "reading"))
    assert catalog.done == []
    assert tables.fingerprint is before
    assert tables._asked == {"public.t1"}
