"""Names of tables and columns, as people write them and as SQL wants them.

A name in a file means what it says: `public.Orders` is the table created as
`"Orders"`, since a file is not SQL and folds no case. Double quotes are needed
only around what holds a dot or a quote. Shown to people, a name is written so
that it can be pasted into SQL.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Self

from penstock.data.collection_name import parse_name
from penstock.errors import UsageError

__all__ = ["TableName", "identifier", "identifiers"]

MAX_BYTES: Final = 63
"""What Postgres keeps of a name."""


@dataclass(frozen=True, slots=True, order=True)
class TableName:
    """A table's schema and name, exactly as the catalogue has them."""

    schema: str
    name: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `schema.table`, or `table` for one in the schema `public`.

        Raises:
            UsageError: it is neither.
        """
        parts = parse_name(text, strip=True)
        if parts is None or len(parts) not in (1, 2) or any("\0" in part for part in parts):
            raise UsageError(
                f'table name "{text}" cannot be understood',
                detail="It is a schema, a dot and a table; parts that hold a dot, a double quote "
                "or a blank at an end stand in double quotes.",
                hint='Write it like public.orders or "odd.schema"."odd.table".',
            )
        for part in parts:
            if len(part.encode()) > MAX_BYTES:
                raise UsageError(
                    f'table name "{text}" is too long',
                    detail=f"Postgres cuts names to {MAX_BYTES} bytes, and so no table is "
                    f'called "{part}".',
                    hint="Write the name as \\d of psql shows it.",
                )
        return cls("public", parts[0]) if len(parts) == 1 else cls(parts[0], parts[1])

    def __str__(self) -> str:
        return f"{identifier(self.schema)}.{identifier(self.name)}"


def identifier(name: str) -> str:
    """`name` for use in SQL, quoted where SQL would read it otherwise."""
    if _PLAIN.fullmatch(name) and name not in _RESERVED:
        return name
    return '"' + name.replace('"', '""') + '"'


def identifiers(names: Iterable[str]) -> str:
    """Several, with commas between them."""
    return ", ".join(identifier(name) for name in names)


_PLAIN: Final = re.compile(r"[a-z_][a-z0-9_]*")

# Words that cannot stand as the name of a table or a column, of versions 12 to 18.
_WORDS: Final = """
    all analyse analyze and any array as asc asymmetric authorization between bigint binary bit
    boolean both case cast char character check coalesce collate collation column concurrently
    constraint create cross current_catalog current_date current_role current_schema current_time
    current_timestamp current_user dec decimal default deferrable desc distinct do else end except
    exists extract false fetch float for foreign freeze from full grant greatest group grouping
    having ilike in initially inner inout int integer intersect interval into is isnull join json
    lateral leading least left like limit localtime localtimestamp merge_action national natural
    nchar none normalize not notnull null nullif numeric offset on only or order out outer overlaps
    overlay placing position precision primary real references returning right row select
    session_user setof similar smallint some substring symmetric system_user table tablesample then
    time timestamp to trailing treat trim true union unique user using values varchar variadic
    verbose when where window with
    """
_RESERVED: Final = frozenset(_WORDS.split())
