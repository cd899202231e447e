"""Which fields of a collection can be aggregated as typed columns, and how.

A document need not be read to sum one of its integers, if that integer is a column. It
must be certain, though, that its location has one strategy in every document, that what
leads there is only ever merged, and that a null in the column means one thing: the
location is absent, or it holds a null, and not now this, now that.

Of documents that match their schema, aggregating such columns gives what folding the
documents does. Nothing here is validated, so they must be known to match.
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
from penstock.reduce.references import carries
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
    """How the column of one field is aggregated over the documents of a key."""

    strategy: str
    """lastWriteWins, firstWriteWins, sum, minimize or maximize."""
    kind: str | None
    """The one JSON type of its values besides null; None where `whole` makes it indifferent."""
    nullable: bool
    """A null is a value like others; otherwise it means that the document has none, and the
    aggregate passes over it."""
    whole: bool = False
    """The last document is taken as it is, so the field is what it is there, or absent."""


def columns_of(schema: Any, fields: Mapping[str, str]) -> dict[str, Column | None]:
    """How each of `fields`, a name for a JSON pointer, is aggregated; None: by documents only."""
    places = _Places(Schema(schema))
    return {
        name: places.column(parse_pointer(pointer, what=f'location of field "{name}"'))
        for name, pointer in fields.items()
    }


def check_key(schema: Any, key: Sequence[str], *, collection: str) -> None:
    """Raises UsageError if a location of the key is reduced: it is what tells documents apart."""
    places = _Places(Schema(schema))
    for pointer in key:
        at = places.walk(parse_pointer(pointer, what=f'key "{pointer}"'))[-1]
        for strategy in at.strategies:
            if not isinstance(strategy, LastWriteWins):
                raise UsageError(
                    f'key "{pointer}" of collection "{collection}" is reduced by {strategy.name}',
                    hint="Drop the annotation, or leave the location out of the key.",
                )


def single_scalar(types: Iterable[str]) -> str | None:
    """The one scalar type among `types` besides null, if there is just one, and no other."""
    named = set(types) - {"null"}
    (kind,) = named if len(named) == 1 else (None,)
    return kind if kind in _SCALARS else None


_Layers: TypeAlias = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class _Place:
    """A location, and what every document's schema says of it."""

    layers: _Layers
    strategies: list[Strategy]
    types: frozenset[str]
    varies: bool
    """Some documents may have another strategy here or further inside."""
    required: bool

    @property
    def strategy(self) -> Strategy | None:
        """The only one; None if there are several, or there may be."""
        first, *rest = self.strategies or [DEFAULT]
        differs = self.varies or any(each != first for each in rest)
        deletes = any(getattr(each, "delete", False) for each in self.strategies)
        return None if differs or deletes else first


class _Places:
    def __init__(self, schema: Schema) -> None:
        self._schema = schema

    def walk(self, pointer: Pointer) -> list[_Place]:
        """The root, and every location on the way to `pointer`."""
        places = [self._place([self._schema.root], varies=False, required=True)]
        for name in pointer:
            above = places[-1]
            required = any(name in layer.get("required", ()) for layer in above.layers)
            inner = [each for layer in above.layers for each in _inner(layer, name)]
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
            [parse_strategy(each["reduce"], at="reduce") for each in layers if "reduce" in each],
            types,
            varies or any(self._has_conditions(layer) for layer in layers),
            required,
        )

    def _layers(self, schema: Any, seen: tuple[int, ...]) -> _Layers:
        """`schema` and what it applies to the same value, whatever that is."""
        if not isinstance(schema, dict) or id(schema) in seen:
            return []
        seen = (*seen, id(schema))
        beside = list(schema.get("allOf", ()))
        if "$ref" in schema:
            beside.append(self._schema.references.target(schema))
        return [schema, *(layer for each in beside for layer in self._layers(each, seen))]

    def _has_conditions(self, layer: dict[str, Any]) -> bool:
        return any(
            way[0] in CONDITIONAL and carries(inner, self._schema.references)
            for way, inner in subschemas(layer)
        )


def _inner(layer: dict[str, Any], name: str) -> list[Any]:
    """The schemas that `layer` applies to the property `name`."""
    return declared(layer, name) or [layer.get("additionalProperties", True)]
