"""JSON schema of the pipeline file, for editors.

The schema consists of the sections that `load` validates with, and of the schemas of the
connectors. It accepts every file that `load` accepts, so `${NAME}` is valid wherever an
enumeration or a pattern is. The reverse does not hold: only `load` checks that values agree
with each other.
"""

from collections.abc import Mapping
from typing import Any, Final

from penstock.pipeline.file import Pipeline
from penstock.pipeline.yaml_text import VARIABLE

__all__ = ["DRAFT", "file_schema"]

DRAFT: Final = "https://json-schema.org/draft/2020-12/schema"


def file_schema(
    connectors: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]],
) -> dict[str, Any]:
    """Return the schema for the built-in connectors.

    Args:
        connectors: Schemas of endpoint and resource, by connector name.
    """
    schema = _for_editors(Pipeline.model_json_schema())
    section = schema["$defs"]["MaterializationSection"]
    section["properties"]["connector"]["anyOf"][0] = _or_variable({"enum": sorted(connectors)})
    section["allOf"] = [
        {
            "if": {"properties": {"connector": {"const": name}}, "required": ["connector"]},
            "then": _configured(_for_editors(endpoint), _for_editors(resource)),
        }
        for name, (endpoint, resource) in sorted(connectors.items())
    ]
    return {"$schema": DRAFT, "title": "A Penstock pipeline", **schema}


def _configured(endpoint: Mapping[str, Any], resource: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "properties": {
            "endpoint": endpoint,
            "bindings": {"items": {"properties": {"resource": resource}}},
        },
        "required": ["endpoint"] if endpoint.get("required") else [],
    }


def _for_editors(schema: Any) -> Any:
    """Drop titles and unwritable defaults of pydantic, and accept variables."""
    if isinstance(schema, list):
        return [_for_editors(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {
        key: _for_editors(value)
        for key, value in schema.items()
        if not (key == "title" and isinstance(value, str))
    }
    if "patternProperties" in result:
        result["additionalProperties"] = False
    default = result.get("default")
    if default is None or ("pattern" in result and not isinstance(default, str)):
        result.pop("default", None)
    # A mapping under one of these keys is a property of that name.
    narrow = any(not isinstance(result.get(key, {}), dict) for key in ("enum", "const", "pattern"))
    return _or_variable(result) if narrow else result


def _or_variable(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that also accepts a variable."""
    named: dict[str, Any] = {
        key: schema.pop(key) for key in ("default", "description") if key in schema
    }
    return {"anyOf": [schema, {"type": "string", "pattern": VARIABLE}], **named}
