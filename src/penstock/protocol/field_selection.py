"""Selection of the fields of a binding.

The connector constrains fields, and the user includes and excludes fields by name. Projections
are considered in this order: included fields, explicit projections, all others. For a location
that is required or recommended, the first projection is selected.

    unsatisfiable            an error
    forbidden                not selected; an error if the user includes the field
    field required           selected; an error if the user excludes the field
    location required        selected if no other field of the location is
    location recommended     the same, if the user accepts recommended fields
    optional                 selected if the user includes the field
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from penstock.errors import UsageError
from penstock.protocol.specs import (
    CollectionSpec,
    Constraint,
    ConstraintType,
    FieldSelection,
    Projection,
)

__all__ = ["FieldPreferences", "select_fields"]


@dataclass(frozen=True, slots=True)
class FieldPreferences:
    """Fields that a user includes and excludes."""

    include: Collection[str] = ()
    exclude: Collection[str] = ()
    recommended: bool = True
    field_config_json: Mapping[str, str] = field(default_factory=dict[str, str])


def select_fields(
    collection: CollectionSpec, constraints: Mapping[str, Constraint], preferences: FieldPreferences
) -> FieldSelection:
    """Return the fields of a binding: keys in key order, values by name, one document.

    Raises:
        UsageError: constraints and preferences conflict. The detail lists every conflict.
    """
    conflicts = _unknown_fields(collection, constraints, preferences)
    selected: list[Projection] = []
    locations: set[str] = set()
    required: dict[str, str] = {}
    for projection in sorted(
        collection.projections,
        key=lambda candidate: (candidate.field not in preferences.include, not candidate.explicit),
    ):
        name, ptr = projection.field, projection.ptr
        constraint = constraints.get(name) or Constraint(
            ConstraintType.FIELD_FORBIDDEN, "the connector returned no constraint for the field"
        )
        kind, reason = constraint.type, constraint.reason
        included, excluded = name in preferences.include, name in preferences.exclude
        if kind is ConstraintType.UNSATISFIABLE:
            conflicts.append(f'field "{name}" cannot be satisfied: {reason}')
        elif included and kind is ConstraintType.FIELD_FORBIDDEN:
            conflicts.append(f'field "{name}" is included, but the connector forbids it: {reason}')
        elif excluded and kind is ConstraintType.FIELD_REQUIRED:
            conflicts.append(f'field "{name}" is excluded, but the connector requires it: {reason}')
        if kind is ConstraintType.LOCATION_REQUIRED:
            required.setdefault(ptr, reason)
        if _is_selected(
            kind,
            preferences,
            included=included,
            excluded=excluded,
            location_selected=ptr in locations,
        ):
            selected.append(projection)
            locations.add(ptr)
    conflicts += [
        f"location {ptr or '(the root document)'} is required, but none of its fields is selected: "
        f"{reason}"
        for ptr, reason in required.items()
        if ptr not in locations
    ]
    if conflicts:
        raise UsageError(
            f'cannot select fields of collection "{collection.collection}"',
            detail="; ".join(conflicts) + ".",
            hint="Change the included and excluded fields, or change the collection.",
        )
    return _arrange(collection, selected, preferences)


def _is_selected(
    kind: ConstraintType,
    preferences: FieldPreferences,
    *,
    included: bool,
    excluded: bool,
    location_selected: bool,
) -> bool:
    if excluded:
        return False
    if included or kind is ConstraintType.FIELD_REQUIRED:
        return True
    if kind is ConstraintType.LOCATION_REQUIRED:
        return not location_selected
    return (
        kind is ConstraintType.LOCATION_RECOMMENDED
        and preferences.recommended
        and not location_selected
    )


def _unknown_fields(
    collection: CollectionSpec, constraints: Mapping[str, Constraint], preferences: FieldPreferences
) -> list[str]:
    known = {projection.field for projection in collection.projections}
    return [
        *(
            f'the connector constrains field "{name}", which the collection does not have'
            for name in constraints
            if name not in known
        ),
        *(
            f'field "{name}" is {verb}, but the collection does not have it'
            for verb, names in (
                ("included", preferences.include),
                ("excluded", preferences.exclude),
            )
            for name in names
            if name not in known
        ),
        *(
            f'field "{name}" is both included and excluded'
            for name in preferences.include
            if name in preferences.exclude
        ),
    ]


def _arrange(
    collection: CollectionSpec, selected: list[Projection], preferences: FieldPreferences
) -> FieldSelection:
    keys, document, values = [], "", [projection.field for projection in selected]
    for ptr in collection.key_ptrs:
        first = next((projection.field for projection in selected if projection.ptr == ptr), None)
        if first is not None:
            keys.append(first)
            values.remove(first)
    root = next((projection.field for projection in selected if projection.ptr == ""), None)
    if root is not None:
        document = root
        values.remove(root)
    names = {projection.field for projection in selected}
    configs = {name: text for name, text in preferences.field_config_json.items() if name in names}
    return FieldSelection(tuple(keys), tuple(sorted(values)), document, configs)
