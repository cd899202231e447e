"""Construction of a materialization spec from the pipeline file and the collections.

    file, collections ─► Validate ─► fields selected ─► specification, version ─► Apply

The version is a hash of the specification, so it changes exactly when the specification does.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Self

import xxhash

from penstock.errors import Problem, UsageError, similar
from penstock.materialize.binding_kind import BindingKind, DocumentsKind, RowsKind
from penstock.materialize.checkpoint import path_text
from penstock.materialize.connector_client import ConnectorConnection
from penstock.materialize.layout import Layout, layout_of
from penstock.pipeline import BindingSection, MaterializationSection
from penstock.protocol.field_selection import FieldPreferences, select_fields
from penstock.protocol.messages import Apply, Validate, ValidateBinding, ValidatedBinding
from penstock.protocol.specs import (
    CollectionSpec,
    ConstraintType,
    MaterializationBinding,
    MaterializationSpec,
)
from penstock.protocol.wire import encode
from penstock.reduce import Schema

__all__ = [
    "BuiltSpec",
    "DescribedCollection",
    "IncompatibleCollection",
    "IncompatibleResource",
    "build",
    "check_config",
    "endpoint_of",
    "resources_of",
]

_OF_ONE_KEY: Final = ("properties", "patternProperties", "$defs", "definitions", "$id", "$schema")
"""JSON schema keywords that constrain a single key, or that such keywords refer to."""

DescribedCollection = tuple[CollectionSpec, BindingKind]
"""Collection spec for the connector, and the conversion of rows to its documents."""


class IncompatibleCollection(UsageError):
    """One of the bindings of a collection cannot store it."""

    collection: str
    paths: tuple[str, ...]
    """Paths of all resources of the collection, as `path_text` writes them."""

    def of(
        self, section: MaterializationSection, answers: Sequence[ValidatedBinding], number: int
    ) -> Self:
        """Set the collection of binding `number` and the paths of its resources.

        `answers` are the responses to Validate for all bindings of `section`.
        """
        self.collection = section.bindings[number].collection
        self.paths = tuple(
            path_text(answer.resource_path)
            for binding, answer in zip(section.bindings, answers, strict=True)
            if binding.collection == self.collection
        )
        return self


class IncompatibleResource(IncompatibleCollection):
    """A resource must be dropped and created again to take the documents of its binding."""

    def __init__(
        self,
        materialization: str,
        section: MaterializationSection,
        answers: Sequence[ValidatedBinding],
        number: int,
        hint: str,
    ) -> None:
        """Describe the mismatch of the resource of binding `number`.

        `answers` are the responses to Validate for all bindings of `section`.
        """
        answer = answers[number]
        path, collection = ".".join(answer.resource_path), section.bindings[number].collection
        super().__init__(
            f'materialization "{materialization}" cannot store collection "{collection}" in '
            f"resource {path}: {answer.recreates}",
            detail="The resource would have to be dropped and created again. It holds "
            f"{answer.rows} rows.",
            hint=hint,
        )
        self.of(section, answers, number)


@dataclass(frozen=True)
class BuiltSpec:
    """A materialization that its connector has validated."""

    spec: MaterializationSpec
    version: str
    described: list[DescribedCollection]
    """For each binding, the collection as sent in Validate."""

    deletes: tuple[bool, ...]
    """For each binding, true if documents may be deleted."""

    empties: tuple[bool, ...]
    """For each binding, true if its resource may be truncated."""

    filled: tuple[frozenset[str], ...]
    """For each binding, fields whose new columns hold the stored default in every row."""

    omitted: tuple[Mapping[str, str], ...]
    """For each binding, the fields that the resource omits, with the reasons."""

    answers: Sequence[ValidatedBinding]
    """For each binding, the response of the connector to Validate."""

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        """For each binding, the layout of its resource."""
        return tuple(
            layout_of(*described, binding)
            for described, binding in zip(self.described, self.spec.bindings, strict=True)
        )

    @cached_property
    def layout_ids(self) -> tuple[str, ...]:
        """For each binding, the id of its layout.

        The id is empty for delta updates: they are never sent again, so a layout change does
        not rewrite the resource.
        """
        return tuple(
            "" if binding.delta_updates else layout.id
            for layout, binding in zip(self.layouts, self.spec.bindings, strict=True)
        )

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """Resource path of each binding, as `path_text` writes it."""
        return tuple(path_text(binding.resource_path) for binding in self.spec.bindings)

    def path(self, number: int) -> str:
        """Return the resource path of a binding, as `path_text` writes it."""
        return self.paths[number]

    def columns(self, number: int) -> str:
        """Return the hash of the columns if all of them identify a row, else an empty text."""
        _, kind = self.described[number]
        standard = not self.spec.bindings[number].delta_updates
        return kind.columns if standard and isinstance(kind, DocumentsKind) else ""

    def apply(self, connection: ConnectorConnection, *, dry_run: bool = False) -> str:
        """Apply the specification; return a description of the actions.

        With `dry_run`, the connector only describes the actions. Apply creates absent resources,
        so check for lost resources first.
        """
        recreates = tuple(
            number
            for number, answer in enumerate(self.answers)
            if answer.recreates or answer.absent
        )
        request = Apply(self.spec, self.version, dry_run, recreates)
        return connection.apply(request).action_description


def build(
    name: str,
    section: MaterializationSection,
    described: list[DescribedCollection],
    connection: ConnectorConnection,
    *,
    append_only: Collection[str] = (),
    is_replaced: Callable[[int, tuple[str, ...]], bool] = lambda number, path: False,
) -> BuiltSpec:
    """Validate the materialization with its connector, and select fields.

    Rows of the collections in `append_only` are never deleted. `is_replaced` takes the number
    of a binding and its resource path. It returns whether the next transaction replaces all rows
    of the resource.

    Raises:
        IncompatibleResource: a resource that is not replaced must be dropped and created again.
        IncompatibleCollection: the field selection is impossible, or a key is missing.
        UsageError: two bindings have the same resource, or deletes would be lost.
        ConnectorError: the connector rejected the materialization, or could not be reached.
    """
    check_config(name, section, connection)
    request = _validate_request(name, section, described)
    endpoint, requested = request.endpoint_spec_json, request.bindings
    answers = connection.validate(request).bindings
    if len(answers) != len(requested):
        raise UsageError(
            f'the connector of materialization "{name}" answered for {len(answers)} bindings '
            f"of {len(requested)}",
            hint="Check the connector: penstock connector check",
        )
    _check_paths(name, section, answers)
    _check_keys(name, section, described, answers)
    _check_deletes(name, section, described, answers, append_only)
    replaced = {
        number for number, answer in enumerate(answers) if is_replaced(number, answer.resource_path)
    }
    if replaced:
        answers = _validate_replaced(request, replaced, connection)
    _check_resources(name, section, request, answers, replaced, connection)
    bindings = tuple(
        _binding(section, number, binding, answers) for number, binding in enumerate(requested)
    )
    spec = MaterializationSpec(name, endpoint, bindings)
    return BuiltSpec(
        spec,
        xxhash.xxh128_hexdigest(encode(spec)),
        described,
        tuple(
            answer.accepts_delete and binding.delete != "ignore"
            for binding, answer in zip(section.bindings, answers, strict=True)
        ),
        tuple(answer.accepts_empty for answer in answers),
        tuple(frozenset(answer.fills) for answer in answers),
        tuple(map(_omitted, section.bindings, bindings, answers)),
        answers,
    )


def _validate_replaced(
    request: Validate, replaced: Collection[int], connection: ConnectorConnection
) -> tuple[ValidatedBinding, ...]:
    bindings = tuple(
        replace(binding, replaces=number in replaced)
        for number, binding in enumerate(request.bindings)
    )
    return connection.validate(replace(request, bindings=bindings)).bindings


def _check_resources(
    name: str,
    section: MaterializationSection,
    request: Validate,
    answers: Sequence[ValidatedBinding],
    replaced: Collection[int],
    connection: ConnectorConnection,
) -> None:
    """Reject mismatched resources that only a backfill with --allow-drop can repair."""
    refused = {
        number
        for number, answer in enumerate(answers)
        if number not in replaced
        and any(
            constraint.type is ConstraintType.UNSATISFIABLE
            for constraint in answer.constraints.values()
        )
    }
    if not refused:
        return
    answers = _validate_replaced(request, refused, connection)
    for number, answer in enumerate(answers):
        if number in refused and answer.recreates:
            backfill = f"backfill: {section.bindings[number].backfill + 1}"
            hint = f"Set {backfill} in the binding and run with --allow-drop, or name another one."
            if section.shards > 1:
                hint = (
                    f"Drop it yourself, and set {backfill} in the binding and shards: 1 until it "
                    "is written; or name another one."
                )
            raise IncompatibleResource(name, section, answers, number, hint)


def _validate_request(
    name: str, section: MaterializationSection, described: Sequence[DescribedCollection]
) -> Validate:
    bindings = tuple(
        ValidateBinding(resource, collection)
        for resource, (collection, _) in zip(resources_of(section), described, strict=True)
    )
    return Validate(name, endpoint_of(section), bindings)


def _binding(
    section: MaterializationSection,
    number: int,
    requested: ValidateBinding,
    answers: Sequence[ValidatedBinding],
) -> MaterializationBinding:
    fields, answer = section.bindings[number].fields, answers[number]
    preferences = FieldPreferences(
        include=fields.include,
        exclude=fields.exclude,
        recommended=fields.recommended,
    )
    try:
        selection = select_fields(requested.collection, answer.constraints, preferences)
    except UsageError as error:
        rejected = IncompatibleCollection(
            str(error), detail=error.detail, hint=error.hint, problems=error.problems
        )
        raise rejected.of(section, answers, number) from error
    return MaterializationBinding(
        resource_spec_json=requested.resource_spec_json,
        resource_path=answer.resource_path,
        collection=requested.collection,
        field_selection=selection,
        delta_updates=answer.delta_updates,
    )


def _resource(section: BindingSection) -> Mapping[str, Any]:
    """Return the resource config, with the options of the binding that the connector needs."""
    config = dict(section.resource)
    if section.delta_updates:
        config["delta_updates"] = True
    if section.delete == "soft":
        config["delete"] = "soft"
    return config


def _check_paths(
    name: str, section: MaterializationSection, answers: Sequence[ValidatedBinding]
) -> None:
    seen: dict[tuple[str, ...], str] = {}
    for binding, answer in zip(section.bindings, answers, strict=True):
        before = seen.get(answer.resource_path)
        seen[answer.resource_path] = binding.collection
        if before is not None:
            raise UsageError(
                f'bindings of collections "{before}" and "{binding.collection}" in '
                f'materialization "{name}" have the same resource: '
                f"{'.'.join(answer.resource_path)}",
                hint="Give each binding its own resource.",
            )


def _check_keys(
    name: str,
    section: MaterializationSection,
    described: Sequence[DescribedCollection],
    answers: Sequence[ValidatedBinding],
) -> None:
    for number, ((collection, kind), answer) in enumerate(zip(described, answers, strict=True)):
        if isinstance(kind, DocumentsKind) and kind.keyless and not answer.delta_updates:
            raise IncompatibleCollection(
                f'collection "{collection.collection}" has no key, and materialization "{name}" '
                "stores its rows by key",
                hint="Under collections:, set key: [/a, /b] to the key columns, or set key: row to "
                "store complete rows with their multiplicity. Or bind the collection with "
                "delta_updates: true.",
            ).of(section, answers, number)


def _check_deletes(
    name: str,
    section: MaterializationSection,
    described: Sequence[DescribedCollection],
    answers: Sequence[ValidatedBinding],
    append_only: Collection[str],
) -> None:
    """Reject bindings whose resource would keep deleted rows that the file does not accept.

    A binding with `delta_updates: true` requests a row for each change, so it needs no deletes.
    """
    problems = []
    for binding, (collection, kind), answer in zip(
        section.bindings, described, answers, strict=True
    ):
        deletes = isinstance(kind, RowsKind) or kind.counted
        if (
            deletes
            and binding.delete == "hard"
            and not answer.accepts_delete
            and not _resource(binding).get("delta_updates")
            and collection.collection not in append_only
        ):
            problems.append(
                Problem(
                    f'connector {_connector(section)} of materialization "{name}" cannot delete '
                    f'from resource "{".".join(answer.resource_path)}", to which collection '
                    f'"{collection.collection}" is bound',
                    detail="Rows that are deleted upstream would stay in the resource.",
                    hint="In the binding, write delete: ignore to keep deleted rows as they were, "
                    "or delete: soft to have them marked, if the connector supports that.",
                )
            )
    if problems:
        first, *others = problems
        more = f", and {len(others)} more" if others else ""
        raise UsageError(
            f"{first.message}{more}", detail=first.detail, hint=first.hint, problems=problems
        )


def _connector(section: MaterializationSection) -> str:
    if isinstance(section.connector, str):
        return f'"{section.connector}"'
    return f"at {section.connector.grpc.address}"


def _omitted(
    section: BindingSection, binding: MaterializationBinding, answer: ValidatedBinding
) -> dict[str, str]:
    """Return the columns of a collection that its resource omits, with the reasons."""
    selection, fields = binding.field_selection, section.fields
    selected = {*selection.keys, *selection.values}
    pointers = {
        projection.ptr
        for projection in binding.collection.projections
        if projection.field in selected
    }
    reasons = {}
    for projection in binding.collection.projections:
        name, pointer = projection.field, projection.ptr
        if pointer in pointers or not pointer or "/" in pointer[1:]:
            continue
        constraint = answer.constraints.get(name)
        if name in fields.exclude:
            reasons[name] = "the pipeline file excludes it"
        elif constraint is not None and constraint.type is not ConstraintType.FIELD_FORBIDDEN:
            why = "the connector does not recommend it" if fields.recommended else "not included"
            reasons[name] = f"{why}: {constraint.reason}; to have it, name it under include"
        else:
            reasons[name] = constraint.reason if constraint else "the connector does not take it"
    return reasons


def endpoint_of(section: MaterializationSection) -> str:
    """Return the endpoint config as JSON."""
    return _json(section.endpoint)


def resources_of(section: MaterializationSection) -> list[str]:
    """Return the resource config of each binding as JSON."""
    return [_json(_resource(binding)) for binding in section.bindings]


def check_config(
    name: str, section: MaterializationSection, connection: ConnectorConnection
) -> Sequence[Mapping[str, Any]]:
    """Check the file against the schemas of the connector, and return the resource configs.

    Raises:
        UsageError: the connector would reject a part of the file. The error lists all problems.
    """
    resources = [_resource(binding) for binding in section.bindings]
    spec = connection.spec()
    configured: list[tuple[str, str, Mapping[str, Any]]] = [
        ("endpoint", spec.endpoint_spec_schema_json, section.endpoint),
    ]
    configured += [
        (f'resource of collection "{binding.collection}"', spec.resource_spec_schema_json, resource)
        for binding, resource in zip(section.bindings, resources, strict=True)
    ]
    problems = [
        problem
        for what, schema, value in configured
        for problem in _config_problems(
            what, json.loads(schema or "true"), value, see=_schema_command(section)
        )
    ]
    if problems:
        raise UsageError(
            f'configuration of materialization "{name}" is wrong: {problems[0].message}'
            + (f", and {len(problems) - 1} more" if problems[1:] else ""),
            detail=problems[0].detail,
            hint="" if problems[1:] else problems[0].hint,
            problems=problems,
        )
    return resources


def _schema_command(section: MaterializationSection) -> str:
    connector = section.connector
    named = connector if isinstance(connector, str) else connector.grpc.address
    return f"See the schema: penstock connector spec {named}"


def _config_problems(
    what: str, schema: Any, value: Mapping[str, Any], *, see: str
) -> list[Problem]:
    """Return the validation errors of a config against the JSON schema of its connector.

    The errors contain no value: it may be a secret. `see` is a hint with the command that prints
    the schema.
    """
    try:
        known = Schema(schema)
    except UsageError:
        return []  # The schema has unsupported keywords. The connector checks the config itself.
    if known.visit(value) is not None:
        return []
    outline: Mapping[str, Any] = schema if isinstance(schema, dict) else {}
    valid = [*outline.get("properties", {})]
    unknown = [
        key for key in value if outline.get("additionalProperties") is False and key not in valid
    ]
    problems = [_unknown_key(what, key, valid) for key in unknown]
    meant = {close[0] for key in unknown if (close := similar(key, valid))}
    problems += [
        Problem(
            f'{what} has no key "{key}"',
            hint=f"Add it. The valid keys are {', '.join(valid)}.",
        )
        for key in outline.get("required", ())
        if key not in value and key not in meant
    ]
    by_key = Schema({key: outline[key] for key in _OF_ONE_KEY if key in outline})
    for key, held in value.items():
        if key not in unknown and by_key.visit({key: held}) is None:
            failure = by_key.explain({key: held})
            problems.append(_wrong_value(what, key, outline, failure.location, see))
    if not problems:
        failure = known.explain(value)
        problems.append(
            Problem(
                f"{what} is not valid",
                detail=f'"{failure.keyword}" in the schema of the connector rejects it.',
                hint=see,
            )
        )
    return problems


def _unknown_key(what: str, key: str, valid: Sequence[str]) -> Problem:
    if key == "delete":
        return Problem(
            f"{what} does not take delete: soft: the connector cannot mark deleted rows",
            hint="Write delete: hard or delete: ignore in the binding.",
        )
    close = similar(key, valid)
    meant = f'Did you mean "{close[0]}"? ' if close else ""
    return Problem(
        f'{what} has a key "{key}", which does not exist',
        hint=f"{meant}The valid keys are {', '.join(valid)}.",
    )


def _wrong_value(
    what: str, key: str, schema: Mapping[str, Any], location: str, see: str
) -> Problem:
    described = schema.get("properties", {}).get(key, {})
    kinds = [
        f"of type {option['type']}"
        if "enum" not in option
        else f"one of {', '.join(map(str, option['enum']))}"
        for option in (described, *described.get("anyOf", ()))
        if isinstance(option.get("type"), str) and option["type"] != "null"
    ]
    expected = f"Give a value {' or '.join(kinds)}. " if kinds else ""
    place = (location or f"/{key}").removeprefix("/").replace("/", ".")
    return Problem(
        f'value of key "{place}" of {what} is not valid',
        detail=f"The connector describes the key as: {about}."
        if (about := described.get("description"))
        else "",
        hint=f"{expected}{see}",
    )


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)
