"""Drift actions of single tables."""

import pytest

from penstock.sources.postgres.changes import Rewritten
from penstock.sources.postgres.cures import Resync, Situation, cures
from tests.sources.postgres.test_tail import OID, table


@pytest.mark.parametrize(
    ("loading", "harmless", "truncated", "resynced"),
    [
        # A TRUNCATE that the stream has not shown yet looks like a harmless rewrite.
        (True, True, False, True),
        (True, True, True, False),
        (True, False, True, False),
        (True, False, False, True),
        (False, True, False, False),
        (False, False, True, False),
        (False, False, False, True),
    ],
)
def test_rewritten_table_is_resynced_unless_the_stream_explains_it(
    loading: bool, harmless: bool, truncated: bool, resynced: bool
) -> None:
    tracked = table()
    situation = Situation(
        "file:lake",
        "penstock",
        {OID: tracked},
        {OID} if loading else set(),
        {OID: {7}} if truncated else {},
    )
    rewritten = Rewritten(OID, tracked.described.table_name, 7, harmless)
    expected = [Resync(OID, "it was rewritten")] if resynced else []
    assert cures([rewritten], situation) == expected
