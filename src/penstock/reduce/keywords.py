"""Which keywords of a JSON schema there are, and where schemas are inside schemas."""

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
"""What is inside them applies to some documents only."""

DEFINITIONS: Final = ("$defs", "definitions")
"""What is inside them applies where it is referred to."""

_SILENT: Final = (
    *("$anchor", "$comment", "$id", "$schema", "$vocabulary", "maxContains", "minContains"),
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
    *("format", "contentEncoding", "contentMediaType", "contentSchema"),
    *("advanced", "airbyte_secret", "discriminator", "multiline", "order", "secret"),
)
"""They say nothing, or nothing by themselves; the last of them are how Flow shows forms."""

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
    """That we know all of them: one that is not followed could change the data."""
    for keyword in schema:
        if keyword not in _KNOWN and not str(keyword).startswith(("x-", "X-")):
            raise UsageError(
                f'keyword "{at}/{keyword}" of a JSON schema is not supported',
                hint=f"Use {_INSTEAD[keyword]}."
                if keyword in _INSTEAD
                else 'Leave it out; the name of a keyword of your own begins with "x-".',
            )


def subschemas(schema: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The schemas directly inside `schema`, each with its way there."""
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
