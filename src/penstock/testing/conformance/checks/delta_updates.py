"""Bindings with delta updates."""

from penstock.testing.conformance.check import Need, check
from penstock.testing.conformance.documents import document
from penstock.testing.conformance.peer import Peer, delta_task

__all__: list[str] = []


@check(
    rule="a delta binding stores every document, also with equal keys",
    source="protocol, Store",
    needs=(Need.READ, Need.DELTA),
)
def delta_binding_appends_every_document(peer: Peer) -> None:
    shard = delta_task(peer).shard()
    for n in range(3):
        shard.transact(document("same", f"of transaction {n}"), document(f"own {n}", "once"))
    shard.verify()


@check(
    rule="a Store with `empties` removes all earlier documents of a delta binding",
    source="protocol, Store",
    needs=(Need.READ, Need.DELTA),
)
def delta_binding_with_empties_is_truncated(peer: Peer) -> None:
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
    rule="a transaction with only delta bindings is flushed and committed",
    source="protocol, Flush",
    needs=(Need.READ, Need.DELTA),
)
def delta_binding_transaction_is_committed(peer: Peer) -> None:
    shard = delta_task(peer).shard()
    shard.transact()
    shard.transact(document("a", "stored"))
    shard.transact()
    shard.verify()
