"""The section of a Postgres source."""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Self

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from penstock.errors import UsageError
from penstock.pipeline.section import Section, with_config
from penstock.pipeline.units import FromOne
from penstock.pipeline.validation_errors import to_value_error
from penstock.sources.postgres.config import PUBLICATION, PostgresConfig, TableSpec

__all__ = ["SECTION", "PostgresSection", "build_postgres_config"]


class TableSection(Section):
    """A table to capture, with options for its columns."""

    name: str
    """Schema and table: public.orders."""

    exclude: tuple[str, ...] = ()
    """Columns to omit."""

    text: tuple[str, ...] = ()
    """Columns to store as the text of the server, regardless of their type."""

    @model_validator(mode="after")
    def _check_table(self) -> Self:
        try:
            TableSpec.parse(self.model_dump())
        except UsageError as error:
            raise to_value_error(error) from None
        return self


def _table(value: object) -> object:
    if isinstance(value, str):
        return {"name": value}
    if isinstance(value, Mapping):
        return value
    raise ValueError("write a name such as public.orders, or a mapping with name, exclude and text")


class PostgresSection(Section):
    """A Postgres database to capture."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"required": ["url"], "properties": {"url": {"type": "string"}}},
                {"required": ["connection"], "properties": {"connection": {"type": "object"}}},
            ]
        }
    )

    url: str | None = Field(None, repr=False)
    """URL postgresql://user:password@host:5432/database; write the password as ${NAME}."""

    connection: dict[str, Any] | None = Field(
        None,
        repr=False,
        json_schema_extra={
            "properties": {
                name: {}
                for name in ("host", "port", "dbname", "user", "password", "sslmode", "sslrootcert")
            }
        },
    )
    """libpq connection parameters, instead of a URL."""

    publication: str = PUBLICATION
    """Publication to read; it is created if it does not exist and the role has permission."""

    tables: (
        tuple[
            Annotated[
                TableSection, BeforeValidator(_table, json_schema_input_type=str | TableSection)
            ],
            ...,
        ]
        | None
    ) = None
    """Tables to capture. Default: all published tables."""

    snapshot_tasks: FromOne | None = None
    """Number of splits for the initial snapshot of a large table."""

    slot_warning: FromOne = 1 << 30
    """Warn if the slot retains more than this many bytes of WAL."""


def build_postgres_config(section: PostgresSection) -> PostgresConfig:
    """Convert the section to the config of the source."""
    try:
        return PostgresConfig.parse(section.model_dump(exclude_unset=True))
    except UsageError as error:
        raise to_value_error(error) from None


SECTION: Final = with_config(PostgresSection, build_postgres_config)
