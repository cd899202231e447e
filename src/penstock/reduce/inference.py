"""What a JSON schema says of a location, before there is a document.

A location is looked up through all that a schema applies. What stands side by side
(`allOf`, `$ref`) holds together; of alternatives (`anyOf`, `oneOf`, `if`) one holds.
Each says whether the location is required, and of which types it is, provided that the
one above is an object, or an array if this is an item; an alternative by which it is
neither says nothing of what is inside.

    must       required, and so is all on the way, in objects or arrays and nothing else
    may        a schema is about it
    implicit   no schema is about it, and none forbids it
    cannot     it is forbidden, or no type is left for it

It errs to one side: what must exist does, what cannot does not, and a value is of one of
the types told. That it may exist, or may be of a type, can be told of what never is.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import product
from typing import Any, Final, TypeAlias

from penstock.errors import UsageError
from penstock.protocol.specs import Exists, Inference, StringInference
from penstock.reduce.annotation import Schema
from penstock.reduce.assertion import TYPES, regex
from penstock.reduce.document import ABSENT, encode, parse_pointer, show_pointer

__all__ = ["MOST_LOCATIONS", "Outline", "declared"]

MOST_LOCATIONS: Final = 10_000
"""Schemas that refer to each other can name more locations than anybody could list."""

_Token: TypeAlias = str | int
"""The name of a property, or the index of an item."""

_FRACTION: Final = "fraction"
"""A number that is no integer."""

_EVERY: Final = frozenset((*TYPES, _FRACTION)) - {"number"}
_STRING_NOTES: Final[tuple[str, ...]] = (
    "contentEncoding",
    "contentMediaType",
    "format",
    "maxLength",
)
_NOTES: Final[tuple[str, ...]] = (
    *_STRING_NOTES,
    "airbyte_secret",
    "default",
    "description",
    "secret",
    "title",
)


@dataclass(frozen=True, slots=True)
class _Place:
    """What is said of one location on the way, given that the one above has such inside."""

    types: frozenset[str]
    required: bool
    known: bool
    """A schema is about it."""
    notes: Mapping[str, Any]


_ANYTHING: Final = _Place(_EVERY, required=False, known=False, notes={})
_NOTHING: Final = _Place(frozenset(), required=True, known=False, notes={})
"""That of a value which cannot be; among alternatives it makes no difference."""

_Way: TypeAlias = list[_Place]
"""From the root to a location."""


class Outline:
    """The locations of the documents of one schema.

    Raises:
        UsageError: it is no schema, or has what we cannot follow.
    """

    def __init__(self, schema: Any) -> None:
        self._schema = Schema(schema)

    def locate(self, pointer: str) -> Inference:
        """What is known of the location that `pointer` leads to."""
        tokens = parse_pointer(pointer, what=f'location "{pointer}"')
        # A number in a pointer is the name of a property or an index, as the document has it.
        ways = [
            (each, self._way(self._schema.root, each, ()))
            for each in product(*map(_meanings, tokens))
        ]
        found = [(_exists(each, way), way[-1]) for each, way in ways]
        there = [(exists, place) for exists, place in found if exists is not Exists.CANNOT]
        if not there:
            return Inference(exists=Exists.CANNOT)
        place = reduce(_either, (place for _, place in there))
        return _inference(place, min(exists for exists, _ in there))

    def locations(self) -> list[tuple[str, Inference]]:
        """Every location that can exist and that a schema has by name, the whole first.

        Items of arrays have no names. Where a schema comes to itself again it is not followed.
        """
        return list(self._below((), [(self._schema.root, ())], [0]))

    # To one location.

    def _way(self, schema: Any, tokens: Sequence[_Token], seen: tuple[int, ...]) -> _Way:
        """What `schema`, of the first place, says of it and those after it."""
        if not isinstance(schema, dict) or id(schema) in seen:
            return [_NOTHING if schema is False else _ANYTHING] * (len(tokens) + 1)
        seen = (*seen, id(schema))

        def way(inner: Any) -> _Way:
            return self._way(inner, tokens, seen)

        found = [self._own(schema, tokens)]
        if "$ref" in schema:
            found.append(way(self._schema.references.target(schema)))
        found += map(way, schema.get("allOf", ()))
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                found.append(_each(_either, [way(False), *map(way, schema[keyword])]))
        if "if" in schema:
            met = _each(_both, [way(schema["if"]), way(schema.get("then", True))])
            found.append(_each(_either, [met, way(schema.get("else", True))]))
        for inner in schema.get("dependentSchemas", {}).values():
            found.append(_each(_either, [way(True), way(inner)]))
        return _each(_both, found)

    def _own(self, schema: dict[str, Any], tokens: Sequence[_Token]) -> _Way:
        """The same, without what it applies to the same value."""
        notes = {keyword: schema[keyword] for keyword in _NOTES if keyword in schema}
        here = _Place(_types(schema), required=False, known=False, notes=notes)
        if not tokens:
            return [here]
        token, *rest = tokens
        if _container(token) not in here.types:
            return [here, *[_NOTHING] * len(tokens)]
        if isinstance(token, str):
            required = token in schema.get("required", ())
            schemas, more = declared(schema, token), "additionalProperties"
        else:
            required = token < schema.get("minItems", 0)
            first, more = "prefixItems", "items"
            if isinstance(schema.get("items"), list):
                first, more = "items", "additionalItems"
            schemas = schema.get(first, [])[token : token + 1]
            if token >= schema.get("maxItems", token + 1):
                schemas = [False]
        known = required or bool(schemas) or more in schema
        inside = [self._way(each, rest, ()) for each in schemas or [schema.get(more, True)]]
        first_inside, *further = _each(_both, inside)
        return [here, replace(first_inside, required=required, known=known), *further]

    # To all of them.

    def _below(
        self, tokens: tuple[str, ...], schemas: list[tuple[Any, tuple[int, ...]]], count: list[int]
    ) -> Iterator[tuple[str, Inference]]:
        pointer = show_pointer(tokens)
        inference = self.locate(pointer)
        if inference.exists > Exists.MAY:
            return
        count[0] += 1
        if count[0] > MOST_LOCATIONS:
            raise UsageError(
                f"JSON schema has more than {MOST_LOCATIONS} locations",
                hint="Replace by {} what nobody reads by itself, or what refers to itself.",
            )
        yield pointer, inference
        layers = [layer for each, trail in schemas for layer in self._layers(each, trail)]
        names = {
            name: None
            for layer, _ in layers
            for name in (*layer.get("properties", {}), *layer.get("required", ()))
        }
        for name in names:
            inside = [
                (inner, trail)
                for layer, trail in layers
                for inner in declared(layer, name) or [layer.get("additionalProperties", True)]
            ]
            yield from self._below((*tokens, name), inside, count)

    def _layers(
        self, schema: Any, trail: tuple[int, ...]
    ) -> Iterator[tuple[dict[str, Any], tuple[int, ...]]]:
        """`schema` and what it may apply to the same value, each with what led there."""
        if not isinstance(schema, dict) or id(schema) in trail:
            return
        trail = (*trail, id(schema))
        yield schema, trail
        beside = [schema[keyword] for keyword in ("if", "then", "else") if keyword in schema]
        beside += [
            each for keyword in ("allOf", "anyOf", "oneOf") for each in schema.get(keyword, ())
        ]
        beside += schema.get("dependentSchemas", {}).values()
        if "$ref" in schema:
            beside.append(self._schema.references.target(schema))
        for each in beside:
            yield from self._layers(each, trail)


def declared(layer: dict[str, Any], name: str) -> list[Any]:
    """The schemas that `layer` has for the property `name`, not counting those for all others."""
    found = [layer["properties"][name]] if name in layer.get("properties", {}) else []
    return found + [
        inner
        for pattern, inner in layer.get("patternProperties", {}).items()
        if regex(pattern, "patternProperties").search(name)
    ]


def _meanings(token: str) -> tuple[_Token, ...]:
    index = token.isascii() and token.isdecimal() and (token == "0" or token[0] != "0")
    return (token, int(token)) if index else (token,)


def _container(token: _Token) -> str:
    return "object" if isinstance(token, str) else "array"


def _types(schema: dict[str, Any]) -> frozenset[str]:
    named = schema.get("type", list(TYPES))
    types = frozenset([named] if isinstance(named, str) else named)
    if "number" in types:
        types = types - {"number"} | {"integer", _FRACTION}
    for values in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
        if values is not None:
            types &= frozenset(map(_type_of, values))
    return types


def _type_of(value: Any) -> str:
    # YAML has values that JSON has not, and that no document equals.
    name = next((name for name, kinds in TYPES.items() if type(value) in kinds), "null")
    if name == "number":
        return "integer" if value == int(value) else _FRACTION
    return name


def _each(join: Callable[[_Place, _Place], _Place], ways: Sequence[_Way]) -> _Way:
    return [reduce(join, places) for places in zip(*ways, strict=True)]


def _both(left: _Place, right: _Place) -> _Place:
    notes = {**right.notes, **left.notes}
    if "maxLength" in left.notes and "maxLength" in right.notes:
        notes["maxLength"] = min(left.notes["maxLength"], right.notes["maxLength"])
    return _Place(
        left.types & right.types,
        left.required or right.required,
        left.known or right.known,
        notes,
    )


def _either(left: _Place, right: _Place) -> _Place:
    notes = {}
    for keyword in _NOTES:
        about = _EVERY if keyword not in _STRING_NOTES else {"string"}
        sides = [each for each in (left, right) if not each.types.isdisjoint(about)]
        values = [each.notes.get(keyword, ABSENT) for each in sides]
        if values and ABSENT not in values:
            if keyword == "maxLength":
                notes[keyword] = max(values)
            elif values[0] == values[-1]:
                notes[keyword] = values[0]
    return _Place(
        left.types | right.types,
        left.required and right.required,
        left.known or right.known,
        notes,
    )


def _exists(tokens: Sequence[_Token], way: _Way) -> Exists:
    found = Exists.MUST if way[0].types else Exists.CANNOT
    for token, above, place in zip(tokens, way, way[1:], strict=False):
        container = _container(token)
        if container not in above.types or not place.types:
            return Exists.CANNOT
        if not place.known:
            found = max(found, Exists.IMPLICIT)
        elif not place.required or above.types != {container}:
            found = max(found, Exists.MAY)
    return found


def _inference(place: _Place, exists: Exists) -> Inference:
    notes, types = place.notes, place.types
    if _FRACTION in types:
        types = types - {_FRACTION, "integer"} | {"number"}
    encoding = str(notes.get("contentEncoding", ""))
    string = StringInference(
        content_type=str(notes.get("contentMediaType", "")),
        format=str(notes.get("format", "")),
        is_base64=encoding == "base64",
        max_length=int(notes.get("maxLength", 0)),
        content_encoding=encoding,
    )
    return Inference(
        types=tuple(sorted(types)),
        string=string if "string" in types else None,
        title=str(notes.get("title", "")),
        description=str(notes.get("description", "")),
        default_json=encode(notes["default"]).decode() if "default" in notes else "",
        secret=notes.get("secret") is True or notes.get("airbyte_secret") is True,
        exists=exists,
    )
