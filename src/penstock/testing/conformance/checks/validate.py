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

__all__ = ["refused"]

_REQUIRED = (ConstraintType.FIELD_REQUIRED, ConstraintType.LOCATION_REQUIRED)


def refused(what: str, call: Callable[[], Any]) -> None:
    """Call a function that must fail with an error status.

    Raises:
        Failed: it succeeded.
    """
    try:
        call()
    except ConnectorUnreachable as error:
        raise Failed(f"the connector is gone after {what}: {error.detail}") from error
    except ConnectorError:
        return
    raise Failed(f"{what} was not refused")


@check(
    "validate-answers-every-binding",
    rule="Validated has a binding for each that was asked about, in the same order, "
    "with its own resource path and a constraint for each field",
    source="protocol, Validate",
)
def _(peer: Peer) -> None:
    names = [peer.fresh() for _ in range(3)]
    asked = [ValidateBinding(peer.resource_json(name), PLAIN.collection(name)) for name in names]
    answer = peer.ask(asked)
    paths = [each.resource_path for each in answer.bindings]
    if len(set(paths)) != len(paths):
        raise Failed(f"resources of different names have one path: {paths}")
    alone = [peer.ask([each]).bindings[0].resource_path for each in asked]
    if alone != paths:
        raise Failed(f"the paths {paths} are not in the order of the bindings, {alone}")
    fields = {each.field for each in asked[0].collection.projections}
    for each in answer.bindings:
        if without := fields - each.constraints.keys():
            raise Failed(f"there is no constraint for {', '.join(sorted(without))}")
        if unknown := each.constraints.keys() - fields:
            raise Failed(f"{', '.join(sorted(unknown))} has a constraint, and is no field")
        if not each.delta_updates and each.constraints["id"].type not in _REQUIRED:
            raise Failed(f"the key is {each.constraints['id'].type.name}, and must be required")
        if peer.config.pattern is Pattern.PUSH_ONLY and not each.delta_updates:
            raise Failed("delta_updates is False for a connector that is push-only")


@check(
    "validate-is-deterministic",
    rule="the same question has the same answer",
    source="protocol, Validate",
)
def _(peer: Peer) -> None:
    name = peer.fresh()
    asked = [ValidateBinding(peer.resource_json(name), PLAIN.collection(name))]
    first = peer.ask(asked)
    for _ in range(3):
        if peer.ask(asked) != first:
            raise Failed("Validated was another the second time")


@check(
    "validate-announces-deletes",
    rule="a binding that can remove documents says so in accepts_delete",
    source="protocol, Validate",
    patterns=frozenset(Pattern) - {Pattern.PUSH_ONLY},
    otherwise=Need.LOADS.value,
)
def _(peer: Peer) -> None:
    name = peer.fresh()
    asked = [ValidateBinding(peer.resource_json(name), PLAIN.collection(name))]
    said = peer.ask(asked).bindings[0].accepts_delete
    if said is not peer.config.accepts_delete:
        raise Failed(f"accepts_delete is {said}, and {peer.config.accepts_delete} in the file")


@check(
    "validate-refuses-bad-endpoint",
    rule="an endpoint configuration that is none is refused",
    source="protocol, Validate",
)
def _(peer: Peer) -> None:
    name = peer.fresh()
    asked = [ValidateBinding(peer.resource_json(name), PLAIN.collection(name))]
    wrong = {"an endpoint that is not JSON": "{", "an endpoint that is a list": "[]"}
    schema = json.loads(peer.connection.spec().endpoint_spec_schema_json)
    for key in schema.get("required", []):
        without = {name: value for name, value in peer.config.endpoint.items() if name != key}
        wrong[f"an endpoint without {key}"] = json.dumps(without)
    for what, text in wrong.items():
        refused(what, lambda text=text: peer.ask(asked, text))  # type: ignore[misc]


@check(
    "validate-refuses-bad-resource",
    rule="a resource configuration that is none is refused",
    source="protocol, Validate",
)
def _(peer: Peer) -> None:
    name = peer.fresh()
    resource = json.loads(peer.resource_json(name))
    schema = json.loads(peer.connection.spec().resource_spec_schema_json)
    wrong = {"a resource that is not JSON": "{", "a resource that is a list": "[]"}
    for key in schema.get("required", []):
        without = {name: value for name, value in resource.items() if name != key}
        wrong[f"a resource without {key}"] = json.dumps(without)
    for what, text in wrong.items():
        asked = ValidateBinding(text, PLAIN.collection(name))
        refused(what, lambda asked=asked: peer.ask([asked]))  # type: ignore[misc]


@check(
    "duplicate-resource-refused",
    rule="two bindings of one resource are refused, by Validate, by Apply, or at the latest "
    "by Open",
    source="protocol, Apply",
)
def _(peer: Peer) -> None:
    name = peer.fresh()
    asked = ValidateBinding(peer.resource_json(name), PLAIN.collection(name))
    try:
        answer = peer.ask([asked, asked])
    except ConnectorUnreachable:
        raise
    except ConnectorError:
        return
    if len({each.resource_path for each in answer.bindings}) == len(answer.bindings) > 1:
        raise Skipped("the connector gives one resource two paths")

    task = peer.task(Resource(name=name), Resource(name=name), apply=False)

    def both() -> None:
        task.apply()
        task.shard()

    refused("one resource bound twice", both)
