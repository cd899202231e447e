"""Cancelled streams."""

from penstock.testing.conformance.check import Need, check
from penstock.testing.conformance.config import EXACTLY_ONCE
from penstock.testing.conformance.documents import document
from penstock.testing.conformance.peer import Peer

__all__: list[str] = []


@check(
    rule="a transaction that is cancelled during Store has no effect",
    source="protocol, Store",
    patterns=EXACTLY_ONCE,
    otherwise="stores are written through",
)
def cancelled_store_is_rolled_back(peer: Peer) -> None:
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
    rule="a stream that is cancelled during Load has no effect",
    source="protocol, Load",
    needs=(Need.LOADS,),
)
def cancelled_load_has_no_effect(peer: Peer) -> None:
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
    rule="a cancelled stream releases its locks, and the next stream can commit",
    source="protocol, Open",
)
def cancelled_stream_releases_resources(peer: Peer) -> None:
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
