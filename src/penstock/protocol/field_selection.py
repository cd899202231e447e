"""Which fields of a collection a binding takes.

A connector says what it asks of each field, a user which to include and which to
exclude. Projections are walked in an order: those that are included by name, then those
that a person named, then the rest; of one location that is required or recommended, the
first is taken.

    unsatisfiable            nothing would do
    forbidden                not taken; an error, if the user includes it
    field required           taken; an error, if the user excludes it
    location required        one of its location, if not another was taken
    location recommended     the same, if recommended fields are wanted
    optional                 taken if the user includes it
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

__all__ = ["Wish", "select_fields"]


@dataclass(frozen=True, slots=True)
class Wish:
    """What a user says of fields."""

    include: Collection[str] = ()
    exclude: Collection[str] = ()
    recommended: bool = True
    field_config_json: Mapping[str, str] = field(default_factory=dict[str, str])


def select_fields(
    collection: CollectionSpec, constraints: Mapping[str, Constraint], wish: Wish
) -> FieldSelection:
    """The fields that a binding takes: keys in their order, values by name, one document.

    Raises:
        UsageError: what is asked cannot be; every reason is told.
    """
    problems = _unknown(collection, constraints, wish)
    taken: list[Projection] = []
    locations: set[str] = set()
    required: dict[str, str] = {}
    for projection in sorted(
        collection.projections,
        key=lambda each: (each.field not in wish.include, not each.explicit),
    ):
        name, ptr = projection.field, projection.ptr
        constraint = constraints.get(name) or Constraint(
            ConstraintType.FIELD_FORBIDDEN, "the connector says nothing of it"
        )
        kind, why = constraint.type, constraint.reason
        included, excluded = name in wish.include, name in wish.exclude
        if kind is ConstraintType.UNSATISFIABLE:
            problems.append(f'field "{name}" cannot be satisfied: {why}')
        elif included and kind is ConstraintType.FIELD_FORBIDDEN:
            problems.append(f'field "{name}" is included, but the connector forbids it: {why}')
        elif excluded and kind is ConstraintType.FIELD_REQUIRED:
            problems.append(f'field "{name}" is excluded, but the connector requires it: {why}')
        if kind is ConstraintType.LOCATION_REQUIRED:
            required.setdefault(ptr, why)
        if _takes(kind, wish, included=included, excluded=excluded, there=ptr in locations):
            taken.append(projection)
            locations.add(ptr)
    problems += [
        f"location {ptr or '(the whole document)'} is required, and none of its fields is left: "
        f"{why}"
        for ptr, why in required.items()
        if ptr not in locations
    ]
    if problems:
        raise UsageError(
            f'fields of collection "{collection.collection}" cannot be selected',
            detail="; ".join(problems) + ".",
            hint="Change which fields are included and excluded, or the collection.",
        )
    return _arranged(collection, taken, wish)


def _takes(
    kind: ConstraintType, wish: Wish, *, included: bool, excluded: bool, there: bool
) -> bool:
    if excluded:
        return False
    if included or kind is ConstraintType.FIELD_REQUIRED:
        return True
    if kind is ConstraintType.LOCATION_REQUIRED:
        return not there
    return kind is ConstraintType.LOCATION_RECOMMENDED and wish.recommended and not there


def _unknown(
    collection: CollectionSpec, constraints: Mapping[str, Constraint], wish: Wish
) -> list[str]:
    known = {each.field for each in collection.projections}
    return [
        *(
            f'the connector constrains field "{name}", which the collection does not have'
            for name in constraints
            if name not in known
        ),
        *(
            f'field "{name}" is {what}, and the collection does not have it'
            for what, names in (("included", wish.include), ("excluded", wish.exclude))
            for name in names
            if name not in known
        ),
        *(
            f'field "{name}" is both included and excluded'
            for name in wish.include
            if name in wish.exclude
        ),
    ]


def _arranged(collection: CollectionSpec, taken: list[Projection], wish: Wish) -> FieldSelection:
    keys, document, values = [], "", [each.field for each in taken]
    for ptr in collection.key_ptrs:
        first = next((each.field for each in taken if each.ptr == ptr), None)
        if first is not None:
            keys.append(first)
            values.remove(first)
    root = next((each.field for each in taken if each.ptr == ""), None)
    if root is not None:
        document = root
        values.remove(root)
    configs = {
        name: text
        for name, text in wish.field_config_json.items()
        if name in {each.field for each in taken}
    }
    return FieldSelection(tuple(keys), tuple(sorted(values)), document, configs)
