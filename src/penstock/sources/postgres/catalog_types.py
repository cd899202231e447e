"""Types and columns, as the Postgres catalog describes them.

These are plain values. `catalog.py` reads them from a server, and `types` decides how to convert
values of each type.
"""

from dataclasses import dataclass

__all__ = ["PgColumn", "PgType"]


@dataclass(frozen=True, slots=True)
class PgType:
    """Row of pg_type, with the types it consists of."""

    oid: int
    name: str
    """Result of `format_type(oid, NULL)` under an empty search path, such as `integer`."""

    kind: str
    """pg_type.typtype: b(ase), c(omposite), d(omain), e(num), m(ultirange), p(seudo), r(ange)."""

    category: str
    element: "PgType | None" = None
    """Element type of an array."""

    base: "PgType | None" = None
    """Base type of a domain."""

    typmod: int = -1
    """Type modifier that a domain applies to its base, such as precision and scale."""


@dataclass(frozen=True, slots=True)
class PgColumn:
    """Column of a table."""

    name: str
    number: int
    """pg_attribute.attnum, which does not change when the column is renamed."""

    type: PgType
    typmod: int = -1
    dimensions: int = 0
    nullable: bool = True
    generated: bool = False
    missing: str | None = None
    """Value of rows written before the column was added, as text."""

    has_missing: bool = False
