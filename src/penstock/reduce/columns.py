"""Fields of a collection that can be aggregated as typed columns.

To sum an integer that is a column, its documents need not be decoded. This requires that
its location has the same strategy in every document, that all locations above it are only
merged, and that a null in the column has one meaning: either the location is absent, or it
holds a null.

For documents that match their schema, aggregating the columns equals reducing the
documents. Nothing is validated here: the caller guarantees the match.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from penstock.errors import UsageError
from penstock.reduce.annotation import Schema
from penstock.reduce.assertion import TYPES
from penstock.reduce.document import Pointer, parse_pointer
from penstock.reduce.inference import declared
from penstock.reduce.keywords import CONDITIONAL, subschemas
from penstock.reduce.references import has_reduce_annotation
from penstock.reduce.strategy import (
    DEFAULT,
    FirstWriteWins,
    LastWriteWins,
    Maximize,
    Merge,
    Minimize,
    Strategy,
    Sum,
    parse_strategy,
)

__all__ = ["Column", "check_key", "columns_of", "single_scalar"]

_SCALARS: Final = ("boolean", "integer", "number", "string")


@dataclass(frozen=True, slots=True)
class Column:
    """Aggregation of the column of one field over the documents of a key."""

    strategy: str
    """lastWriteWins, firstWriteWins, sum, minimize or maximize."""
    kind: str | None
    """JSON type of the non-null values; None if `whole`, because any type is valid then."""
    nullable: bool
    """A null is a value. If False, a null means that the location is absent, and the aggregate
    ignores it.
    """
    whole: bool = False
    """The last document replaces the others, so the field is its field, or absent."""


def columns_of(schema: Any, fields: Mapping[str, str]) -> dict[str, Column | None]:
    """Return the aggregation of each field (name to JSON pointer); None if documents are needed."""
    places = _Places(Schema(schema))
    return {
        name: places.column(parse_pointer(pointer, what=f'location of field "{name}"'))
        for name, pointer in fields.items()
    }


def check_key(schema: Any, key: Sequence[str], *, collection: str) -> None:
    """Raise UsageError if a location of the key is reduced: a key must identify its documents."""
    places = _Places(Schema(schema))
    for pointer in key:
        location = places.walk(parse_pointer(pointer, what=f'key "{pointer}"'))[-1]
        for strategy in location.strategies:
            if not isinstance(strategy, LastWriteWins):
                raise UsageError(
                    f'key "{pointer}" of collection "{collection}" is reduced by {strategy.name}',
                    hint="Remove the annotation, or remove the location from the key.",
                )


def single_scalar(types: Iterable[str]) -> str | None:
    """Return the only scalar type other than null, or None if there is not exactly one."""
    named = set(types) - {"null"}
    (kind,) = named if len(named) == 1 else (None,)
    return kind if kind in _SCALARS else None


_Layers: TypeAlias = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class _Place:
    """A location, with the schemas that apply to it in every document."""

    layers: _Layers
    strategies: list[Strategy]
    types: frozenset[str]
    varies: bool
    """The strategy here or below differs between documents."""
    required: bool

    @property
    def strategy(self) -> Strategy | None:
        """Return the strategy of all documents, or None if they can differ."""
        first, *others = self.strategies or [DEFAULT]
        differs = self.varies or any(strategy != first for strategy in others)
        deletes = any(getattr(strategy, "delete", False) for strategy in self.strategies)
        return None if differs or deletes else first


class _Places:
    def __init__(self, schema: Schema) -> None:
        self._schema = schema

    def walk(self, pointer: Pointer) -> list[_Place]:
        """Return the root and every location on the path to `pointer`."""
        places = [self._place([self._schema.root], varies=False, required=True)]
        for name in pointer:
            above = places[-1]
            required = any(name in layer.get("required", ()) for layer in above.layers)
            inner = [schema for layer in above.layers for schema in _inner(layer, name)]
            places.append(self._place(inner, varies=above.varies, required=required))
        return places

    def column(self, pointer: Pointer) -> Column | None:
        root, *_ = places = self.walk(pointer)
        if root.strategy == DEFAULT:
            return Column(DEFAULT.name, None, nullable=True, whole=True)
        *above, leaf = places
        if not above or not all(
            isinstance(place.strategy, Merge) and place.types == {"object"} for place in above
        ):
            return None
        kind, nullable = single_scalar(leaf.types), "null" in leaf.types
        if kind is None:
            return None
        match leaf.strategy:
            case LastWriteWins(associative=True) | FirstWriteWins():
                fits = not nullable or all(place.required for place in places)
            case Sum():
                fits = kind == "integer" and not nullable
            case Minimize(key=()) | Maximize(key=()):
                fits = not nullable
            case _:
                return None
        return Column(leaf.strategy.name, kind, nullable) if fits else None

    def _place(self, schemas: Iterable[Any], *, varies: bool, required: bool) -> _Place:
        layers = [layer for schema in schemas for layer in self._layers(schema, ())]
        types = frozenset(TYPES)
        for layer in layers:
            if "type" in layer:
                named = layer["type"]
                types &= frozenset([named] if isinstance(named, str) else named)
        return _Place(
            layers,
            [parse_strategy(layer["reduce"], at="reduce") for layer in layers if "reduce" in layer],
            types,
            varies or any(self._has_conditions(layer) for layer in layers),
            required,
        )

    def _layers(self, schema: Any, seen: tuple[int, ...]) -> _Layers:
        """Return `schema` and the schemas that it applies unconditionally to the same value."""
        if not isinstance(schema, dict) or id(schema) in seen:
            return []
        seen = (*seen, id(schema))
        in_place = list(schema.get("allOf", ()))
        if "$ref" in schema:
            in_place.append(self._schema.references.target(schema))
        return [schema, *(layer for inner in in_place for layer in self._layers(inner, seen))]

    def _has_conditions(self, layer: dict[str, Any]) -> bool:
        return any(
            path[0] in CONDITIONAL and has_reduce_annotation(inner, self._schema.references)
            for path, inner in subschemas(layer)
        )


def _inner(layer: dict[str, Any], name: str) -> list[Any]:
    """Return the schemas that `layer` applies to the property `name`."""
    return declared(layer, name) or [layer.get("additionalProperties", True)]
