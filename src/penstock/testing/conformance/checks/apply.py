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
    "apply-dry-run-touches-nothing",
    rule="Apply with dry_run says what would be done, and does nothing",
    source="protocol, Apply",
)
def _(peer: Peer) -> None:
    task = peer.task(apply=False)
    would = task.apply(dry_run=True).action_description
    again = task.apply(dry_run=True).action_description
    done = task.apply().action_description
    if would != done or would != again:
        raise Failed(
            "after a dry run there was something else to do than before it",
            detail=f"The dry run said {would!r}, a second one {again!r}, and Apply {done!r}.",
        )
    if not done and peer.config.pattern is Pattern.PUSH_ONLY:
        raise Skipped("the connector has nothing to do in Apply")
    shard = task.shard()
    shard.transact(document("a", "kept"))
    shard.cancel()
    task.delete(dry_run=True)
    task.shard().verify()


@check(
    "apply-twice-is-once",
    rule="what is applied already is left as it is, and there is nothing to describe",
    source="protocol, Apply",
)
def _(peer: Peer) -> None:
    task = peer.task()
    shard = task.shard()
    shard.transact(document("a", "kept"))
    shard.cancel()
    again = task.apply()
    if again.action_description:
        raise Failed(f"the second Apply did something: {again.action_description!r}")
    task.shard().verify(rows=True)


@check(
    "apply-delete-takes-away",
    rule="after ApplyDelete there is nothing left: applied anew, the resource is empty, "
    "and there is no checkpoint",
    source="protocol, Apply",
    needs=(Need.LOADS,),
)
def _(peer: Peer) -> None:
    task = peer.task()
    shard = task.shard()
    old = document("a", "to be gone")
    shard.transact(old)
    shard.cancel()
    task.delete()
    task.apply()
    shard = task.shard()
    shard.load(0, [old])
    if found := shard.flush():
        raise Failed(f"what was stored before ApplyDelete can be loaded after it: {found}")


@check(
    "apply-adds-a-field",
    rule="a field that is selected later is taken, and older documents stay",
    source="protocol, Apply",
)
def _(peer: Peer) -> None:
    task = peer.task()
    shard = task.shard()
    shard.transact(document("a", "older"))
    shard.cancel()
    task.change(Resource(WIDER))
    if "extra" not in task.spec.bindings[0].field_selection.values:
        raise Skipped("the connector takes no field that was not there from the beginning")
    task.apply()
    shard = task.shard()
    shard.transact({**document("b", "newer"), "extra": "more"})
    shard.verify()


@check(
    "apply-removes-a-field",
    rule="a field may be selected no more, and older documents stay",
    source="protocol, Apply",
)
def _(peer: Peer) -> None:
    task = peer.task(Resource(WIDER))
    if "extra" not in task.spec.bindings[0].field_selection.values:
        raise Skipped("the connector has no field beside the key and the document")
    shard = task.shard()
    shard.transact({**document("a", "older"), "extra": "more"})
    shard.cancel()
    task.change(Resource(PLAIN))
    task.apply()
    shard = task.shard()
    shard.transact(document("b", "newer"))
    if not task.spec.bindings[0].field_selection.document:
        raise Skipped("older documents cannot be compared: the connector keeps only fields")
    shard.verify()


@check(
    "apply-takes-odd-field-names",
    rule="a field may be called as people call things, or is forbidden in Validate",
    source="protocol, Apply",
)
def _(peer: Peer) -> None:
    odd = ("select", "two words", "Ünïcode", "CamelCase", 'quo"ted', "semi;colon", "per%cent")
    layout = Layout(PLAIN.keys, {**PLAIN.fields, **dict.fromkeys(odd, "string")})
    task = peer.task(Resource(layout))
    shard = task.shard()
    shard.transact({**document("a", "first"), **{name: name for name in odd}})
    shard.transact({**document("a", "second"), **{name: name * 2 for name in odd}})
    shard.verify()


@check(
    "apply-refuses-nothing-it-validated",
    rule="what Validate has answered can be applied, in a materialization of any name",
    source="protocol, Apply",
)
def _(peer: Peer) -> None:
    name = peer.fresh()
    asked = ValidateBinding(peer.resource_json(name), PLAIN.collection(name))
    answer = peer.ask([asked])
    task = peer.task(Resource(name=name), apply=False)
    if task.spec.bindings[0].resource_path != answer.bindings[0].resource_path:
        raise Failed("the path of a resource depends on which materialization it is of")
    task.name = f"{task.name}/Ünïcode 'quoted\" %s"
    task.spec = dataclasses.replace(task.spec, materialization=task.name)
    task.apply()
    shard = task.shard()
    shard.transact(document("a", "stored"))
    shard.verify()
