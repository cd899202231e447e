"""The union of two JSON schemas: a schema that accepts every value that either accepts.

Only schemas of plain shape are supported, as a program infers them: types, their bounds, and
the shapes inside objects and arrays. Other schemas are rejected, because the union could not
represent them.

An object with too many properties becomes a map, whose values have one shape. Otherwise
identifiers used as property names would grow the schema without limit.
"""

from typing import Any, Final

from penstock.reduce.assertion import TYPES
from penstock.reduce.document import rank, show_pointer

__all__ = ["MOST_PROPERTIES", "Unmergeable", "union"]

MOST_PROPERTIES: Final = 1000

_DRAFT: Final = "https://json-schema.org/draft/2019-09/schema"
_NUMERIC: Final = ("integer", "number")
_ANYTHING: Final[tuple[Any, ...]] = ({}, True)

# Keyword to the types that it constrains.
_LEAST: Final = {"minimum": _NUMERIC, "minItems": ("array",), "minLength": ("string",)}
_MOST: Final = {"maximum": _NUMERIC, "maxItems": ("array",), "maxLength": ("string",)}
_SAME: Final = {
    "contentEncoding": ("string",),
    "contentMediaType": ("string",),
    "format": ("string",),
}
_ANNOTATIONS: Final = ("default", "description", "reduce", "secret", "title")
_LEAF_KEYWORDS: Final = frozenset(("$schema", "const", *_LEAST, *_MOST, *_SAME, *_ANNOTATIONS))
"""Keywords without subschemas."""


class Unmergeable(Exception):
    """A schema without plain shape, and the place of the reason."""


def union(left: Any, right: Any) -> dict[str, Any]:
    """Return the schema that accepts the values of `left` or `right`."""
    for schema in (left, right):
        if not isinstance(schema, dict):
            raise Unmergeable("one of the schemas is not an object")
        _check(schema, ())
    made = _union(left, right)
    return {"$schema": _DRAFT, **(made if isinstance(made, dict) else {"not": {}})}


def _check(schema: Any, path: tuple[str, ...]) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise Unmergeable(f'"{show_pointer(path)}" is not a schema')
    for keyword, value in schema.items():
        keyword_path = (*path, keyword)
        inner: list[tuple[str, Any]] = []
        match keyword:
            case "properties" if isinstance(value, dict):
                inner = list(value.items())
            case "items" if isinstance(value, list):
                inner = [(str(i), item) for i, item in enumerate(value)]
            case "items" | "additionalItems" | "additionalProperties":
                _check(value, keyword_path)
            case "type" if all(isinstance(name, str) and name in TYPES for name in _listed(value)):
                pass
            case "required" | "enum" if isinstance(value, list):
                pass
            case "type" | "required" | "enum" | "properties":
                raise Unmergeable(f'"{show_pointer(keyword_path)}" has an invalid value')
            case _:
                if keyword not in _LEAF_KEYWORDS and not keyword.startswith("x-"):
                    raise Unmergeable(f'"{show_pointer(keyword_path)}" is not supported')
        for name, subschema in inner:
            _check(subschema, (*keyword_path, name))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _types(schema: dict[str, Any]) -> frozenset[str]:
    values = _enum(schema)
    if "type" in schema:
        named = frozenset(_listed(schema["type"]))
    elif values is not None:
        named = frozenset(
            next(name for name, kinds in TYPES.items() if type(value) in kinds) for value in values
        )
    else:
        named = frozenset(TYPES)
    return named | {"integer"} if "number" in named else named


def _union(left: Any, right: Any) -> Any:
    if left is False and right is False:
        return False
    # Normalize also the union of a schema with itself or with false.
    left, right = (right if left is False else left), (left if right is False else right)
    if left in _ANYTHING or right in _ANYTHING:
        return {}
    ours, theirs = _types(left), _types(right)
    united: dict[str, Any] = {}
    types = ours | theirs
    if types != frozenset(TYPES):
        names = sorted(types - {"integer"} if "number" in types else types)
        united["type"] = names[0] if len(names) == 1 else names
    enums = [_enum(left), _enum(right)]
    if enums[0] is not None and enums[1] is not None:
        by_rank = {rank(value): value for value in (*enums[0], *enums[1])}
        united["enum"] = [by_rank[path] for path in sorted(by_rank)]
    for keyword in (*_ANNOTATIONS, *(name for name in left if name.startswith("x-"))):
        if keyword in left and keyword in right and rank(left[keyword]) == rank(right[keyword]):
            united[keyword] = left[keyword]
    for keywords, choose in ((_LEAST, min), (_MOST, max), (_SAME, None)):
        for keyword, about in keywords.items():
            sides = [schema for schema in (left, right) if not _types(schema).isdisjoint(about)]
            values = [schema[keyword] for schema in sides if keyword in schema]
            if not values or len(values) < len(sides):
                continue
            if choose is not None:
                united[keyword] = choose(values)
            elif values[0] == values[-1]:
                united[keyword] = values[0]
    for kind, unite in (("object", _objects), ("array", _arrays)):
        sides = [schema for schema in (left, right) if kind in _types(schema)]
        if sides:
            united |= unite(sides[0], sides[-1])
    return united


def _enum(schema: dict[str, Any]) -> list[Any] | None:
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _objects(left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    ours, theirs = left.get("properties", {}), right.get("properties", {})
    our_additional, their_additional = (
        schema.get("additionalProperties", True) for schema in (left, right)
    )
    additional = _union(our_additional, their_additional)
    properties = {}
    for name in sorted({*ours, *theirs}):
        our_shape, their_shape = ours.get(name, our_additional), theirs.get(name, their_additional)
        shape = _union(our_shape, their_shape)
        # Where any property is allowed, an unconstrained property need not be listed.
        if shape not in _ANYTHING or additional not in _ANYTHING:
            properties[name] = shape
    if len(properties) > MOST_PROPERTIES:
        for shape in properties.values():
            additional = _union(additional, shape)
        properties = {}
    united: dict[str, Any] = {"properties": properties} if properties else {}
    required = set(left.get("required", ())) & set(right.get("required", ()))
    if required:
        united["required"] = sorted(required)
    if additional not in _ANYTHING:
        united["additionalProperties"] = additional
    return united


def _arrays(left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    (ours, our_additional), (theirs, their_additional) = _tuple(left), _tuple(right)
    additional = _union(our_additional, their_additional)
    first = []
    for i in range(max(len(ours), len(theirs))):
        our_shape = ours[i] if i < len(ours) else our_additional
        their_shape = theirs[i] if i < len(theirs) else their_additional
        first.append(_union(our_shape, their_shape))
    while first and first[-1] in _ANYTHING and additional in _ANYTHING:
        first.pop()
    if not first:
        return {} if additional in _ANYTHING else {"items": additional}
    return (
        {"items": first}
        if additional in _ANYTHING
        else {"items": first, "additionalItems": additional}
    )


def _tuple(schema: dict[str, Any]) -> tuple[list[Any], Any]:
    items = schema.get("items", True)
    return (items, schema.get("additionalItems", True)) if isinstance(items, list) else ([], items)
