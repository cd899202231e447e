"""Cancelled streams."""

from penstock.testing.conformance.check import Need, check
from penstock.testing.conformance.config import EXACTLY_ONCE
from penstock.testing.conformance.documents import document
from penstock.testing.conformance.peer import Peer

__all__: list[str] = []


@check(
    "cancelled-stream-is-rolled-back",
    rule="nothing of a transaction that broke off in Store is to be seen",
    source="protocol, Store",
    patterns=EXACTLY_ONCE,
    otherwise="what is stored is written through",
)
def _(peer: Peer) -> None:
    task = peer.task()
    shard = task.shard()
    shard.transact(document("a", "committed"))
    shard.flush()
    shard.store(0, [document("a", "broken off"), document("b", "broken off")])
    peer.pause()
    shard.cancel()
    shard = task.shard()
    shard.verify(rows=True)
    shard.absent(0, document("b", ""))


@check(
    "cancelled-load-is-forgotten",
    rule="a stream that broke off in Load leaves nothing behind",
    source="protocol, Load",
    needs=(Need.LOADS,),
)
def _(peer: Peer) -> None:
    task = peer.task()
    shard = task.shard()
    shard.transact(document("a", "committed"))
    shard.load(0, [document("a", "")])
    peer.pause()
    shard.cancel()
    shard = task.shard()
    shard.load(0, [document("b", "")])
    shard.flush()
    shard.store(0, [document("b", "stored")])
    shard.commit()
    shard.verify()


@check(
    "cancel-releases-at-once",
    rule="a stream that breaks off lets go of what it holds, and the next one can commit",
    source="protocol, Open",
)
def _(peer: Peer) -> None:
    task = peer.task()
    shard = task.shard()
    for n in range(3):
        shard.flush()
        shard.store(0, [document(f"k{m}", f"broken off {n}") for m in range(100)])
        peer.pause()
        shard.cancel()
        shard = task.shard()
    shard.transact(document("k1", "stored"))
    shard.verify()
