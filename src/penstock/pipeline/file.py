"""A pipeline's file, parsed and checked.

Every error names the line and the key and says what would be valid; all of them
are told at once. None shows a value, which may have come from a variable and be a
secret; but for the names of tables and their columns, which are none.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

import yaml
from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    GetPydanticSchema,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import core_schema

from penstock.errors import UsageError
from penstock.pipeline.kafka import KafkaSection, kafka_of
from penstock.pipeline.measures import Duration, Flag, FromOne, FromZero, Size
from penstock.pipeline.problems import problems, told
from penstock.pipeline.section import FOLDER, Section
from penstock.pipeline.written import (
    Missing,
    Written,
    escaped,
    interpolated,
    read,
    value_in,
    wrong,
)
from penstock.sources.kafka.config import KafkaConfig
from penstock.sources.postgres.config import PUBLICATION, PostgresConfig, TableSpec

__all__ = [
    "CATALOG",
    "BindingSection",
    "CollectionSection",
    "MaterializationSection",
    "Pipeline",
    "SourceSection",
    "load",
    "load_written",
]

CATALOG: Final = "catalog"
"""The storage location in which the catalog is."""

_NAME: Final = r"^[A-Za-z_][A-Za-z0-9_-]{0,62}$"


Name = Annotated[str, Field(pattern=_NAME)]


class TableSection(Section):
    """A table to follow, and what to do with some of its columns."""

    name: str
    """Schema and table: public.orders."""

    exclude: tuple[str, ...] = ()
    """Columns that are left out."""

    text: tuple[str, ...] = ()
    """Columns that are kept as the server's text, whatever their type."""

    @model_validator(mode="after")
    def _can_be_meant(self) -> Self:
        try:
            TableSpec.parse(self.model_dump())
        except UsageError as error:
            raise told(error) from None
        return self


def _table(value: object) -> object:
    if isinstance(value, str):
        return {"name": value}
    if isinstance(value, Mapping):
        return value
    raise ValueError("give a name like public.orders, or a mapping with name, exclude and text")


class PostgresSection(Section):
    """A Postgres to follow."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"required": ["url"], "properties": {"url": {"type": "string"}}},
                {"required": ["connection"], "properties": {"connection": {"type": "object"}}},
            ]
        }
    )

    url: str | None = Field(None, repr=False)
    """postgresql://user:password@host:5432/database; the password best as ${NAME}."""

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
    """Instead of a url, libpq's parameters by their names."""

    publication: str = PUBLICATION
    """The publication to follow; it is created if it does not exist and the role may."""

    tables: (
        tuple[
            Annotated[
                TableSection, BeforeValidator(_table, json_schema_input_type=str | TableSection)
            ],
            ...,
        ]
        | None
    ) = None
    """Which tables; without it, all that are published."""

    snapshot_tasks: FromOne | None = None
    """Into how many pieces the first copy of a large table is split."""

    slot_warning: FromOne = 1 << 30
    """How many bytes of log the slot may hold back on the server before a warning."""


def _postgres(section: PostgresSection) -> PostgresConfig:
    try:
        return PostgresConfig.parse(section.model_dump(exclude_unset=True))
    except UsageError as error:
        raise told(error) from None


class SourceSection(Section):
    """One source: what it is, and how its progress is called."""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": ["postgres"]}, {"required": ["kafka"]}]}
    )

    postgres: (
        Annotated[
            PostgresConfig,
            GetPydanticSchema(
                lambda _, handler: core_schema.no_info_after_validator_function(
                    _postgres, handler.generate_schema(PostgresSection)
                )
            ),
        ]
        | None
    ) = None
    """A database."""

    kafka: (
        Annotated[
            KafkaConfig,
            GetPydanticSchema(
                lambda _, handler: core_schema.no_info_after_validator_function(
                    kafka_of, handler.generate_schema(KafkaSection)
                )
            ),
        ]
        | None
    ) = None
    """A topic."""

    progress: Name | None = None
    """What its progress relation is called; else after the source, with _progress."""

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if (self.postgres is None) == (self.kafka is None):
            raise ValueError("a source is either postgres or kafka")
        return self


class CollectionSection(Section):
    """What a collection's rows are as documents, where its source does not say."""

    key: tuple[str, ...] | Literal["row"] | None = None
    """Pointers into the document, or `row`: whole rows, with their number."""

    documents: Annotated[dict[str, Any], WithJsonSchema({"type": ["object", "string"]})] | None = (
        Field(None, alias="schema")
    )
    """A JSON schema, with its `reduce` annotations: rows are reduced into those before."""

    document: str | None = None
    """The column that has the document; without, each row is one."""

    order: tuple[str, ...] = ()
    """Columns that say in which order documents of a key are reduced."""

    projections: dict[str, str] = Field(default_factory=dict)
    """Names for pointers into the document."""

    @model_validator(mode="after")
    def _says_what_is_reduced(self) -> Self:
        if self.documents is None and (self.document or self.order or self.projections):
            raise ValueError("document, order and projections need a schema")
        if self.documents is not None and not isinstance(self.key, tuple):
            raise ValueError("a schema needs a key: pointers, such as [/id]")
        return self


class FieldsSection(Section):
    """Which fields of a collection a binding takes."""

    recommended: Flag = True
    """Whether to take what the connector recommends."""

    include: tuple[str, ...] = ()
    """Fields to take besides."""

    exclude: tuple[str, ...] = ()
    """Fields to leave out."""


class BindingSection(Section):
    """A collection bound to a resource of the endpoint."""

    collection: str
    """Its name: SOURCE.SCHEMA.TABLE for a table."""

    resource: dict[str, Any]
    """Where it goes, as the connector has it."""

    fields: FieldsSection = FieldsSection()
    """Which fields; without it, those that the connector recommends."""

    delete: Literal["hard", "soft", "ignore"] = "hard"
    """What becomes of a deleted row."""

    backfill: FromZero = 0
    """Raise it to have the resource written anew."""

    delta_updates: Flag = False
    """Store each change, load nothing."""


class TlsSection(Section):
    """Certificates for the line to a connector."""

    ca: Path | None = None
    """A file: who must have signed."""

    certificate: Path | None = None
    """A file: our own certificate."""

    key: Path | None = None
    """A file: its key."""


class GrpcSection(Section):
    """A connector that somebody else runs."""

    address: str
    """host:port or unix:PATH, as every task sees it."""

    tls: TlsSection | None = None
    """Certificates; without it, and beyond this machine, there is no line."""

    token: str = Field("", repr=False)
    """The bearer token that it asks for."""

    plaintext: Flag = False
    """Go without TLS beyond loopback and unix sockets."""


class ConnectorSection(Section):
    """Where a connector is, if it is not one of ours."""

    grpc: GrpcSection


class MaterializationSection(Section):
    """Collections into resources of one endpoint."""

    model_config = ConfigDict(
        json_schema_extra={
            "if": {
                "properties": {"shards": {"type": "integer", "minimum": 2}},
                "required": ["shards"],
            },
            "then": {
                "required": ["consistency"],
                "properties": {"consistency": {"type": "string"}},
            },
        }
    )

    connector: str | ConnectorSection
    """The name of a built-in one, or where another one is."""

    endpoint: dict[str, Any] = Field(default_factory=dict)
    """How the connector is configured."""

    bindings: tuple[BindingSection, ...]
    """Collections, and where they go."""

    on_error: Literal["leave_behind", "stop"] = "leave_behind"
    """What to do about a collection in error: freeze its bindings, or stop all of them there."""

    pace: Duration | None = None
    """How long to wait between transactions; without it, the file's tick."""

    size: Size = 1 << 30
    """About how much of a backlog goes into one transaction: 64MiB; 1GiB is the default."""

    shards: FromOne = 1
    """Over how many streams, each with a range of keys."""

    consistency: Literal["per-shard"] | None = None
    """That changes of several keys may be seen half done, as more than one shard has it."""

    @model_validator(mode="after")
    def _says_what_shards_cost(self) -> Self:
        if self.shards > 1 and self.consistency is None:
            raise ValueError(
                "more than one shard tears changes of several rows apart; to have it so, say "
                "consistency: per-shard"
            )
        return self


class Pipeline(Section):
    """A whole file."""

    location: str
    """The lake: file:./penstock-data, s3://bucket/prefix."""

    writer: Annotated[str, Field(min_length=1)] | None = None
    """Under which id its lock is taken; without it, one of the lake and the host."""

    tick: Annotated[Duration, Field(gt=0)] = 1_000
    """How often times are sealed: 250ms, 1s, which is the default."""

    retain: Duration = 86_400_000
    """How far back collections can be read: 7d; 24h is the default."""

    sources: dict[Name, SourceSection] = Field(default_factory=dict)
    """Where data comes from, by name."""

    collections: dict[str, CollectionSection] = Field(default_factory=dict)
    """What rows are as documents, by the name of the collection, where that must be said."""

    materializations: dict[Name, MaterializationSection] = Field(default_factory=dict)
    """Where data goes, by name."""

    def append_only(self) -> frozenset[str]:
        """Return the collections of which no row is ever deleted."""
        names = set()
        for name, source in self.sources.items():
            if source.kafka is not None:
                names.add(f"{name}_errors")
            if source.kafka is not None and source.kafka.envelope == "none":
                names |= {name, *(f"{name}.{topic}" for topic in source.kafka.topics)}
        return frozenset(names)

    @model_validator(mode="after")
    def _names_each_once(self) -> Self:
        if CATALOG in self.sources or CATALOG in self.materializations:
            raise ValueError(
                f'"{CATALOG}" is where a lake keeps its catalog, so nothing else can be called so'
            )
        for name in self.materializations:
            if name in self.sources:
                raise ValueError(
                    f'"{name}" is the name of a source and of a materialization; each has a '
                    "storage location of its own, so name one of them otherwise"
                )
        return self


def load(path: str | Path, environment: Mapping[str, str] | None = None) -> Pipeline:
    """The pipeline in a file.

    Raises:
        UsageError: it cannot be read, or says something it cannot mean.
    """
    environment = os.environ if environment is None else environment
    written = _with_schemas(read(Path(path)), environment)
    missing: list[Missing] = []
    content = interpolated(written.content, environment, missing)
    if missing:
        raise _unset(written, missing)
    try:
        return Pipeline.model_validate(content, context={FOLDER: written.path.parent})
    except ValidationError as error:
        found = problems(written, error, Pipeline.model_json_schema())
        raise wrong(written.path, list(found)) from None


def load_written(path: str | Path, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What a file says before variables are put in, with the schemas that it names.

    Within those, whose variables are none, `${NAME}` is written `$${NAME}`.

    Raises:
        UsageError: it, or a schema, cannot be read.
    """
    environment = os.environ if environment is None else environment
    return _with_schemas(read(Path(path)), environment).content


def _with_schemas(written: Written, environment: Mapping[str, str]) -> Written:
    """Put in the schemas that are in files of their own, named from the pipeline's."""
    sections = written.content.get("collections")
    for name, section in sections.items() if isinstance(sections, dict) else ():
        if not isinstance(section, dict) or not isinstance(section.get("schema"), str):
            continue
        missing: list[Missing] = []
        keys = ("collections", str(name), "schema")
        where = written.path.parent / interpolated(section["schema"], environment, missing, keys)
        if missing:
            raise _unset(written, missing)
        try:
            section["schema"] = escaped(value_in(where.read_text(encoding="utf-8")))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise UsageError(
                f'schema "{where}" of collection "{name}" cannot be read',
                detail=f"{error}.",
                hint="Name a file of JSON or YAML, from the folder of the pipeline's file.",
            ) from error
    return written


def _unset(written: Written, missing: Sequence[Missing]) -> UsageError:
    uses = [
        f"${{{each.name}}} at line {written.place(each.keys)[0]}, {'.'.join(each.keys)}"
        for each in missing
    ]
    more = f", and {len(uses) - 1} more" if len(uses) > 1 else ""
    names = " ".join(f"{name}=…" for name in dict.fromkeys(each.name for each in missing))
    return UsageError(
        f'pipeline file "{written.path}" uses {uses[0]}, which is not set{more}',
        detail="\n".join(uses) if more else "",
        hint=f"Set it in the environment: export {names}; or write $${{…}} for the characters.",
    )
