"""The JSON schema of a pipeline's file, for editors: what can be written, and what it means.

It is made of the sections that `load` checks with, and of what the connectors say of
themselves. Whatever `load` takes it takes, so a value that stands for another, `${NAME}`,
is taken wherever there are words or patterns; the reverse does not hold, as what must agree
with something elsewhere is for `load` alone.
"""

from collections.abc import Mapping
from typing import Any, Final

from penstock.pipeline.file import Pipeline
from penstock.pipeline.written import VARIABLE

__all__ = ["DRAFT", "json_schema"]

DRAFT: Final = "https://json-schema.org/draft/2020-12/schema"


def json_schema(
    connectors: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]],
) -> dict[str, Any]:
    """The schema, where a materialization can be into one of `connectors`.

    Args:
        connectors: by name, the schemas of endpoint and resource.
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
    """Without pydantic's titles and defaults that cannot be written, and with variables."""
    if isinstance(schema, list):
        return [_for_editors(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {
        key: _for_editors(value)
        for key, value in schema.items()
        if not (key == "title" and isinstance(value, str))
    }
    if "patternProperties" in made:
        made["additionalProperties"] = False
    default = made.get("default")
    if default is None or ("pattern" in made and not isinstance(default, str)):
        made.pop("default", None)
    # A mapping under one of these keys is a property of that name.
    narrow = any(not isinstance(made.get(key, {}), dict) for key in ("enum", "const", "pattern"))
    return _or_variable(made) if narrow else made


def _or_variable(schema: dict[str, Any]) -> dict[str, Any]:
    """What `schema` takes, or what a variable may make of it."""
    named: dict[str, Any] = {
        key: schema.pop(key) for key in ("default", "description") if key in schema
    }
    return {"anyOf": [schema, {"type": "string", "pattern": VARIABLE}], **named}
