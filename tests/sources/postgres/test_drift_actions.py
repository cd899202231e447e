"""Drift actions of single tables."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from penstock.sources.postgres.changes import (
    AppendedColumn,
    AttachedLeaf,
    Change,
    ColumnListChanged,
    ColumnsChanged,
    FilterChanged,
    IdentityChanged,
    KeyChanged,
    LeavesChanged,
    OperationsChanged,
    PublicationAltered,
    PublicationDropped,
    PublicationReplaced,
    Renamed,
    Republished,
    Rewritten,
    TableAdded,
    TableDropped,
    TableUnpublished,
    TypeChanged,
)
from penstock.sources.postgres.drift_actions import (
    AddTable,
    DriftAction,
    DriftContext,
    EvolveSchema,
    MarkErrored,
    Resync,
    choose_actions,
)
from penstock.sources.postgres.errors import PublicationMissing, SchemaChanged, TableMissing
from penstock.sources.postgres.names import TableName
from penstock.sources.postgres.table_schema import Table
from tests.sources.postgres.test_stream_reader import OID, table

TEXT = 25


@pytest.mark.parametrize(
    ("loading", "harmless", "truncated", "resynced"),
    [
        # A TRUNCATE that the stream has not delivered yet looks like a harmless rewrite.
        (True, True, False, True),
        (True, True, True, False),
        (True, False, True, False),
        (True, False, False, True),
        (False, True, False, False),
        (False, False, True, False),
        (False, False, False, True),
    ],
)
def test_rewritten_table_is_resynced_unless_stream_explains_it(
    loading: bool, harmless: bool, truncated: bool, resynced: bool
) -> None:
    tracked = table()
    situation = DriftContext(
        "file:lake",
        "penstock",
        {OID: tracked},
        {OID} if loading else set(),
        {OID: {7}} if truncated else {},
    )
    rewritten = Rewritten(OID, tracked.described.table_name, 7, harmless)
    expected = [Resync(OID, "it was rewritten")] if resynced else []
    assert choose_actions([rewritten], situation) == expected


# Each kind of change.

POSTS = TableName("public", "posts")
OTHER = 99


def situation(*tables: Table, unseen: bool = False, **truncated: int) -> DriftContext:
    """Return tables by oid, and the transactions that truncated table 1."""
    return DriftContext(
        "file:lake",
        "pub",
        {each.oid: each for each in tables or (table(),)},
        {OID} if unseen else (),
        {OID: set(truncated.values())} if truncated else {},
    )


def errors(actions: Sequence[DriftAction]) -> list[str]:
    """Return the messages of tables that are marked errored; fail on any other action."""
    assert {type(action) for action in actions} <= {MarkErrored}
    return [str(action.error) for action in actions if isinstance(action, MarkErrored)]


def appended(name: str, *, default: str | None = None, known: bool = True) -> AppendedColumn:
    return AppendedColumn(name, 4, TEXT, -1, default, known, streamed=True)


def leaf(*, born: bool) -> AttachedLeaf:
    return AttachedLeaf(7, TableName("public", "leaf"), born)


def leaf_rewritten(xid: int) -> Rewritten:
    return Rewritten(7, TableName("public", "leaf"), xid)


def test_missing_publication_marks_every_table_errored_with_statement_in_hint() -> None:
    found = choose_actions([PublicationDropped()], situation())
    assert [(type(each), each.oid) for each in found] == [(MarkErrored, OID)]
    assert isinstance(found[0], MarkErrored)
    assert isinstance(found[0].error, PublicationMissing)
    assert "CREATE PUBLICATION pub FOR TABLE public.posts;" in found[0].error.hint
    assert "file:lake shop" in found[0].error.hint


def test_publication_with_fewer_operations_marks_tables_errored() -> None:
    changed = OperationsChanged(("insert",), ("insert", "delete", "truncate"))
    (message,) = errors(choose_actions([changed], situation()))
    assert message.endswith("has changed: its publication no longer sends update")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            OperationsChanged(("insert",), ("insert", "update", "delete", "truncate")),
            "the publication sends more than it did",
        ),
        (PublicationReplaced(1, 2), "the publication was altered"),
        (PublicationAltered(), "the publication was altered"),
        (Republished(OID, POSTS), "it was out of the publication for a while"),
        (FilterChanged(OID, POSTS), "the publication has another filter for it"),
        (TypeChanged(OID, POSTS, ("title",), "mood"), 'values of type "mood" print otherwise'),
        (LeavesChanged(OID, POSTS, detached=(POSTS,)), "its partitions changed"),
        (LeavesChanged(OID, POSTS, attached=(leaf(born=False),)), "its partitions changed"),
        (LeavesChanged(OID, POSTS, rewritten=(leaf_rewritten(5),)), "its partitions changed"),
        (
            ColumnListChanged(OID, POSTS, ("id",), ("id", "title")),
            "the publication sends more of its columns",
        ),
        (
            ColumnsChanged(OID, POSTS, appended=(appended("extra", known=False),)),
            "a column was added whose values in older rows are not known",
        ),
    ],
)
def test_change_that_may_alter_rows_silently_resyncs_table(change: Change, reason: str) -> None:
    assert choose_actions([change], situation()) == [Resync(OID, reason)]


@pytest.mark.parametrize(
    "change",
    [
        LeavesChanged(OID, POSTS, attached=(leaf(born=True),)),
        LeavesChanged(OID, POSTS, rewritten=(leaf_rewritten(7),)),
        ColumnListChanged(OID, POSTS, ("id", "title"), ("id",)),
        ColumnsChanged(OID, POSTS, appended=(appended("extra", default="x"),)),
        ColumnsChanged(OID, POSTS, dropped=("title",)),
        IdentityChanged(OID, POSTS, ("d", ("id",)), ("f", ())),
        IdentityChanged(OID, POSTS, ("f", ()), ("d", ("id",))),
        KeyChanged(OID, POSTS, None, ("id",)),
    ],
)
def test_change_that_stream_describes_needs_no_resync(change: Change) -> None:
    assert choose_actions([change], situation(xid=7)) == [EvolveSchema(OID)]


def test_rewritten_leaf_of_loading_table_is_resynced() -> None:
    change = LeavesChanged(OID, POSTS, rewritten=(leaf_rewritten(7),))
    loading = situation(unseen=True, xid=7)
    assert choose_actions([change], loading) == [Resync(OID, "its partitions changed")]
    attached = LeavesChanged(OID, POSTS, attached=(leaf(born=True),))
    assert choose_actions([attached], loading) == [EvolveSchema(OID)]


def test_one_unexplained_leaf_among_explained_ones_resyncs_table() -> None:
    leaves = (leaf_rewritten(7), leaf_rewritten(8))
    attached = (leaf(born=True), leaf(born=False))
    for change in (
        LeavesChanged(OID, POSTS, rewritten=leaves),
        LeavesChanged(OID, POSTS, attached=attached),
    ):
        assert choose_actions([change], situation(xid=7)) == [Resync(OID, "its partitions changed")]


@pytest.mark.parametrize("dropped", [True, False])
def test_dropped_or_unpublished_table_is_marked_errored(dropped: bool) -> None:
    change = (TableDropped if dropped else TableUnpublished)(OID, POSTS)
    (found,) = choose_actions([change], situation())
    expected = TableMissing(
        location="file:lake", source="shop", table=POSTS, publication="pub", dropped=dropped
    )
    assert isinstance(found, MarkErrored)
    assert found.oid == OID
    assert isinstance(found.error, TableMissing)
    assert (str(found.error), found.error.hint) == (str(expected), expected.hint)


def test_renamed_table_is_marked_errored_with_its_new_name() -> None:
    (message,) = errors(
        choose_actions([Renamed(OID, POSTS, TableName("public", "b"))], situation())
    )
    assert message.endswith("has changed: it is now public.b")


def test_errored_table_without_an_accepted_form_says_so_in_its_hint() -> None:
    (renamed,) = choose_actions([Renamed(OID, POSTS, TableName("public", "b"))], situation())
    (recreated,) = choose_actions([KeyChanged(OID, POSTS, ("id",), ("id",))], situation())
    for found, accepted in (
        (renamed, None),
        (recreated, "Rows with equal keys may have existed."),
    ):
        assert isinstance(found, MarkErrored)
        expected = SchemaChanged(
            location="file:lake", source="shop", table=POSTS, reason="", accepted=accepted
        )
        assert (found.error.detail, found.error.hint) == (expected.detail, expected.hint)


def test_table_without_replica_identity_is_marked_errored() -> None:
    change = IdentityChanged(OID, POSTS, ("d", ("id",)), ("n", ()))
    (message,) = errors(choose_actions([change], situation()))
    assert message.endswith("has changed: it has no replica identity")


@pytest.mark.parametrize(
    ("after", "reason", "hint"),
    [
        (("id",), "its primary key was dropped and added", "To compare it and continue"),
        (("title",), "its primary key was changed", "To read a new snapshot in its new form"),
        (None, "its primary key was changed", "To read a new snapshot in its new form"),
    ],
)
def test_changed_primary_key_of_keyed_collection_marks_table_errored(
    after: tuple[str, ...] | None, reason: str, hint: str
) -> None:
    change = KeyChanged(OID, POSTS, ("id",), after)
    (found,) = choose_actions([change], situation())
    assert isinstance(found, MarkErrored)
    assert str(found.error).endswith(f"has changed: {reason}")
    assert found.error.hint.startswith(hint)
    assert choose_actions([change], situation(unseen=True)) == [
        Resync(OID, "its primary key was changed")
    ]
    keyless = replace(table(), key_columns=())
    assert choose_actions([change], situation(keyless)) == [EvolveSchema(OID)]


def test_new_table_is_added_unless_tracked() -> None:
    added = TableAdded(OTHER, TableName("public", "new"))
    assert choose_actions([added], situation()) == [AddTable(OTHER, "public.new")]
    assert choose_actions([TableAdded(OID, POSTS)], situation()) == []


def test_change_of_untracked_table_needs_no_action() -> None:
    assert (
        choose_actions([TableDropped(OTHER, POSTS), Republished(OTHER, POSTS)], situation()) == []
    )


def test_most_severe_action_of_each_table_is_taken_in_oid_order() -> None:
    second = replace(table(), oid=OTHER)
    changes: list[Change] = [
        TableDropped(OTHER, POSTS),
        KeyChanged(OID, POSTS, None, ("id",)),
        Republished(OTHER, POSTS),
        Republished(OID, POSTS),
        FilterChanged(OID, POSTS),
        KeyChanged(OID, POSTS, None, ("id",)),
    ]
    assert OID != OTHER
    found = choose_actions(changes, situation(second, table()))
    assert [each.oid for each in found] == sorted([OID, OTHER])
    by_oid = {each.oid: each for each in found}
    assert by_oid[OID] == Resync(OID, "it was out of the publication for a while")
    assert isinstance(by_oid[OTHER], MarkErrored)


def test_change_of_excluded_columns_needs_no_resync() -> None:
    excluding = situation(table(exclude=("body",)))
    unknown = ColumnsChanged(OID, POSTS, appended=(appended("body", known=False),))
    assert choose_actions([unknown], excluding) == [EvolveSchema(OID)]
    listed = ColumnListChanged(OID, POSTS, ("id", "body"), ("id",))
    resync = [Resync(OID, "the publication sends more of its columns")]
    assert choose_actions([listed], excluding) == resync
    assert choose_actions([listed], situation()) == [EvolveSchema(OID)]


def test_dropped_column_that_was_added_later_resyncs_table() -> None:
    tracked = table()
    learned = tuple(replace(each, learned=each.shape.name == "body") for each in tracked.stored)
    later = situation(replace(tracked, stored=learned))
    change = ColumnsChanged(OID, POSTS, dropped=("body",))
    assert choose_actions([change], later) == [Resync(OID, 'column "body" was dropped')]
    both = ColumnsChanged(OID, POSTS, dropped=("title", "body"))
    assert choose_actions([both], later) == [EvolveSchema(OID)]
    loosened = ColumnsChanged(OID, POSTS, loosened=("title",))
    assert choose_actions([loosened], later) == [EvolveSchema(OID)]


def test_column_added_again_with_default_resyncs_table() -> None:
    tracked = table()
    gone = tuple(
        replace(each, shape=replace(each.shape, number=0)) if each.shape.name == "body" else each
        for each in tracked.stored
    )
    again = situation(replace(tracked, stored=gone))
    with_default = ColumnsChanged(OID, POSTS, appended=(appended("body", default="x"),))
    assert choose_actions([with_default], again) == [Resync(OID, 'column "body" was added again')]
    null = ColumnsChanged(OID, POSTS, appended=(appended("body"),))
    assert choose_actions([null], again) == [EvolveSchema(OID)]
    other = ColumnsChanged(OID, POSTS, appended=(appended("extra", default="x"),))
    assert choose_actions([other], again) == [EvolveSchema(OID)]
