"""A pipeline file, parsed and validated.

Every error names the line, the key and the valid form; all errors are reported together. An
error never contains a value, which can be a secret from a variable. Names of tables
and columns are not secrets.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

import yaml
from pydantic import (
    ConfigDict,
    Field,
    GetPydanticSchema,
    ValidationError,
    WithJsonSchema,
    create_model,
    model_validator,
)

from penstock.errors import UsageError
from penstock.pipeline.section import FOLDER, Section
from penstock.pipeline.sections import section_of
from penstock.pipeline.units import Duration, Flag, FromOne, FromZero, Size
from penstock.pipeline.validation_errors import validation_problems
from penstock.pipeline.yaml_text import (
    UnsetVariable,
    YamlText,
    escape,
    invalid_file_error,
    parse_value,
    read_yaml,
    substitute,
)
from penstock.sources.registry import SourceKind, source_kinds

__all__ = [
    "CATALOG",
    "BindingSection",
    "CollectionSection",
    "MaterializationSection",
    "Pipeline",
    "SourceSection",
    "load",
    "load_unresolved",
]

CATALOG: Final = "catalog"
"""Name of the storage location of the catalog."""

_NAME: Final = r"^[A-Za-z_][A-Za-z0-9_-]{0,62}$"


Name = Annotated[str, Field(pattern=_NAME)]


class SourceSection(Section):
    """A source, with the name of its progress relation."""

    # `_source_section` adds one key for each source kind.

    progress: Name | None = None
    """Name of the progress relation. Default: the name of the source and _progress."""

    @property
    def kind(self) -> SourceKind:
        """Return the kind of the source."""
        return next(
            kind for name, kind in source_kinds().items() if getattr(self, name) is not None
        )

    @property
    def config(self) -> Any:
        """Return the validated section of the kind."""
        return getattr(self, self.kind.name)

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        kinds = source_kinds()
        if sum(getattr(self, name) is not None for name in kinds) != 1:
            *others, last = kinds
            raise ValueError(f"a source is either {', '.join(others)} or {last}")
        return self


def _source_section() -> type[SourceSection]:
    """Return the model of a source, with a key for each source kind."""
    kinds = source_kinds()
    fields: dict[str, Any] = {
        name: (section_of(kind) | None, Field(None, description=kind.summary))
        for name, kind in kinds.items()
    }
    model: type[SourceSection] = create_model(
        "SourceSection", __base__=SourceSection, __doc__=SourceSection.__doc__, **fields
    )
    model.model_config["json_schema_extra"] = {"oneOf": [{"required": [name]} for name in kinds]}
    return model


class CollectionSection(Section):
    """Documents of a collection, if its source does not define them."""

    key: tuple[str, ...] | Literal["row"] | None = None
    """JSON pointers of the key, or `row`: complete rows with their number."""

    documents: Annotated[dict[str, Any], WithJsonSchema({"type": ["object", "string"]})] | None = (
        Field(None, alias="schema")
    )
    """JSON schema with `reduce` annotations to reduce rows by."""

    document: str | None = None
    """Column that contains the document. Default: each row is a document."""

    order: tuple[str, ...] = ()
    """Columns that define the reduction order of the documents of a key."""

    projections: dict[str, str] = Field(default_factory=dict)
    """Field names for JSON pointers into the document."""

    @model_validator(mode="after")
    def _check_reduction(self) -> Self:
        if self.documents is None and (self.document or self.order or self.projections):
            raise ValueError("document, order and projections need a schema")
        if self.documents is not None and not isinstance(self.key, tuple):
            raise ValueError("a schema needs a key: pointers, such as [/id]")
        return self


class FieldsSection(Section):
    """Fields of a collection that a binding selects."""

    recommended: Flag = True
    """Select the fields that the connector recommends."""

    include: tuple[str, ...] = ()
    """Additional fields to select."""

    exclude: tuple[str, ...] = ()
    """Fields to omit."""


class BindingSection(Section):
    """A collection bound to a resource of the endpoint."""

    collection: str
    """Name of the collection: SOURCE.SCHEMA.TABLE for a table."""

    resource: dict[str, Any]
    """Resource configuration of the connector."""

    fields: FieldsSection = FieldsSection()
    """Fields to write. Default: the fields that the connector recommends."""

    delete: Literal["hard", "soft", "ignore"] = "hard"
    """Handling of deleted rows."""

    backfill: FromZero = 0
    """Increase to backfill the resource again."""

    delta_updates: Flag = False
    """Store every change without loading documents."""


class TlsSection(Section):
    """TLS files for the connection to a connector."""

    ca: Path | None = None
    """CA file to verify the connector with."""

    certificate: Path | None = None
    """Client certificate file."""

    key: Path | None = None
    """Key file of the client certificate."""


class GrpcSection(Section):
    """A connector that runs as a separate server."""

    address: str
    """Address host:port or unix:PATH, reachable from every Spark task."""

    tls: TlsSection | None = None
    """TLS files; required unless the connector is local or plaintext is set."""

    token: str = Field("", repr=False)
    """Bearer token for the connector."""

    plaintext: Flag = False
    """Allow connections without TLS beyond loopback and Unix sockets."""


class ConnectorSection(Section):
    """Address of a connector that is not built in."""

    grpc: GrpcSection


class MaterializationSection(Section):
    """Collections bound to resources of one endpoint."""

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
    """Name of a built-in connector, or the address of another."""

    endpoint: dict[str, Any] = Field(default_factory=dict)
    """Endpoint configuration of the connector."""

    bindings: tuple[BindingSection, ...]
    """Collections with their resources."""

    on_error: Literal["leave_behind", "stop"] = "leave_behind"
    """Handling of an errored collection: freeze its bindings, or stop the materialization."""

    pace: Duration | None = None
    """Pause between transactions. Default: the tick of the file."""

    size: Size = 1 << 30
    """Approximate size of a transaction during catch-up, such as 64MiB. Default: 1GiB."""

    shards: FromOne = 1
    """Number of shards, each with a range of keys."""

    consistency: Literal["per-shard"] | None = None
    """Required with several shards: transactions are atomic per shard only."""

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if self.shards > 1 and self.consistency is None:
            raise ValueError(
                "with more than one shard, changes of several rows are not atomic; to accept "
                "this, write consistency: per-shard"
            )
        return self


class Pipeline(Section):
    """A pipeline file."""

    location: str
    """URL of the lake: file:./penstock-data, s3://bucket/prefix."""

    writer: Annotated[str, Field(min_length=1)] | None = None
    """Writer id of the locks. Default: derived from the lake and the host."""

    tick: Annotated[Duration, Field(gt=0)] = 1_000
    """Interval of ticks, such as 250ms. Default: 1s."""

    retain: Duration = 86_400_000
    """Retained history of collections, such as 7d. Default: 24h."""

    sources: dict[
        Name,
        Annotated[
            SourceSection,
            GetPydanticSchema(lambda _, handler: handler.generate_schema(_source_section())),
        ],
    ] = Field(default_factory=dict)
    """Sources, by name."""

    collections: dict[str, CollectionSection] = Field(default_factory=dict)
    """Documents of collections, by collection name."""

    materializations: dict[Name, MaterializationSection] = Field(default_factory=dict)
    """Materializations, by name."""

    def append_only(self) -> frozenset[str]:
        """Return the collections whose rows are never deleted."""
        return frozenset(
            collection
            for name, source in self.sources.items()
            for collection in source.kind.append_only(name, source.config)
        )

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        if CATALOG in self.sources or CATALOG in self.materializations:
            raise ValueError(
                f'the name "{CATALOG}" is reserved for the catalog of the lake; use another name'
            )
        for name in self.materializations:
            if name in self.sources:
                raise ValueError(
                    f'"{name}" names a source and a materialization; each has a storage location '
                    "of that name, so rename one of them"
                )
        return self


def load(path: str | Path, environment: Mapping[str, str] | None = None) -> Pipeline:
    """Load a pipeline file.

    Raises:
        UsageError: The file cannot be read or is invalid.
    """
    environment = os.environ if environment is None else environment
    yaml_text = _with_schemas(read_yaml(Path(path)), environment)
    missing: list[UnsetVariable] = []
    content = substitute(yaml_text.content, environment, missing)
    if missing:
        raise _unset(yaml_text, missing)
    try:
        return Pipeline.model_validate(content, context={FOLDER: yaml_text.path.parent})
    except ValidationError as error:
        problems = validation_problems(yaml_text, error, Pipeline.model_json_schema())
        raise invalid_file_error(yaml_text.path, list(problems)) from None


def load_unresolved(
    path: str | Path, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the content of a file before substitution, including the referenced schemas.

    In the schemas, which have no variables, `${NAME}` is escaped as `$${NAME}`.

    Raises:
        UsageError: The file or a schema cannot be read.
    """
    environment = os.environ if environment is None else environment
    return _with_schemas(read_yaml(Path(path)), environment).content


def _with_schemas(yaml_text: YamlText, environment: Mapping[str, str]) -> YamlText:
    """Insert the schemas that are in separate files, relative to the pipeline file."""
    sections = yaml_text.content.get("collections")
    for name, section in sections.items() if isinstance(sections, dict) else ():
        if not isinstance(section, dict) or not isinstance(section.get("schema"), str):
            continue
        missing: list[UnsetVariable] = []
        keys = ("collections", str(name), "schema")
        schema_path = yaml_text.path.parent / substitute(
            section["schema"], environment, missing, keys
        )
        if missing:
            raise _unset(yaml_text, missing)
        try:
            section["schema"] = escape(parse_value(schema_path.read_text(encoding="utf-8")))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise UsageError(
                f'schema "{schema_path}" of collection "{name}" cannot be read',
                detail=f"{error}.",
                hint="Write the path of a JSON or YAML file, relative to the pipeline file.",
            ) from error
    return yaml_text


def _unset(yaml_text: YamlText, missing: Sequence[UnsetVariable]) -> UsageError:
    uses = [
        f"${{{unset.name}}} at line {yaml_text.place(unset.keys)[0]}, {'.'.join(unset.keys)}"
        for unset in missing
    ]
    more = f", and {len(uses) - 1} more" if len(uses) > 1 else ""
    names = " ".join(f"{name}=…" for name in dict.fromkeys(variable.name for variable in missing))
    return UsageError(
        f'pipeline file "{yaml_text.path}" uses {uses[0]}, which is not set{more}',
        detail="\n".join(uses) if more else "",
        hint=f"Set it in the environment: export {names}. To write the characters, use $${{…}}.",
    )
