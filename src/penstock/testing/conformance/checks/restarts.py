"""Restarts of a connector that is killed at each point of a transaction.

All checks have the same course: one transaction commits, and the connector is killed during a
second one. The state of the runtime decides whether the second is complete or must be repeated. At
the end both are in the endpoint.
"""

from collections.abc import Callable, Mapping
from typing import Final

from penstock.testing.conformance.check import Need, Skipped, check
from penstock.testing.conformance.config import Pattern
from penstock.testing.conformance.documents import Document, document
from penstock.testing.conformance.peer import Peer, delta_task
from penstock.testing.conformance.shard import Shard
from penstock.testing.conformance.task import Resource, Task

__all__: list[str] = []

OLDER: Final = [document("a", "older"), document("b", "stays")]
NEWER: Final = [document("a", "newer"), document("c", "is new")]


def _opened(_shard: Shard) -> None:
    """Do nothing: no transaction is open."""


def _loading(shard: Shard) -> None:
    binding = len(shard.task.resources) - 1
    if not shard.task.delta(binding):
        shard.load(binding, NEWER)


def _loaded(shard: Shard) -> None:
    _loading(shard)
    shard.peer.pause()


def _flushed(shard: Shard) -> None:
    _loading(shard)
    shard.flush()


def _storing(shard: Shard) -> None:
    _flushed(shard)
    for binding in range(len(shard.task.resources)):
        shard.store(binding, NEWER)


def _stored(shard: Shard) -> None:
    _storing(shard)
    shard.peer.pause()


def _committing(shard: Shard) -> None:
    _storing(shard)
    shard.begin_commit()
    shard.peer.pause()


def _committed(shard: Shard) -> None:
    _storing(shard)
    shard.start_commit()


def _acknowledged(shard: Shard) -> None:
    _storing(shard)
    shard.commit()


POINTS: Final[Mapping[str, Callable[[Shard], None]]] = {
    "open": _opened,
    "load": _loaded,
    "flush": _flushed,
    "store": _stored,
    "start-commit": _committing,
    "started-commit": _committed,
    "acknowledge": _acknowledged,
}


def _task(peer: Peer) -> Task:
    """Return a task with a delta and a standard binding, if both exist and can be read."""
    if peer.config.pattern is Pattern.PUSH_ONLY:
        return delta_task(peer)
    if not peer.config.read or not peer.config.delta:
        peer.note("a delta binding was not looked at")
        return peer.task()
    try:
        return delta_task(peer, Resource())
    except Skipped as skipped:
        peer.note(f"a delta binding was not looked at: {skipped}")
        return peer.task()


def _whole(shard: Shard, docs: list[Document]) -> None:
    shard.flush()
    for binding in range(len(shard.task.resources)):
        shard.store(binding, docs)
    shard.commit()


def _killed(peer: Peer, point: Callable[[Shard], None]) -> None:
    task = _task(peer)
    shard = task.shard()
    _whole(shard, OLDER)
    before = len(task.committed)
    point(shard)
    peer.kill()
    shard = task.shard()
    if peer.exact:
        shard.verify()
    if len(task.committed) == before:
        _whole(shard, NEWER)
    shard.verify(rows=True)


def _listed(name: str, point: Callable[[Shard], None]) -> None:
    @check(
        f"restart-after-{name}",
        rule=f"a connector that is killed after {name} goes on where the checkpoint says, "
        "and nothing is lost, nor done twice where the pattern is exactly-once",
        source="protocol, Open",
        needs=(Need.COMMAND,),
    )
    def _(peer: Peer) -> None:
        _killed(peer, point)


for _name, _point in POINTS.items():
    _listed(_name, _point)


@check(
    "checkpoint-survives-restart",
    rule="an endpoint that is authoritative still has the checkpoint after a restart",
    source="protocol, Open",
    needs=(Need.COMMAND,),
    patterns=frozenset({Pattern.REMOTE_AUTHORITATIVE}),
    otherwise="the checkpoint is the recovery log's",
)
def _(peer: Peer) -> None:
    task = peer.task()
    for n in range(2):
        shard = task.shard()
        shard.transact(document("a", f"of start {n}"))
        # The log of a runtime may be lost; the checkpoint of the endpoint must suffice.
        task.log(shard.key_range).checkpoint = b""
        peer.kill()
    task.shard().verify()


@check(
    "staged-work-applied-on-first-acknowledge",
    rule="what is staged and committed in the recovery log is applied before the first "
    "Acknowledged of the next stream",
    source="protocol, Acknowledge",
    patterns=frozenset({Pattern.IDEMPOTENT_APPLY}),
    otherwise="nothing is staged",
)
def _(peer: Peer) -> None:
    task = peer.task()
    shard = task.shard()
    shard.transact(document("a", "older"))
    shard.flush()
    shard.store(0, [document("a", "newer"), document("b", "newer")])
    shard.start_commit()
    shard.cancel()
    task.shard().verify(rows=True)


@check(
    "staged-work-applied-once",
    rule="what is staged is applied once, however often a stream opens with the same state",
    source="protocol, Acknowledge",
    needs=(Need.READ, Need.DELTA),
    patterns=frozenset({Pattern.IDEMPOTENT_APPLY}),
    otherwise="nothing is staged",
)
def _(peer: Peer) -> None:
    task = delta_task(peer)
    shard = task.shard()
    shard.transact(document("a", "older"))
    shard.flush()
    shard.store(0, [document("a", "newer")])
    shard.start_commit()
    shard.cancel()
    for _ in range(3):
        task.shard().cancel()
    task.shard().verify()
