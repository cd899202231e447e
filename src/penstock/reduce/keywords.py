"""Supported keywords of a JSON schema, and the subschemas of a schema."""

from collections.abc import Iterator
from typing import Any, Final

from penstock.errors import UsageError
from penstock.reduce.assertion import ASSERTIONS

__all__ = ["CONDITIONAL", "DEFINITIONS", "check_keywords", "subschemas"]

_ONE: Final = (
    "additionalItems",
    "additionalProperties",
    "contains",
    "else",
    "if",
    "items",
    "not",
    "propertyNames",
    "then",
)
_LISTED: Final = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_NAMED: Final = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")

CONDITIONAL: Final = ("anyOf", "contains", "dependentSchemas", "else", "if", "oneOf", "then")
"""Their subschemas apply to some documents only."""

DEFINITIONS: Final = ("$defs", "definitions")
"""Their subschemas apply only where a `$ref` refers to them."""

_SILENT: Final = (
    *("$anchor", "$comment", "$id", "$schema", "$vocabulary", "maxContains", "minContains"),
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
    *("format", "contentEncoding", "contentMediaType", "contentSchema"),
    *("advanced", "airbyte_secret", "discriminator", "multiline", "order", "secret"),
)
"""Keywords without effect of their own; the last row is for Flow's configuration forms."""

_KNOWN: Final = frozenset(("$ref", "reduce", *_ONE, *_LISTED, *_NAMED, *_SILENT, *ASSERTIONS))

_INSTEAD: Final = {
    "$dynamicAnchor": "$anchor",
    "$dynamicRef": "$ref",
    "$recursiveAnchor": "$anchor",
    "$recursiveRef": "$ref",
    "dependencies": "dependentSchemas or dependentRequired",
    "unevaluatedItems": "items",
    "unevaluatedProperties": "additionalProperties",
}


def check_keywords(schema: dict[str, Any], at: str) -> None:
    """Raise UsageError for an unsupported keyword: ignoring it could change the data."""
    for keyword in schema:
        if keyword not in _KNOWN and not str(keyword).startswith(("x-", "X-")):
            raise UsageError(
                f'keyword "{at}/{keyword}" of a JSON schema is not supported',
                hint=f"Use {_INSTEAD[keyword]}."
                if keyword in _INSTEAD
                else 'Remove the keyword; custom keywords start with "x-".',
            )


def subschemas(schema: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the path and the schema of each direct subschema."""
    for keyword in _ONE:
        if isinstance(schema.get(keyword), dict):
            yield (keyword,), schema[keyword]
    for keyword in _LISTED:
        if isinstance(schema.get(keyword), list):
            for i, inner in enumerate(schema[keyword]):
                yield (keyword, str(i)), inner
    for keyword in _NAMED:
        if isinstance(schema.get(keyword), dict):
            for name, inner in schema[keyword].items():
                yield (keyword, name), inner
