"""From what the file says to what is applied and opened.

    file, collections ─► Validate ─► fields selected ─► specification, version ─► Apply

The version is a hash of the specification, so it changes exactly when that does.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import xxhash

from penstock.errors import UsageError
from penstock.materialize.binding import Documents, Shape
from penstock.materialize.client import Connection
from penstock.materialize.layout import Layout, layout_of
from penstock.pipeline.file import BindingSection, MaterializationSection
from penstock.protocol.messages import Apply, Validate, ValidateBinding, ValidatedBinding
from penstock.protocol.selection import Wish, select_fields
from penstock.protocol.specs import CollectionSpec, MaterializationBinding, MaterializationSpec
from penstock.protocol.wire import encode
from penstock.reduce.annotation import Schema

__all__ = ["Built", "Described", "build", "check_config", "endpoint_of", "resources_of"]

Described = tuple[CollectionSpec, Shape]
"""What a connector is told of a collection, and how its rows become that."""


@dataclass(frozen=True)
class Built:
    """A materialization as its connector agreed to it."""

    spec: MaterializationSpec
    version: str
    described: list[Described]
    """The collections as they were asked about, by binding."""

    deletes: tuple[bool, ...]
    """For each binding, whether documents may be removed."""

    empties: tuple[bool, ...]
    """For each binding, whether its resource may be emptied."""

    filled: tuple[frozenset[str], ...]
    """For each binding, fields whose new columns hold the stored default in every row."""

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        """Layout that each binding gives its resource."""
        return tuple(
            layout_of(*described, binding)
            for described, binding in zip(self.described, self.spec.bindings, strict=True)
        )

    @cached_property
    def layout_ids(self) -> tuple[str, ...]:
        """Ids of the layouts; empty for delta updates, of which none is sent again."""
        return tuple(
            "" if binding.delta_updates else layout.id
            for layout, binding in zip(self.layouts, self.spec.bindings, strict=True)
        )

    def columns(self, number: int) -> str:
        """Which columns tell the rows of a binding apart, if all of them do."""
        _, shape = self.described[number]
        standard = not self.spec.bindings[number].delta_updates
        return shape.columns if standard and isinstance(shape, Documents) else ""

    def apply(self, connection: Connection, *, dry_run: bool = False) -> str:
        """Make the endpoint fit; what was done, or would be."""
        return connection.apply(Apply(self.spec, self.version, dry_run)).action_description


def build(
    name: str,
    section: MaterializationSection,
    described: list[Described],
    connection: Connection,
) -> Built:
    """Ask the connector, and choose fields by what it says and what the file wishes.

    Raises:
        UsageError: fields cannot be chosen so, or two bindings have one resource.
        ConnectorError: the connector refused, or cannot be reached.
    """
    resources = check_config(name, section, connection)
    endpoint = endpoint_of(section)
    asked = tuple(
        ValidateBinding(_json(resource), collection)
        for resource, (collection, _) in zip(resources, described, strict=True)
    )
    answers = connection.validate(Validate(name, endpoint, asked)).bindings
    if len(answers) != len(asked):
        raise UsageError(
            f'the connector of materialization "{name}" answered for {len(answers)} bindings '
            f"of {len(asked)}",
            hint="See what it does: penstock connector check",
        )
    _check_paths(name, section, answers)
    _check_keys(name, described, answers)
    bindings = tuple(
        _binding(binding, asked_for, answer)
        for binding, asked_for, answer in zip(section.bindings, asked, answers, strict=True)
    )
    spec = MaterializationSpec(name, endpoint, bindings)
    return Built(
        spec,
        xxhash.xxh128_hexdigest(encode(spec)),
        described,
        tuple(
            answer.accepts_delete and binding.delete != "ignore"
            for binding, answer in zip(section.bindings, answers, strict=True)
        ),
        tuple(answer.accepts_empty for answer in answers),
        tuple(frozenset[str]() for _ in answers),
    )


def _binding(
    section: BindingSection, asked: ValidateBinding, answer: ValidatedBinding
) -> MaterializationBinding:
    wish = Wish(
        include=section.fields.include,
        exclude=section.fields.exclude,
        recommended=section.fields.recommended,
    )
    return MaterializationBinding(
        resource_spec_json=asked.resource_spec_json,
        resource_path=answer.resource_path,
        collection=asked.collection,
        field_selection=select_fields(asked.collection, answer.constraints, wish),
        delta_updates=answer.delta_updates,
    )


def _resource(section: BindingSection) -> Mapping[str, Any]:
    """What the user says of the resource, with what the binding says of it."""
    said = dict(section.resource)
    if section.delta_updates:
        said["delta_updates"] = True
    if section.delete == "soft":
        said["delete"] = "soft"
    return said


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
                f'materialization "{name}" have one resource: {".".join(answer.resource_path)}',
                hint="Give each of them a resource of its own.",
            )


def _check_keys(
    name: str, described: Sequence[Described], answers: Sequence[ValidatedBinding]
) -> None:
    for (collection, shape), answer in zip(described, answers, strict=True):
        if isinstance(shape, Documents) and shape.keyless and not answer.delta_updates:
            raise UsageError(
                f'collection "{collection.collection}" has no key, and materialization "{name}" '
                "would store its rows by key",
                hint="Under collections:, name columns as its key (key: [/a, /b]), or say "
                "key: row to keep whole rows with their number; or bind it with "
                "delta_updates: true.",
            )


def endpoint_of(section: MaterializationSection) -> str:
    """What the connector is told of the endpoint."""
    return _json(section.endpoint)


def resources_of(section: MaterializationSection) -> list[str]:
    """What the connector is told of each resource."""
    return [_json(_resource(binding)) for binding in section.bindings]


def check_config(
    name: str, section: MaterializationSection, connection: Connection
) -> Sequence[Mapping[str, Any]]:
    """Hold what the file says against the schemas that the connector gives; the resources.

    Raises:
        UsageError: it is not as the connector wants it.
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
    for what, schema, value in configured:
        try:
            known = Schema(json.loads(schema or "true"))
        except UsageError:
            continue  # It says more than we can check; the connector does that itself.
        if known.visit(value) is None:
            wrong = known.explain(value)
            raise UsageError(
                f'{what} of materialization "{name}" is wrong at "{wrong.location}"',
                detail=f'Its connector gives a schema, whose keyword "{wrong.keyword}" refuses it.',
                hint="Its connector does not mark what is deleted: say delete: hard."
                if wrong.location == "/delete"
                else "See what it takes: penstock connector spec",
            )
    return resources


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)
