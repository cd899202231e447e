"""Which transaction the id of an event, a BEGIN or an END tells.

What Debezium writes there is up to the connector:

    Postgres     571:53195829: the transaction, and where in the log this record stands, so that
                 BEGIN, events and END of one transaction have several ids, which grow
    Informix     27:53195832: the same, but all have the place of the END
    MySQL        36eb…8d05:23, a GTID, or file=mysql-bin.000003,pos=154; MariaDB 0-1-5
    SQL Server   00000025:00000d08:0025, and so Db2
    MongoDB      {"id": …}:7, or either of both
    Oracle       5.6.641, or 05000600810200ff
    Vitess       a list of GTIDs as JSON

So digits, a colon and digits are a transaction and a place in the log. Any other id is the
transaction as it stands. That is so of Informix, too, whose numbers soon come again, and which
writes one id into all records: what is known to be Informix's has an @ for the colon.
"""

import re
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["NOWHERE", "part", "part_all", "whole", "whole_all"]

NOWHERE: Final = -1
"""The place in the log, of an id that does not tell it."""

_PLACED: Final = r"^(?P<name>[0-9]+):(?P<at>[0-9]{1,18})$"


def part(id: str) -> tuple[str, int]:
    """The transaction that an id tells, and the place in the log."""
    found = re.fullmatch(_PLACED, id)
    return (id, NOWHERE) if found is None else (found["name"], int(found["at"]))


def part_all(ids: pa.ChunkedArray) -> tuple[pa.ChunkedArray, pa.ChunkedArray]:
    """The same of many."""
    found = pc.extract_regex(ids, _PLACED)
    names, at = (pc.struct_field(found, name) for name in ("name", "at"))
    return pc.coalesce(names, ids), pc.fill_null(pc.cast(at, pa.int64()), NOWHERE)


def whole(id: str) -> str:
    """The transaction all of whose records have this id."""
    return id if part(id)[1] == NOWHERE else id.replace(":", "@")


def whole_all(ids: pa.Array) -> pa.Array:
    """The same of many."""
    return pc.replace_substring_regex(ids, _PLACED, r"\1@\2")
