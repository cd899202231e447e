"""Transaction ids of Debezium events and of BEGIN and END records.

The form depends on the connector:

    Postgres     571:53195829: the transaction and the log position of this record. BEGIN,
                 events and END of one transaction have different, increasing ids
    Informix     27:53195832: the same, but all records have the position of the END
    MySQL        36eb…8d05:23, a GTID, or file=mysql-bin.000003,pos=154; MariaDB 0-1-5
    SQL Server   00000025:00000d08:0025, and so Db2
    MongoDB      {"id": …}:7, or either of both
    Oracle       5.6.641, or 05000600810200ff
    Vitess       a list of GTIDs as JSON

Digits, a colon and digits are a transaction and a log position. Any other id is the name of the
transaction as it stands. An id of Informix is a name as a whole too, because Informix reuses its
numbers soon and writes one id into all records of a transaction. In an id known to be from
Informix, `@` replaces the colon.
"""

import re
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["NOWHERE", "part", "part_all", "whole", "whole_all"]

NOWHERE: Final = -1
"""Log position for an id that has none."""

_PLACED: Final = r"^(?P<name>[0-9]+):(?P<at>[0-9]{1,18})$"


def part(id: str) -> tuple[str, int]:
    """Return the transaction and the log position in an id."""
    found = re.fullmatch(_PLACED, id)
    return (id, NOWHERE) if found is None else (found["name"], int(found["at"]))


def part_all(ids: pa.ChunkedArray) -> tuple[pa.ChunkedArray, pa.ChunkedArray]:
    """Return the transactions and the log positions in many ids."""
    found = pc.extract_regex(ids, _PLACED)
    names, at = (pc.struct_field(found, name) for name in ("name", "at"))
    return pc.coalesce(names, ids), pc.fill_null(pc.cast(at, pa.int64()), NOWHERE)


def whole(id: str) -> str:
    """Return the transaction name for an id that all records of the transaction have."""
    return id if part(id)[1] == NOWHERE else id.replace(":", "@")


def whole_all(ids: pa.Array) -> pa.Array:
    """Return the transaction names for many such ids."""
    return pc.replace_substring_regex(ids, _PLACED, r"\1@\2")
