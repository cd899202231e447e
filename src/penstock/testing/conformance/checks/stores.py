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
    rule="a stored document replaces the document with the same key",
    source="protocol, Store",
    needs=(Need.LOADS,),
)
def store_replaces_document(peer: Peer) -> None:
    task = peer.task()
    shard = task.shard()
    shard.transact(document("a", "older", 1), document("b", "stays", 1))
    shard.transact(document("a", "newer", 2), document("c", "is new", 2))
    shard.transact({"id": "b"})
    shard.verify(rows=True)


@check(
    rule="a Store with `deletes` removes the document and no other",
    source="protocol, Store",
    needs=(Need.LOADS, Need.DELETES),
)
def store_with_deletes_removes_document(peer: Peer) -> None:
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
    rule="the delete of a missing key is no error",
    source="protocol, Store",
    needs=(Need.LOADS, Need.DELETES),
)
def delete_of_missing_key_is_no_error(peer: Peer) -> None:
    shard = peer.task().shard()
    shard.transact(document("a", "stored"))
    shard.transact(document("missing", "stored"), delete=True)
    shard.verify(rows=True)


@check(
    rule="a Store with `empties` removes all earlier documents, atomically with the commit of "
    "its transaction",
    source="protocol, Store",
    needs=(Need.LOADS,),
)
def store_with_empties_truncates_at_commit(peer: Peer) -> None:
    task = peer.task()
    task.must_accept_empty()
    shard = task.shard()
    shard.transact(document("a", "older"), document("b", "older"))
    if peer.exact:
        shard.flush()
        shard.empty(0)
        shard.store(0, [document("a", "uncommitted")])
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
    rule="a Store with `empties` is rejected after another Store of its binding, and in a "
    "shard of a partial key range; it changes nothing",
    source="protocol, Store",
    needs=(Need.LOADS,),
)
def store_with_late_or_partial_empties_is_rejected(peer: Peer) -> None:
    late = document("late", "of before it is emptied")
    for case, key_range, before in (("after another", WHOLE, [late]), ("of a part", HALF, [])):
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
            shard.log.indeterminate = None
            peer.connectors.serves()
        else:
            raise Failed(f"a Store with empties, {case}, was not rejected")
        task.part(key_range).verify()


@check(
    rule="a wrong `exists` neither loses nor duplicates a document",
    source="protocol, Store",
    needs=(Need.LOADS, Need.HINT),
)
def store_with_wrong_exists_keeps_one_document(peer: Peer) -> None:
    shard = peer.task().shard()
    shard.transact(document("a", "older"))
    shard.flush()
    shard.store(0, [document("a", "newer")], exists=False)
    shard.store(0, [document("b", "is new")], exists=True)
    shard.commit()
    shard.verify(rows=True)


@check(
    rule="a key that is stored twice in a transaction, in one Store or in two, is rejected no "
    "later than StartCommit",
    source="protocol, Store",
    needs=(Need.LOADS,),
)
def duplicate_key_in_transaction_is_rejected(peer: Peer) -> None:
    task = peer.task()
    task.shard().transact(document("a", "committed"))
    one, two = document("twice", "once"), document("twice", "again")
    cases = {
        "one Store": [[one, two]],
        "two Stores": [[one], [document("b", "between")], [two]],
    }
    for case, stores in cases.items():
        shard = task.shard()
        shard.flush()
        try:
            for docs in stores:
                shard.store(0, docs)
            shard.begin_commit()
            shard.started_commit(logged=False)
        except ConnectorError:
            shard.log.indeterminate = None
            peer.connectors.serves()
        else:
            raise Failed(f"a key that was stored twice, in {case}, was not rejected")
    shard = task.shard()
    shard.verify()
    if peer.exact:
        shard.absent(0, one)
