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


def _overtaken(peer: Peer, amid: Callable[[Shard], object] = lambda _: None) -> tuple[Shard, Shard]:
    """Return a shard that has committed once, and its successor in another process.

    The older shard is `amid` its next transaction when the newer one takes over and commits.
    """
    task = peer.task()
    older = task.shard()
    older.transact(document("a", "committed"))
    amid(older)
    newer = task.shard(connection=peer.another())
    newer.transact(document("a", "of the newer"), document("b", "of the newer"))
    return older, newer


@check(
    "zombie-cannot-commit",
    rule="a shard that another process has taken over cannot commit, and changes nothing",
    source="protocol, Fencing",
    needs=(Need.COMMAND,),
    patterns=frozenset({Pattern.REMOTE_AUTHORITATIVE}),
    otherwise="the fence is the recovery log's",
)
def _(peer: Peer) -> None:
    zombie, newer = _overtaken(peer)
    cannot_commit(zombie, "of the zombie")
    newer.verify(rows=True)
    newer.absent(0, document("z", ""))


@check(
    "zombie-in-store-holds-nothing",
    rule="a shard that opens does not wait for one of another process that hangs in Store",
    source="protocol, Fencing",
    needs=(Need.COMMAND, Need.BREAKS_LOCKS),
    patterns=frozenset(Pattern) - {Pattern.PUSH_ONLY},
    otherwise="what is pushed is not held",
)
def _(peer: Peer) -> None:
    def stores(zombie: Shard) -> None:
        zombie.flush()
        zombie.store(0, [document("a", "of the zombie")])
        peer.pause()

    _, newer = _overtaken(peer, stores)
    newer.verify(rows=True)


@check(
    "zombie-stages-in-vain",
    rule="what a shard has staged whose commit the recovery log refused is never applied",
    source="protocol, Fencing",
    needs=(Need.COMMAND,),
    patterns=frozenset({Pattern.IDEMPOTENT_APPLY}),
    otherwise="nothing is staged",
)
def _(peer: Peer) -> None:
    zombie, newer = _overtaken(peer)
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
    "older-never-overwrites-newer",
    rule="what an older shard stores late does not take the place of what a newer one has stored",
    source="protocol, Fencing",
    needs=(Need.LOADS, Need.COMMAND, Need.NEWER_WINS),
    patterns=frozenset({Pattern.NON_TRANSACTIONAL}),
    otherwise="an older shard cannot commit, or there is nothing to overwrite",
)
def _(peer: Peer) -> None:
    older, newer = _overtaken(peer, Shard.flush)
    try:
        older.store(0, [document("a", "of the older"), document("b", "of the older")])
        older.begin_commit()
        older.started_commit(logged=False)
    except ConnectorError:
        peer.connectors.serves()
    newer.verify()
    newer.cancel()
    newer.task.shard().verify(rows=True)
