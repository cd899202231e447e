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

__all__ = ["NO_POSITION", "join", "join_array", "split", "split_array"]

NO_POSITION: Final = -1
"""Log position for an id that has none."""

_WITH_POSITION: Final = r"^(?P<name>[0-9]+):(?P<position>[0-9]{1,18})$"


def split(id: str) -> tuple[str, int]:
    """Return the transaction and the log position in an id."""
    match = re.fullmatch(_WITH_POSITION, id)
    return (id, NO_POSITION) if match is None else (match["name"], int(match["position"]))


def split_array(ids: pa.ChunkedArray) -> tuple[pa.ChunkedArray, pa.ChunkedArray]:
    """Return the transactions and the log positions in many ids."""
    matches = pc.extract_regex(ids, _WITH_POSITION)
    names, positions = (pc.struct_field(matches, name) for name in ("name", "position"))
    return pc.coalesce(names, ids), pc.fill_null(pc.cast(positions, pa.int64()), NO_POSITION)


def join(id: str) -> str:
    """Return the transaction name for an id that all records of the transaction have."""
    return id if split(id)[1] == NO_POSITION else id.replace(":", "@")


def join_array(ids: pa.Array) -> pa.Array:
    """Return the transaction names for many such ids."""
    return pc.replace_substring_regex(ids, _WITH_POSITION, r"\1@\2")
