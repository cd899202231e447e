"""Types and presence of a location, derived from a JSON schema alone.

The lookup follows all schemas that apply to the location. Schemas in conjunction (`allOf`,
`$ref`) all hold; of alternatives (`anyOf`, `oneOf`, `if`) one holds. Each states whether the
location is required and which types it has, provided that its parent is an object, or an
array for an item. An alternative that excludes the parent type states nothing about the
locations inside.

    must       required, like all locations above it, which are only objects or arrays
    may        a schema describes it
    implicit   no schema describes it, and none forbids it
    cannot     it is forbidden, or no type remains

The inference is conservative: a location that must exist does, a location that cannot exist
does not, and a value has one of the inferred types. A location or type that never occurs
can be reported as possible.
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
"""Limit of the listed locations: schemas that refer to each other can have arbitrarily many."""

_Token: TypeAlias = str | int
"""The name of a property, or the index of an item."""

_FRACTION: Final = "fraction"
"""A number that is not an integer."""

_EVERY: Final = frozenset((*TYPES, _FRACTION)) - {"number"}
_STRING_ANNOTATIONS: Final[tuple[str, ...]] = (
    "contentEncoding",
    "contentMediaType",
    "format",
    "maxLength",
)
_ANNOTATIONS: Final[tuple[str, ...]] = (
    *_STRING_ANNOTATIONS,
    "airbyte_secret",
    "default",
    "description",
    "secret",
    "title",
)


@dataclass(frozen=True, slots=True)
class _Place:
    """Statements about one location on a path, given the container type of its parent."""

    types: frozenset[str]
    required: bool
    known: bool
    """A schema describes the location."""
    annotations: Mapping[str, Any]


_ANYTHING: Final = _Place(_EVERY, required=False, known=False, annotations={})
_NOTHING: Final = _Place(frozenset(), required=True, known=False, annotations={})
"""The place of an impossible value: the neutral element of `_either`."""

_Path: TypeAlias = list[_Place]
"""Places from the root to a location."""


class Outline:
    """The locations of the documents of one schema.

    Raises:
        UsageError: The schema is invalid or uses an unsupported keyword.
    """

    def __init__(self, schema: Any) -> None:
        self._schema = Schema(schema)

    def locate(self, pointer: str) -> Inference:
        """Return the inference for the location at `pointer`."""
        tokens = parse_pointer(pointer, what=f'location "{pointer}"')
        # A number in a pointer is a property name or an index, depending on the document.
        paths = [
            (path_tokens, self._path_of(self._schema.root, path_tokens, ()))
            for path_tokens in product(*map(_meanings, tokens))
        ]
        candidates = [(_exists(path_tokens, path), path[-1]) for path_tokens, path in paths]
        possible = [(exists, place) for exists, place in candidates if exists is not Exists.CANNOT]
        if not possible:
            return Inference(exists=Exists.CANNOT)
        place = reduce(_either, (place for _, place in possible))
        return _inference(place, min(exists for exists, _ in possible))

    def locations(self) -> list[tuple[str, Inference]]:
        """Return every possible location that a schema names, the root first.

        Array items have no names. A recursive schema is not followed again.
        """
        return list(self._below((), [(self._schema.root, ())], [0]))

    # One location.

    def _path_of(self, schema: Any, tokens: Sequence[_Token], seen: tuple[int, ...]) -> _Path:
        """Return what `schema` states about the first place and about the places after it."""
        if not isinstance(schema, dict) or id(schema) in seen:
            return [_NOTHING if schema is False else _ANYTHING] * (len(tokens) + 1)
        seen = (*seen, id(schema))

        def path_of(inner: Any) -> _Path:
            return self._path_of(inner, tokens, seen)

        paths = [self._own(schema, tokens)]
        if "$ref" in schema:
            paths.append(path_of(self._schema.references.target(schema)))
        paths += map(path_of, schema.get("allOf", ()))
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                paths.append(_combine(_either, [path_of(False), *map(path_of, schema[keyword])]))
        if "if" in schema:
            then_path = _combine(_both, [path_of(schema["if"]), path_of(schema.get("then", True))])
            paths.append(_combine(_either, [then_path, path_of(schema.get("else", True))]))
        for inner in schema.get("dependentSchemas", {}).values():
            paths.append(_combine(_either, [path_of(True), path_of(inner)]))
        return _combine(_both, paths)

    def _own(self, schema: dict[str, Any], tokens: Sequence[_Token]) -> _Path:
        """Do the same for the keywords of `schema` itself, without its in-place subschemas."""
        annotations = {keyword: schema[keyword] for keyword in _ANNOTATIONS if keyword in schema}
        own = _Place(_types(schema), required=False, known=False, annotations=annotations)
        if not tokens:
            return [own]
        token, *further_tokens = tokens
        if _container(token) not in own.types:
            return [own, *[_NOTHING] * len(tokens)]
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
        inside = [
            self._path_of(inner, further_tokens, ())
            for inner in schemas or [schema.get(more, True)]
        ]
        first_inside, *deeper = _combine(_both, inside)
        return [own, replace(first_inside, required=required, known=known), *deeper]

    # All locations.

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
                hint="Replace recursive schemas and schemas of unused fields by {}.",
            )
        yield pointer, inference
        layers = [layer for schema, trail in schemas for layer in self._layers(schema, trail)]
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
        """Yield `schema` and the schemas that may apply to the same value, with their ancestors."""
        if not isinstance(schema, dict) or id(schema) in trail:
            return
        trail = (*trail, id(schema))
        yield schema, trail
        in_place = [schema[keyword] for keyword in ("if", "then", "else") if keyword in schema]
        in_place += [
            inner for keyword in ("allOf", "anyOf", "oneOf") for inner in schema.get(keyword, ())
        ]
        in_place += schema.get("dependentSchemas", {}).values()
        if "$ref" in schema:
            in_place.append(self._schema.references.target(schema))
        for inner in in_place:
            yield from self._layers(inner, trail)


def declared(layer: dict[str, Any], name: str) -> list[Any]:
    """Return the schemas of `layer` for the property `name`, without `additionalProperties`."""
    schemas = [layer["properties"][name]] if name in layer.get("properties", {}) else []
    return schemas + [
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
    # YAML has values outside JSON; no document equals them.
    name = next((name for name, kinds in TYPES.items() if type(value) in kinds), "null")
    if name == "number":
        return "integer" if value == int(value) else _FRACTION
    return name


def _combine(join: Callable[[_Place, _Place], _Place], paths: Sequence[_Path]) -> _Path:
    return [reduce(join, places) for places in zip(*paths, strict=True)]


def _both(left: _Place, right: _Place) -> _Place:
    annotations = {**right.annotations, **left.annotations}
    if "maxLength" in left.annotations and "maxLength" in right.annotations:
        annotations["maxLength"] = min(
            left.annotations["maxLength"], right.annotations["maxLength"]
        )
    return _Place(
        left.types & right.types,
        left.required or right.required,
        left.known or right.known,
        annotations,
    )


def _either(left: _Place, right: _Place) -> _Place:
    annotations = {}
    for keyword in _ANNOTATIONS:
        about = _EVERY if keyword not in _STRING_ANNOTATIONS else {"string"}
        sides = [side for side in (left, right) if not side.types.isdisjoint(about)]
        values = [side.annotations.get(keyword, ABSENT) for side in sides]
        if values and ABSENT not in values:
            if keyword == "maxLength":
                annotations[keyword] = max(values)
            elif values[0] == values[-1]:
                annotations[keyword] = values[0]
    return _Place(
        left.types | right.types,
        left.required and right.required,
        left.known or right.known,
        annotations,
    )


def _exists(tokens: Sequence[_Token], path: _Path) -> Exists:
    existence = Exists.MUST if path[0].types else Exists.CANNOT
    for token, above, place in zip(tokens, path, path[1:], strict=False):
        container = _container(token)
        if container not in above.types or not place.types:
            return Exists.CANNOT
        if not place.known:
            existence = max(existence, Exists.IMPLICIT)
        elif not place.required or above.types != {container}:
            existence = max(existence, Exists.MAY)
    return existence


def _inference(place: _Place, exists: Exists) -> Inference:
    annotations, types = place.annotations, place.types
    if _FRACTION in types:
        types = types - {_FRACTION, "integer"} | {"number"}
    encoding = str(annotations.get("contentEncoding", ""))
    string = StringInference(
        content_type=str(annotations.get("contentMediaType", "")),
        format=str(annotations.get("format", "")),
        is_base64=encoding == "base64",
        max_length=int(annotations.get("maxLength", 0)),
        content_encoding=encoding,
    )
    return Inference(
        types=tuple(sorted(types)),
        string=string if "string" in types else None,
        title=str(annotations.get("title", "")),
        description=str(annotations.get("description", "")),
        default_json=encode(annotations["default"]).decode() if "default" in annotations else "",
        secret=annotations.get("secret") is True or annotations.get("airbyte_secret") is True,
        exists=exists,
    )
