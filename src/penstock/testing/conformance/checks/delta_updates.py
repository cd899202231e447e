"""Bindings with delta updates."""

from penstock.testing.conformance.check import Need, check
from penstock.testing.conformance.documents import document
from penstock.testing.conformance.peer import Peer, delta_task

__all__: list[str] = []


@check(
    "delta-binding-appends",
    rule="a delta binding keeps every document it is sent, also those of one key",
    source="protocol, Store",
    needs=(Need.READ, Need.DELTA),
)
def _(peer: Peer) -> None:
    shard = delta_task(peer).shard()
    for n in range(3):
        shard.transact(document("same", f"of transaction {n}"), document(f"own {n}", "once"))
    shard.verify()


@check(
    "delta-binding-is-emptied",
    rule="a Store that `empties` a delta binding removes all that was there",
    source="protocol, Store",
    needs=(Need.READ, Need.DELTA),
)
def _(peer: Peer) -> None:
    task = delta_task(peer)
    task.must_accept_empty()
    shard = task.shard()
    shard.transact(document("same", "older"), document("own", "older"))
    shard.flush()
    shard.empty(0)
    shard.store(0, [document("same", "newer")])
    shard.commit()
    shard.verify()


@check(
    "delta-binding-flushes",
    rule="a transaction of delta bindings alone is flushed and committed as any other",
    source="protocol, Flush",
    needs=(Need.READ, Need.DELTA),
)
def _(peer: Peer) -> None:
    shard = delta_task(peer).shard()
    shard.transact()
    shard.transact(document("a", "stored"))
    shard.transact()
    shard.verify()
