"""Two processes, where the older one does not know that it was replaced."""

from collections.abc import Callable

from penstock.materialize.errors import ConnectorError
from penstock.testing.conformance.check import Need, check
from penstock.testing.conformance.checks.fences import cannot_commit
from penstock.testing.conformance.config import Pattern
from penstock.testing.conformance.documents import document
from penstock.testing.conformance.peer import Peer
from penstock.testing.conformance.shard import Shard

__all__: list[str] = []


def _take_over(
    peer: Peer, prepare: Callable[[Shard], object] = lambda _: None
) -> tuple[Shard, Shard]:
    """Return a shard that has committed once, and its successor in another process.

    `prepare` runs on the older shard before the newer one takes over and commits.
    """
    task = peer.task()
    older = task.shard()
    older.transact(document("a", "committed"))
    prepare(older)
    newer = task.shard(connection=peer.second_connection())
    newer.transact(document("a", "of the newer"), document("b", "of the newer"))
    return older, newer


@check(
    rule="a shard that another process has taken over cannot commit, and changes nothing",
    source="protocol, Fencing",
    needs=(Need.COMMAND,),
    patterns=frozenset({Pattern.REMOTE_AUTHORITATIVE}),
    otherwise="the recovery log is the fence",
)
def zombie_cannot_commit(peer: Peer) -> None:
    zombie, newer = _take_over(peer)
    cannot_commit(zombie, "of the zombie")
    newer.verify(rows=True)
    newer.absent(0, document("z", ""))


@check(
    rule="a shard opens without waiting for a shard of another process that hangs in Store",
    source="protocol, Fencing",
    needs=(Need.COMMAND, Need.BREAKS_LOCKS),
    patterns=frozenset(Pattern) - {Pattern.PUSH_ONLY},
    otherwise="pushed documents hold no lock",
)
def zombie_in_store_does_not_block_open(peer: Peer) -> None:
    def stores(zombie: Shard) -> None:
        zombie.flush()
        zombie.store(0, [document("a", "of the zombie")])
        peer.pause()

    _, newer = _take_over(peer, stores)
    newer.verify(rows=True)


@check(
    rule="staged work is never applied if the recovery log rejected its commit",
    source="protocol, Fencing",
    needs=(Need.COMMAND,),
    patterns=frozenset({Pattern.IDEMPOTENT_APPLY}),
    otherwise="nothing is staged",
)
def zombie_staged_work_is_never_applied(peer: Peer) -> None:
    zombie, newer = _take_over(peer)
    zombie.flush()
    zombie.store(0, [document("a", "of the zombie"), document("z", "of the zombie")])
    zombie.begin_commit()
    zombie.started_commit(logged=False)
    zombie.cancel()
    newer.verify()
    newer.absent(0, document("z", ""))
    newer.cancel()
    newer.task.shard().verify(rows=True)


@check(
    rule="a late Store of an older shard does not replace the document of a newer shard",
    source="protocol, Fencing",
    needs=(Need.LOADS, Need.COMMAND, Need.NEWER_WINS),
    patterns=frozenset({Pattern.NON_TRANSACTIONAL}),
    otherwise="an older shard cannot commit, or there is nothing to overwrite",
)
def late_store_keeps_newer_document(peer: Peer) -> None:
    older, newer = _take_over(peer, Shard.flush)
    try:
        older.store(0, [document("a", "of the older"), document("b", "of the older")])
        older.begin_commit()
        older.started_commit(logged=False)
    except ConnectorError:
        peer.connectors.serves()
    newer.verify()
    newer.cancel()
    newer.task.shard().verify(rows=True)
