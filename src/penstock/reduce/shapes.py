"""The union of two JSON schemas: one that admits every value that either admits.

It is for schemas of plain shape, as a program infers them: types, their bounds, and the
shapes inside objects and arrays. A schema that says more is refused, because what its
union would leave out could not be put back.

An object that comes to have very many properties is taken for a map, whose values have
one shape: otherwise identifiers used as names would let the schema grow without end.
"""

from typing import Any, Final

from penstock.reduce.assertion import TYPES
from penstock.reduce.document import rank, show_pointer

__all__ = ["MOST_PROPERTIES", "Unmergeable", "union"]

MOST_PROPERTIES: Final = 1000

_DRAFT: Final = "https://json-schema.org/draft/2019-09/schema"
_NUMERIC: Final = ("integer", "number")
_ANYTHING: Final[tuple[Any, ...]] = ({}, True)

# From each keyword to the types that it is about.
_LEAST: Final = {"minimum": _NUMERIC, "minItems": ("array",), "minLength": ("string",)}
_MOST: Final = {"maximum": _NUMERIC, "maxItems": ("array",), "maxLength": ("string",)}
_SAME: Final = {
    "contentEncoding": ("string",),
    "contentMediaType": ("string",),
    "format": ("string",),
}
_NOTES: Final = ("default", "description", "reduce", "secret", "title")
_PLAIN: Final = frozenset(("$schema", "const", *_LEAST, *_MOST, *_SAME, *_NOTES))
"""Keywords without schemas in them."""


class Unmergeable(Exception):
    """What cannot be merged, and where."""


def union(left: Any, right: Any) -> dict[str, Any]:
    """The schema that admits what `left` or `right` does."""
    for schema in (left, right):
        if not isinstance(schema, dict):
            raise Unmergeable("one of them is no object")
        _check(schema, ())
    made = _union(left, right)
    return {"$schema": _DRAFT, **(made if isinstance(made, dict) else {"not": {}})}


def _check(schema: Any, at: tuple[str, ...]) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise Unmergeable(f'"{show_pointer(at)}" is no schema')
    for keyword, value in schema.items():
        here = (*at, keyword)
        inner: list[tuple[str, Any]] = []
        match keyword:
            case "properties" if isinstance(value, dict):
                inner = list(value.items())
            case "items" if isinstance(value, list):
                inner = [(str(i), each) for i, each in enumerate(value)]
            case "items" | "additionalItems" | "additionalProperties":
                _check(value, here)
            case "type" if all(isinstance(each, str) and each in TYPES for each in _listed(value)):
                pass
            case "required" | "enum" if isinstance(value, list):
                pass
            case "type" | "required" | "enum" | "properties":
                raise Unmergeable(f'"{show_pointer(here)}" cannot be read')
            case _:
                if keyword not in _PLAIN and not keyword.startswith("x-"):
                    raise Unmergeable(f'"{show_pointer(here)}" is not supported')
        for name, each in inner:
            _check(each, (*here, name))


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
    # One with itself is written as unions are, whatever the way it came.
    left, right = (right if left is False else left), (left if right is False else right)
    if left in _ANYTHING or right in _ANYTHING:
        return {}
    ours, theirs = _types(left), _types(right)
    made: dict[str, Any] = {}
    types = ours | theirs
    if types != frozenset(TYPES):
        names = sorted(types - {"integer"} if "number" in types else types)
        made["type"] = names[0] if len(names) == 1 else names
    enums = [_enum(left), _enum(right)]
    if enums[0] is not None and enums[1] is not None:
        found = {rank(value): value for value in (*enums[0], *enums[1])}
        made["enum"] = [found[at] for at in sorted(found)]
    for keyword in (*_NOTES, *(name for name in left if name.startswith("x-"))):
        if keyword in left and keyword in right and rank(left[keyword]) == rank(right[keyword]):
            made[keyword] = left[keyword]
    for keywords, choose in ((_LEAST, min), (_MOST, max), (_SAME, None)):
        for keyword, about in keywords.items():
            sides = [each for each in (left, right) if not _types(each).isdisjoint(about)]
            values = [each[keyword] for each in sides if keyword in each]
            if not values or len(values) < len(sides):
                continue
            if choose is not None:
                made[keyword] = choose(values)
            elif values[0] == values[-1]:
                made[keyword] = values[0]
    for kind, unite in (("object", _objects), ("array", _arrays)):
        sides = [each for each in (left, right) if kind in _types(each)]
        if sides:
            made |= unite(sides[0], sides[-1])
    return made


def _enum(schema: dict[str, Any]) -> list[Any] | None:
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _objects(left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    ours, theirs = left.get("properties", {}), right.get("properties", {})
    our_rest, their_rest = (each.get("additionalProperties", True) for each in (left, right))
    rest = _union(our_rest, their_rest)
    properties = {}
    for name in sorted({*ours, *theirs}):
        one, other = ours.get(name, our_rest), theirs.get(name, their_rest)
        shape = _union(one, other)
        # Where anything may be, what may be anything need not be named.
        if shape not in _ANYTHING or rest not in _ANYTHING:
            properties[name] = shape
    if len(properties) > MOST_PROPERTIES:
        for shape in properties.values():
            rest = _union(rest, shape)
        properties = {}
    made: dict[str, Any] = {"properties": properties} if properties else {}
    required = set(left.get("required", ())) & set(right.get("required", ()))
    if required:
        made["required"] = sorted(required)
    if rest not in _ANYTHING:
        made["additionalProperties"] = rest
    return made


def _arrays(left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    (ours, our_rest), (theirs, their_rest) = _tuple(left), _tuple(right)
    rest = _union(our_rest, their_rest)
    first = []
    for i in range(max(len(ours), len(theirs))):
        one = ours[i] if i < len(ours) else our_rest
        other = theirs[i] if i < len(theirs) else their_rest
        first.append(_union(one, other))
    while first and first[-1] in _ANYTHING and rest in _ANYTHING:
        first.pop()
    if not first:
        return {} if rest in _ANYTHING else {"items": rest}
    return {"items": first} if rest in _ANYTHING else {"items": first, "additionalItems": rest}


def _tuple(schema: dict[str, Any]) -> tuple[list[Any], Any]:
    items = schema.get("items", True)
    return (items, schema.get("additionalItems", True)) if isinstance(items, list) else ([], items)
