"""Types and columns as Postgres' catalog tells them.

Values only: `catalog.py` reads them from a server, `types` decides what
becomes of their values.
"""

from dataclasses import dataclass

__all__ = ["PgColumn", "PgType"]


@dataclass(frozen=True, slots=True)
class PgType:
    """One row of pg_type, and the types it is made of."""

    oid: int
    name: str
    """By `format_type(oid, NULL)` under an empty search path, such as `integer`."""

    kind: str
    """pg_type.typtype: b(ase), c(omposite), d(omain), e(num), m(ultirange), p(seudo), r(ange)."""

    category: str
    element: "PgType | None" = None
    """What an array is made of."""

    base: "PgType | None" = None
    """What a domain is over."""

    typmod: int = -1
    """Of a domain, what it gives to its base, such as precision and scale."""


@dataclass(frozen=True, slots=True)
class PgColumn:
    """One column of a table."""

    name: str
    number: int
    """pg_attribute.attnum, which a column keeps when it is renamed."""

    type: PgType
    typmod: int = -1
    dimensions: int = 0
    nullable: bool = True
    generated: bool = False
    missing: str | None = None
    """What rows hold that were written before the column was added, as text."""

    has_missing: bool = False
