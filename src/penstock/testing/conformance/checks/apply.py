"""Effects of Apply, and their limits."""

import dataclasses

from penstock.protocol.messages import ValidateBinding
from penstock.testing.conformance.check import Failed, Need, Skipped, check
from penstock.testing.conformance.config import Pattern
from penstock.testing.conformance.documents import PLAIN, Layout, document
from penstock.testing.conformance.peer import Peer
from penstock.testing.conformance.task import Resource

__all__: list[str] = []

WIDER = Layout(PLAIN.keys, {**PLAIN.fields, "extra": "string"})


@check(
    rule="Apply with dry_run describes the actions and executes none",
    source="protocol, Apply",
)
def apply_dry_run_changes_nothing(peer: Peer) -> None:
    task = peer.task(apply=False)
    first = task.apply(dry_run=True).action_description
    second = task.apply(dry_run=True).action_description
    applied = task.apply().action_description
    if first != applied or first != second:
        raise Failed(
            "the descriptions of two dry runs and of Apply differ",
            detail=f"The dry runs returned {first!r} and {second!r}, and Apply {applied!r}.",
        )
    if not applied and peer.config.pattern is Pattern.PUSH_ONLY:
        raise Skipped("the connector has nothing to do in Apply")
    shard = task.shard()
    shard.transact(document("a", "kept"))
    shard.cancel()
    task.delete(dry_run=True)
    task.shard().verify()


@check(
    rule="a second Apply changes nothing, and its description is empty",
    source="protocol, Apply",
)
def apply_twice_changes_nothing(peer: Peer) -> None:
    task = peer.task()
    shard = task.shard()
    shard.transact(document("a", "kept"))
    shard.cancel()
    again = task.apply()
    if again.action_description:
        raise Failed(f"the second Apply did something: {again.action_description!r}")
    task.shard().verify(rows=True)


@check(
    rule="ApplyDelete removes everything: after the next Apply, the resource is empty and "
    "there is no checkpoint",
    source="protocol, Apply",
    needs=(Need.LOADS,),
)
def apply_delete_removes_data_and_checkpoint(peer: Peer) -> None:
    task = peer.task()
    shard = task.shard()
    old = document("a", "to be deleted")
    shard.transact(old)
    shard.cancel()
    task.delete()
    task.apply()
    shard = task.shard()
    shard.load(0, [old])
    if loaded := shard.flush():
        raise Failed(f"documents from before ApplyDelete can be loaded after it: {loaded}")


@check(
    rule="a field can be selected later, and existing documents are preserved",
    source="protocol, Apply",
)
def apply_with_added_field_keeps_documents(peer: Peer) -> None:
    task = peer.task()
    shard = task.shard()
    shard.transact(document("a", "older"))
    shard.cancel()
    task.change(Resource(WIDER))
    if "extra" not in task.spec.bindings[0].field_selection.values:
        raise Skipped("the connector does not accept fields that are added later")
    task.apply()
    shard = task.shard()
    shard.transact({**document("b", "newer"), "extra": "more"})
    shard.verify()


@check(
    rule="a field can be deselected, and existing documents are preserved",
    source="protocol, Apply",
)
def apply_with_removed_field_keeps_documents(peer: Peer) -> None:
    task = peer.task(Resource(WIDER))
    if "extra" not in task.spec.bindings[0].field_selection.values:
        raise Skipped("the connector has no fields except the key and the document")
    shard = task.shard()
    shard.transact({**document("a", "older"), "extra": "more"})
    shard.cancel()
    task.change(Resource(PLAIN))
    task.apply()
    shard = task.shard()
    shard.transact(document("b", "newer"))
    if not task.spec.bindings[0].field_selection.document:
        raise Skipped("older documents cannot be compared: the connector stores only fields")
    shard.verify()


@check(
    rule="a field may have any name, unless Validate forbids the field",
    source="protocol, Apply",
)
def apply_accepts_unusual_field_names(peer: Peer) -> None:
    names = ("select", "two words", "Ünïcode", "CamelCase", 'quo"ted', "semi;colon", "per%cent")
    layout = Layout(PLAIN.keys, {**PLAIN.fields, **dict.fromkeys(names, "string")})
    task = peer.task(Resource(layout))
    shard = task.shard()
    shard.transact({**document("a", "first"), **{name: name for name in names}})
    shard.transact({**document("a", "second"), **{name: name * 2 for name in names}})
    shard.verify()


@check(
    rule="validated bindings can be applied, in a materialization of any name",
    source="protocol, Apply",
)
def apply_accepts_validated_bindings(peer: Peer) -> None:
    name = peer.new_name()
    requested = ValidateBinding(peer.resource_json(name), PLAIN.collection(name))
    response = peer.validate([requested])
    task = peer.task(Resource(name=name), apply=False)
    if task.spec.bindings[0].resource_path != response.bindings[0].resource_path:
        raise Failed("the path of a resource depends on the name of its materialization")
    task.name = f"{task.name}/Ünïcode 'quoted\" %s"
    task.spec = dataclasses.replace(task.spec, materialization=task.name)
    task.apply()
    shard = task.shard()
    shard.transact(document("a", "stored"))
    shard.verify()
