"""Response of a connector to Validate."""

import json
from collections.abc import Callable
from typing import Any

from penstock.materialize.errors import ConnectorError, ConnectorUnreachable
from penstock.protocol.messages import ValidateBinding
from penstock.protocol.specs import ConstraintType
from penstock.testing.conformance.check import Failed, Need, Skipped, check
from penstock.testing.conformance.config import Pattern
from penstock.testing.conformance.documents import PLAIN
from penstock.testing.conformance.peer import Peer
from penstock.testing.conformance.task import Resource

__all__ = ["expect_rejection"]

_REQUIRED = (ConstraintType.FIELD_REQUIRED, ConstraintType.LOCATION_REQUIRED)


def expect_rejection(subject: str, call: Callable[[], Any]) -> None:
    """Call a function that must fail with an error status.

    Raises:
        Failed: it succeeded.
    """
    try:
        call()
    except ConnectorUnreachable as error:
        raise Failed(f"the connector is unreachable after {subject}: {error.detail}") from error
    except ConnectorError:
        return
    raise Failed(f"{subject} was not rejected")


@check(
    rule="Validated has one binding for each requested binding, in the same order, with its "
    "own resource path and a constraint for each field",
    source="protocol, Validate",
)
def validate_returns_all_bindings_in_order(peer: Peer) -> None:
    names = [peer.new_name() for _ in range(3)]
    requested = [
        ValidateBinding(peer.resource_json(name), PLAIN.collection(name)) for name in names
    ]
    response = peer.validate(requested)
    paths = [binding.resource_path for binding in response.bindings]
    if len(set(paths)) != len(paths):
        raise Failed(f"resources with different names have the same path: {paths}")
    expected = [peer.validate([binding]).bindings[0].resource_path for binding in requested]
    if expected != paths:
        raise Failed(f"the paths {paths} are not in the order of the bindings, {expected}")
    fields = {projection.field for projection in requested[0].collection.projections}
    for binding in response.bindings:
        if missing := fields - binding.constraints.keys():
            raise Failed(f"there is no constraint for {', '.join(sorted(missing))}")
        if unexpected := binding.constraints.keys() - fields:
            raise Failed(f"{', '.join(sorted(unexpected))} has a constraint, and is no field")
        if not binding.delta_updates and binding.constraints["id"].type not in _REQUIRED:
            raise Failed(f"the key is {binding.constraints['id'].type.name}, and must be required")
        if peer.config.pattern is Pattern.PUSH_ONLY and not binding.delta_updates:
            raise Failed("delta_updates is False for a push-only connector")


@check(
    rule="equal Validate requests have equal responses",
    source="protocol, Validate",
)
def validate_twice_returns_same_response(peer: Peer) -> None:
    name = peer.new_name()
    requested = [ValidateBinding(peer.resource_json(name), PLAIN.collection(name))]
    first = peer.validate(requested)
    for _ in range(3):
        if peer.validate(requested) != first:
            raise Failed("the responses to equal Validate requests differ")


@check(
    rule="a binding that can remove documents sets accepts_delete",
    source="protocol, Validate",
    patterns=frozenset(Pattern) - {Pattern.PUSH_ONLY},
    otherwise=Need.LOADS.value,
)
def validate_reports_accepts_delete(peer: Peer) -> None:
    name = peer.new_name()
    requested = [ValidateBinding(peer.resource_json(name), PLAIN.collection(name))]
    accepts_delete = peer.validate(requested).bindings[0].accepts_delete
    if accepts_delete is not peer.config.accepts_delete:
        raise Failed(
            f"accepts_delete is {accepts_delete}, and {peer.config.accepts_delete} in the file"
        )


@check(
    rule="an invalid endpoint configuration is rejected",
    source="protocol, Validate",
)
def validate_with_invalid_endpoint_is_rejected(peer: Peer) -> None:
    name = peer.new_name()
    requested = [ValidateBinding(peer.resource_json(name), PLAIN.collection(name))]
    invalid = {"an endpoint that is not JSON": "{", "an endpoint that is a list": "[]"}
    schema = json.loads(peer.connection.spec().endpoint_spec_schema_json)
    for key in schema.get("required", []):
        without = {name: value for name, value in peer.config.endpoint.items() if name != key}
        invalid[f"an endpoint without {key}"] = json.dumps(without)
    for subject, text in invalid.items():
        expect_rejection(subject, lambda text=text: peer.validate(requested, text))  # type: ignore[misc]


@check(
    rule="an invalid resource configuration is rejected",
    source="protocol, Validate",
)
def validate_with_invalid_resource_is_rejected(peer: Peer) -> None:
    name = peer.new_name()
    resource = json.loads(peer.resource_json(name))
    schema = json.loads(peer.connection.spec().resource_spec_schema_json)
    invalid = {"a resource that is not JSON": "{", "a resource that is a list": "[]"}
    for key in schema.get("required", []):
        without = {name: value for name, value in resource.items() if name != key}
        invalid[f"a resource without {key}"] = json.dumps(without)
    for subject, text in invalid.items():
        binding = ValidateBinding(text, PLAIN.collection(name))
        expect_rejection(subject, lambda binding=binding: peer.validate([binding]))  # type: ignore[misc]


@check(
    rule="two bindings of one resource are rejected by Validate, Apply or Open",
    source="protocol, Apply",
)
def resource_bound_twice_is_rejected(peer: Peer) -> None:
    name = peer.new_name()
    binding = ValidateBinding(peer.resource_json(name), PLAIN.collection(name))
    try:
        response = peer.validate([binding, binding])
    except ConnectorUnreachable:
        raise
    except ConnectorError:
        return
    paths = [validated.resource_path for validated in response.bindings]
    if len(set(paths)) == len(paths) > 1:
        raise Skipped("the connector returns two paths for one resource")

    task = peer.task(Resource(name=name), Resource(name=name), apply=False)

    def apply_and_open() -> None:
        task.apply()
        task.shard()

    expect_rejection("one resource bound twice", apply_and_open)
