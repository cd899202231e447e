"""Effects of Store."""

from typing import Final

from penstock.materialize.errors import ConnectorError
from penstock.protocol.key_range import WHOLE
from penstock.testing.conformance.check import Failed, Need, check
from penstock.testing.conformance.documents import document
from penstock.testing.conformance.peer import Peer

__all__: list[str] = []

HALF: Final = WHOLE.split()[0]


@check(
    "update-overwrites",
    rule="a document takes the place of the one that has its key",
    source="protocol, Store",
    needs=(Need.LOADS,),
)
def _(peer: Peer) -> None:
    task = peer.task()
    shard = task.shard()
    shard.transact(document("a", "older", 1), document("b", "stays", 1))
    shard.transact(document("a", "newer", 2), document("c", "is new", 2))
    shard.transact({"id": "b"})
    shard.verify(rows=True)


@check(
    "deletes-remove",
    rule="a document that is stored with `deletes` is removed, and others stay",
    source="protocol, Store",
    needs=(Need.LOADS, Need.DELETES),
)
def _(peer: Peer) -> None:
    task = peer.task()
    a, b, c = (document(name, "stored") for name in "abc")
    shard = task.shard()
    shard.transact(a, b)
    shard.flush()
    shard.store(0, [a], delete=True)
    shard.store(0, [c])
    shard.commit()
    shard.verify(rows=True)
    shard.transact(document("a", "again"))
    shard.verify(rows=True)


@check(
    "delete-of-a-missing-key",
    rule="to remove what is not there is no error",
    source="protocol, Store",
    needs=(Need.LOADS, Need.DELETES),
)
def _(peer: Peer) -> None:
    shard = peer.task().shard()
    shard.transact(document("a", "stored"))
    shard.transact(document("missing", "stored"), delete=True)
    shard.verify(rows=True)


@check(
    "empties-remove-all",
    rule="a Store that `empties` removes all that was there, together with what its transaction "
    "stores, and not before it commits",
    source="protocol, Store",
    needs=(Need.LOADS,),
)
def _(peer: Peer) -> None:
    task = peer.task()
    task.must_accept_empty()
    shard = task.shard()
    shard.transact(document("a", "older"), document("b", "older"))
    if peer.exact:
        shard.flush()
        shard.empty(0)
        shard.store(0, [document("a", "of nobody")])
        peer.pause()
        shard.cancel()
        shard = task.shard()
        shard.verify(rows=True)
    shard.flush()
    shard.empty(0)
    shard.store(0, [document("b", "newer"), document("c", "is new")])
    shard.commit()
    shard.verify(rows=True)
    shard.transact(document("a", "again"))
    shard.verify(rows=True)
    shard.flush()
    shard.empty(0)
    shard.commit()
    shard.verify(rows=True)


@check(
    "empties-first-and-all",
    rule="a Store that `empties` is refused after another of its binding, and of a shard that "
    "has some of the keys, and changes nothing",
    source="protocol, Store",
    needs=(Need.LOADS,),
)
def _(peer: Peer) -> None:
    late = document("late", "of before it is emptied")
    for way, key_range, before in (("after another", WHOLE, [late]), ("of a part", HALF, [])):
        task = peer.task()
        task.must_accept_empty()
        task.part(key_range).transact(document("a", "committed"))
        shard = task.part(key_range)
        shard.flush()
        try:
            if before:
                shard.store(0, before)
            shard.empty(0)
            shard.begin_commit()
            shard.started_commit(logged=False)
        except ConnectorError:
            shard.log.in_doubt = None
            peer.connectors.serves()
        else:
            raise Failed(f"a Store that empties, {way}, was not refused")
        task.part(key_range).verify()


@check(
    "exists-is-a-hint",
    rule="a document is neither lost nor doubled when `exists` is wrong",
    source="protocol, Store",
    needs=(Need.LOADS, Need.HINT),
)
def _(peer: Peer) -> None:
    shard = peer.task().shard()
    shard.transact(document("a", "older"))
    shard.flush()
    shard.store(0, [document("a", "newer")], exists=False)
    shard.store(0, [document("b", "is new")], exists=True)
    shard.commit()
    shard.verify(rows=True)


@check(
    "duplicate-key-refused",
    rule="a key that is stored twice in a transaction is refused, in one Store or in two, "
    "at the latest by StartCommit",
    source="protocol, Store",
    needs=(Need.LOADS,),
)
def _(peer: Peer) -> None:
    task = peer.task()
    task.shard().transact(document("a", "committed"))
    one, two = document("twice", "once"), document("twice", "again")
    ways = {
        "one Store": [[one, two]],
        "two Stores": [[one], [document("b", "between")], [two]],
    }
    for way, stores in ways.items():
        shard = task.shard()
        shard.flush()
        try:
            for docs in stores:
                shard.store(0, docs)
            shard.begin_commit()
            shard.started_commit(logged=False)
        except ConnectorError:
            shard.log.in_doubt = None
            peer.connectors.serves()
        else:
            raise Failed(f"a key that was stored twice, in {way}, was not refused")
    shard = task.shard()
    shard.verify()
    if peer.exact:
        shard.absent(0, one)
