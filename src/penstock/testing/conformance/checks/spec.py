"""Response of a connector to Spec."""

import json
from collections.abc import Mapping
from typing import Any

from penstock.testing.conformance.check import Failed, check
from penstock.testing.conformance.peer import Peer

__all__: list[str] = []


@check(
    "spec-has-schemas",
    rule="Spec answers with JSON schemas of endpoint and resource, and where the documentation is",
    source="protocol, Spec",
)
def _(peer: Peer) -> None:
    answer = peer.connection.spec()
    endpoint = _schema(answer.endpoint_spec_schema_json, "endpoint_spec_schema_json")
    resource = _schema(answer.resource_spec_schema_json, "resource_spec_schema_json")
    _fits(peer.config.endpoint, endpoint, "endpoint")
    _fits(peer.config.resource, resource, "resource")
    if not answer.documentation_url:
        raise Failed("documentation_url is empty")


def _schema(text: str, what: str) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise Failed(f"{what} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise Failed(f"{what} is not a JSON object")
    properties, required = found.get("properties", {}), found.get("required", [])
    if not {"type", "properties", "$ref", "oneOf", "anyOf", "allOf"} & found.keys():
        raise Failed(f"{what} says nothing of what is configured: there is no type in it")
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise Failed(f"{what} is no JSON schema: properties is a mapping, and required a list")
    if "properties" in found and not set(required) <= properties.keys():
        raise Failed(f"{what} requires what is not among its properties")
    return found


def _fits(config: Mapping[str, Any], schema: Mapping[str, Any], what: str) -> None:
    """Check a configuration against the top level of its schema."""
    if missing := set(schema.get("required", [])) - config.keys():
        raise Failed(f"the schema requires {', '.join(sorted(missing))}, which {what} is without")
    if schema.get("additionalProperties") is False and "properties" in schema:
        unknown = config.keys() - schema["properties"].keys()
        if unknown:
            raise Failed(f"the schema forbids {', '.join(sorted(unknown))}, which {what} has")
