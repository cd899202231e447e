"""Response of a connector to Spec."""

import json
from collections.abc import Mapping
from typing import Any

from penstock.testing.conformance.check import Failed, check
from penstock.testing.conformance.peer import Peer

__all__: list[str] = []


@check(
    rule="Spec returns JSON schemas of endpoint and resource, and a documentation URL",
    source="protocol, Spec",
)
def spec_returns_json_schemas(peer: Peer) -> None:
    response = peer.connection.spec()
    endpoint = _schema(response.endpoint_spec_schema_json, "endpoint_spec_schema_json")
    resource = _schema(response.resource_spec_schema_json, "resource_spec_schema_json")
    _check_config(peer.config.endpoint, endpoint, "endpoint")
    _check_config(peer.config.resource, resource, "resource")
    if not response.documentation_url:
        raise Failed("documentation_url is empty")


def _schema(text: str, field: str) -> Mapping[str, Any]:
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise Failed(f"{field} is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise Failed(f"{field} is not a JSON object")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not {"type", "properties", "$ref", "oneOf", "anyOf", "allOf"} & schema.keys():
        raise Failed(f"{field} describes no configuration: it has no type")
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise Failed(f"{field} is not a JSON schema: properties is a mapping, and required a list")
    if "properties" in schema and not set(required) <= properties.keys():
        raise Failed(f"{field} requires a key that is not in its properties")
    return schema


def _check_config(config: Mapping[str, Any], schema: Mapping[str, Any], subject: str) -> None:
    """Check a configuration against the top level of its schema."""
    if missing := set(schema.get("required", [])) - config.keys():
        raise Failed(
            f"the schema requires {', '.join(sorted(missing))}, which {subject} does not have"
        )
    if schema.get("additionalProperties") is False and "properties" in schema:
        unknown = config.keys() - schema["properties"].keys()
        if unknown:
            raise Failed(f"the schema forbids {', '.join(sorted(unknown))}, which {subject} has")
