"""Errors of a Postgres source: each has a hint and can be pickled."""

import pickle
from typing import Any

import pytest

from penstock.errors import PenstockError, Problem
from penstock.sources.postgres import errors
from penstock.sources.postgres.lsn import Lsn
from penstock.sources.postgres.names import TableName

OF: dict[str, Any] = {"location": "file:./data", "source": "shop"}
AT = Lsn.parse("16/B374D848")
ORDERS = TableName("public", "Orders")
ALL = [
    errors.SlotLost(**OF, slot="penstock_shop_1f3c", resume_from=AT),
    errors.SlotInvalidated(**OF, slot="s", reason="wal_removed", resume_from=AT),
    errors.SlotInvalidated(**OF, slot="s", reason="something new", resume_from=AT),
    errors.SlotPassed(**OF, slot="s", confirmed=AT, resume_from=AT),
    errors.SlotForeign(slot="s", nonce="1f3c"),
    errors.SlotBusy(slot="s", pid=7),
    errors.PublicationMissing(**OF, publication="p", statement="CREATE PUBLICATION p;"),
    errors.TableMissing(**OF, table=ORDERS, publication="p", dropped=True),
    errors.TableMissing(**OF, table=ORDERS, publication="p", dropped=False),
    errors.SchemaChanged(**OF, table=ORDERS, reason="a column was dropped"),
    errors.OtherHistory(**OF, reason="The system identifier is 7, and was 8."),
    errors.NotReady(where="db", problems=[Problem("a", hint="Run: A;")]),
]


@pytest.mark.parametrize("error", ALL, ids=lambda error: type(error).__name__)
def test_postgres_error_has_hint_and_survives_pickle(error: PenstockError) -> None:
    assert error.hint
    assert not str(error).endswith(".")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.detail, again.hint) == (
        type(error),
        str(error),
        error.detail,
        error.hint,
    )


def test_resync_command_is_quoted_for_the_shell() -> None:
    assert errors.resync_command("file:./data", "shop", ORDERS) == (
        "penstock resync file:./data shop 'public.\"Orders\"'"
    )
