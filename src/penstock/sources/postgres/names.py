"""Names of tables and columns, as written in a file and in SQL.

A name in a file is literal: `public.Orders` is the table created as `"Orders"`, because a file does
not fold case as SQL does. Double quotes are required only around a part that contains a dot or a
double quote. Names for display are quoted for use in SQL.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Self

from penstock.data.collection_name import parse_name
from penstock.errors import UsageError

__all__ = ["TableName", "identifier", "identifiers"]

MAX_BYTES: Final = 63
"""Maximum length of a Postgres name, in bytes."""


@dataclass(frozen=True, slots=True, order=True)
class TableName:
    """Schema and name of a table, exactly as in the catalog."""

    schema: str
    name: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `schema.table`, or `table` for a table in the schema `public`.

        Raises:
            UsageError: the text is neither.
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
    """Return `name` for use in SQL, quoted if SQL would read it differently."""
    if _PLAIN.fullmatch(name) and name not in _RESERVED:
        return name
    return '"' + name.replace('"', '""') + '"'


def identifiers(names: Iterable[str]) -> str:
    """Return several names for use in SQL, separated by commas."""
    return ", ".join(identifier(name) for name in names)


_PLAIN: Final = re.compile(r"[a-z_][a-z0-9_]*")

# Reserved words of versions 12 to 18: they cannot be names of tables or columns without quotes.
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
