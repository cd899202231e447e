"""Comparison of fingerprints, without a server."""

from dataclasses import replace

import pytest

from penstock.sources.postgres.changes import ColumnsChanged, LeavesChanged, Rewritten
from penstock.sources.postgres.drift import compare
from penstock.sources.postgres.fingerprint import (
    ColumnMark,
    Fingerprint,
    PartitionMark,
    TableMark,
)
from penstock.sources.postgres.names import TableName
from penstock.sources.postgres.publication import OPERATIONS, Publication

ROOT = TableName("public", "r")
PUBLICATION = Publication(9, 3, all_tables=False, via_root=True, operations=tuple(OPERATIONS))
ID = ColumnMark(1, "id", 23, -1, nullable=False, generated="", row_xid=5)


def leaf(oid: int, storage: int, xid: int) -> PartitionMark:
    name = TableName("public", f"leaf{oid}")
    return PartitionMark(oid, name, 1, "r", storage, xid, "d", ("id",), 4, True, ())


def table(*partitions: PartitionMark, columns: tuple[ColumnMark, ...] = (ID,)) -> TableMark:
    kind = "p" if partitions else "r"
    tokens = frozenset({"t"})
    return TableMark(
        1, ROOT, kind, 0, 5, "d", True, tokens, None, None, None, None, columns, partitions
    )


def fingerprint_of(mark: TableMark, publication: Publication = PUBLICATION) -> Fingerprint:
    return Fingerprint(publication, {mark.oid: mark})


def test_compare_reports_rewritten_leaf_with_its_transaction() -> None:
    before = fingerprint_of(table(leaf(7, 70, 11), leaf(8, 80, 12)))
    after = fingerprint_of(table(leaf(7, 71, 13), leaf(8, 80, 12)))
    rewritten = Rewritten(7, TableName("public", "leaf7"), 13)
    assert compare(before, after) == [LeavesChanged(1, ROOT, rewritten=(rewritten,))]
    assert compare(before, before) == []


@pytest.mark.parametrize("sends_generated", [False, True])
@pytest.mark.parametrize("generated", ["", "s", "v"])
def test_appended_generated_column_is_streamed_only_if_publication_sends_it(
    generated: str, sends_generated: bool
) -> None:
    publication = replace(PUBLICATION, generated=sends_generated)
    extra = ColumnMark(2, "extra", 23, -1, nullable=True, generated=generated, row_xid=9)
    before = fingerprint_of(table(), publication)
    after = fingerprint_of(table(columns=(ID, extra)), publication)
    (change,) = [each for each in compare(before, after) if isinstance(each, ColumnsChanged)]
    (appended,) = change.appended
    assert (appended.name, appended.number) == ("extra", 2)
    assert appended.known == (generated == "")
    assert appended.streamed == (generated == "" or (generated == "s" and sends_generated))


def test_appended_column_of_rewritten_table_has_unknown_values() -> None:
    extra = replace(ID, number=2, name="extra", missing=("7",))
    before = fingerprint_of(table())
    for storage, known in ((0, True), (1, False)):
        now = replace(table(columns=(ID, extra)), storage=storage)
        found = compare(before, fingerprint_of(now))
        (change,) = [each for each in found if isinstance(each, ColumnsChanged)]
        assert (change.appended[0].known, change.appended[0].default) == (known, "7")
