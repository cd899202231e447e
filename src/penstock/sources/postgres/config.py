"""Configuration of a Postgres source.

    postgres:
      url: postgresql://penstock:${SHOP_PASSWORD}@db.example/shop
      publication: penstock
      tables: [public.orders, {name: public.customers, exclude: [photo], text: [odd]}]

Both `url` and `connection` become libpq parameters. Secrets are removed before parameters are
printed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self, TypeVar

from penstock.errors import UsageError, similar
from penstock.sources.postgres.names import TableName

__all__ = ["PostgresConfig", "TableSpec", "render_url"]

PUBLICATION: Final = "penstock"


@dataclass(frozen=True, slots=True)
class TableSpec:
    """Table to replicate, with options for some of its columns."""

    name: TableName
    exclude: tuple[str, ...] = ()
    """Columns that the collection omits."""

    text: tuple[str, ...] = ()
    """Columns stored as the text that the server prints, for any type."""

    @classmethod
    def parse(cls, value: Any) -> Self:
        """Parse a name, or a mapping with `name`, `exclude` and `text`.

        Raises:
            UsageError: the value is neither.
        """
        if isinstance(value, str):
            return cls(TableName.parse(value))
        if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
            raise UsageError(
                f"table {value!r} of a postgres source cannot be understood",
                hint="Write a name like public.orders, or {name: public.orders, exclude: [photo]}.",
            )
        name = TableName.parse(value["name"])
        _reject_unknown_keys(value, ("name", "exclude", "text"), f"table {name}")
        exclude = _read_columns(value, "exclude", name)
        text = _read_columns(value, "text", name)
        if both := [column for column in exclude if column in text]:
            raise UsageError(
                f'column "{both[0]}" of table {name} is both excluded and kept as text',
                hint='Name it under one of "exclude" and "text".',
            )
        return cls(name, exclude, text)


@dataclass(frozen=True, slots=True)
class PostgresConfig:
    """Validated configuration of a Postgres source."""

    parameters: Mapping[str, str] = field(repr=False)
    """libpq connection parameters, secrets included."""

    publication: str = PUBLICATION
    tables: tuple[TableSpec, ...] | None = None
    """Tables to replicate; None means all published tables."""

    snapshot_tasks: int | None = None
    """Number of splits in the initial snapshot of a large table; None uses the default (2)."""

    slot_warning: int = 1 << 30
    """Bytes of WAL that the slot may retain on the server before a warning is logged."""

    where: str = field(init=False)
    """Connection parameters for display, without secrets."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "parameters", dict(self.parameters))
        object.__setattr__(self, "where", render_url(self.parameters))
        if not self.publication or len(self.publication.encode()) > 63:
            raise UsageError(
                f"the name of the publication has {len(self.publication.encode())} bytes",
                hint="Names of publications have 1 to 63 bytes.",
            )
        if self.tables is not None and not self.tables:
            raise UsageError(
                f"postgres source {self.where} has no tables",
                hint="Name one at least, or leave tables out to follow all that are published.",
            )
        names = [table.name for table in self.tables or ()]
        if duplicates := sorted({name for name in names if names.count(name) > 1}):
            raise UsageError(
                f"table {duplicates[0]} is named twice", hint="Leave one of them out of tables."
            )
        if self.snapshot_tasks is not None and self.snapshot_tasks < 1:
            raise UsageError(
                f"snapshot_tasks is {self.snapshot_tasks}", hint="Give a number from 1 on."
            )
        if self.slot_warning < 1:
            raise UsageError(
                f"slot_warning is {self.slot_warning}", hint="Give a number of bytes from 1 on."
            )

    @classmethod
    def parse(cls, section: Mapping[str, Any]) -> Self:
        """Parse the mapping under `postgres:` in the pipeline file.

        Raises:
            UsageError: the mapping is invalid; the error never contains a secret.
        """
        options = ("snapshot_tasks", "slot_warning")
        _reject_unknown_keys(
            section, ("url", "connection", "publication", "tables", *options), "postgres source"
        )
        tables = section.get("tables")
        if tables is not None and (isinstance(tables, str) or not isinstance(tables, Sequence)):
            raise UsageError(
                "tables of a postgres source is not a list",
                hint="Write it like [public.orders, public.customers].",
            )
        publication = section.get("publication", PUBLICATION)
        if not isinstance(publication, str):
            raise UsageError("publication of a postgres source is not text", hint="Write its name.")
        return cls(
            parameters=_read_parameters(section),
            publication=publication,
            tables=None if tables is None else tuple(TableSpec.parse(table) for table in tables),
            snapshot_tasks=_read_typed(section, "snapshot_tasks", int, "a number", default=None),
            slot_warning=_read_typed(
                section, "slot_warning", int, "a number of bytes", default=1 << 30
            ),
        )

    def spec_of(self, name: TableName) -> TableSpec | None:
        """Return the options of a table; None if the table is not selected."""
        if self.tables is None:
            return TableSpec(name)
        return next((table for table in self.tables if table.name == name), None)


def render_url(parameters: Mapping[str, str]) -> str:
    """Return `parameters` as a URL for display, without secrets.

    >>> render_url({"host": "db", "user": "me", "password": "pw", "dbname": "shop"})
    'postgresql://me@db/shop'
    """
    user, port = parameters.get("user", ""), parameters.get("port", "")
    host = parameters.get("host") or parameters.get("hostaddr", "")
    if service := parameters.get("service", ""):
        host = host or f"service={service}"
    login = f"{user}@" if user else ""
    address = f"{host}:{port}" if port else host
    return f"postgresql://{login}{address}/{parameters.get('dbname', '')}"


def _read_parameters(section: Mapping[str, Any]) -> dict[str, str]:
    url, connection = section.get("url"), section.get("connection")
    if (url is None) == (connection is None):
        raise UsageError(
            "postgres source needs either a url or a connection",
            hint="Write url: postgresql://user@host/database, or "
            "connection: {host: …, dbname: …, user: …}.",
        )
    if url is not None and not isinstance(url, str):
        raise UsageError(
            "url of a postgres source is not text",
            hint="Write it like postgresql://user@host/database.",
        )
    if connection is not None and not isinstance(connection, Mapping):
        raise UsageError(
            "connection of a postgres source is not a mapping",
            hint="Write it like {host: db.example, dbname: shop, user: penstock}.",
        )
    # Deferred: the package belongs to an extra.
    import psycopg
    from psycopg import conninfo

    # A libpq error message can quote its input, passwords included. It is therefore neither shown
    # nor chained.
    problem = ""
    parameters: dict[str, Any] = {}
    try:
        if url is not None:
            parameters = conninfo.conninfo_to_dict(url)
        else:
            options = {name: str(value) for name, value in (connection or {}).items()}
            parameters = conninfo.conninfo_to_dict(conninfo.make_conninfo(**options))
    except psycopg.Error:
        problem = "url" if url is not None else "connection"
    if problem == "url":
        raise UsageError(
            "url of a postgres source cannot be understood",
            detail="libpq cannot read it. It is not shown, for it may hold a password.",
            hint="Write it like postgresql://user:password@host:5432/database; in a password, "
            "write @ as %40, : as %3A, / as %2F, % as %25.",
        )
    if any("@" in str(parameters.get(name, "")) for name in ("host", "port")):
        raise UsageError(
            "url of a postgres source has an @ too many",
            detail="The text after the first @ would be the server. It is not printed, because it "
            "may be part of a password.",
            hint="In a name and in a password, write @ as %40, : as %3A, / as %2F, % as %25.",
        )
    if problem:
        known = [option.keyword.decode() for option in psycopg.pq.Conninfo.get_defaults()]
        unknown = [name for name in connection or {} if name not in known]
        close = similar(unknown[0], known) if unknown else []
        raise UsageError(
            f'parameter "{unknown[0]}" of connection of a postgres source does not exist in libpq'
            if unknown
            else "connection of a postgres source cannot be understood",
            hint=f'Did you mean "{close[0]}"?'
            if close
            else "Use libpq's names: host, port, "
            "dbname, user, password, sslmode, sslrootcert and so on.",
        )
    if "replication" in parameters:
        raise UsageError(
            "a postgres source sets replication itself",
            hint="Leave replication out of the url or connection.",
        )
    return {name: str(value) for name, value in parameters.items()}


def _read_columns(section: Mapping[str, Any], key: str, table: TableName) -> tuple[str, ...]:
    columns = section.get(key, ())
    if (
        isinstance(columns, str)
        or not isinstance(columns, Sequence)
        or not all(isinstance(column, str) for column in columns)
    ):
        raise UsageError(
            f'"{key}" of table {table} is not a list of columns', hint=f"Write {key}: [photo]."
        )
    return tuple(dict.fromkeys(columns))


_T = TypeVar("_T")


def _read_typed(
    section: Mapping[str, Any], key: str, kind: type[_T], what: str, *, default: Any
) -> Any:
    value = section.get(key, default)
    if value is None or type(value) is kind:
        return value
    raise UsageError(f'"{key}" of a postgres source is {value!r}', hint=f"Write {what}.")


def _reject_unknown_keys(section: Mapping[str, Any], known: Sequence[str], what: str) -> None:
    for key in section:
        if key not in known:
            close = similar(str(key), known)
            raise UsageError(
                f'{what} has no option "{key}"',
                hint=f'Did you mean "{close[0]}"?' if close else f"There are: {', '.join(known)}.",
            )
