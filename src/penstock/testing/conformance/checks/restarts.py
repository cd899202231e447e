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
        peer.note("a delta binding was not inspected")
        return peer.task()
    try:
        return delta_task(peer, Resource())
    except Skipped as skipped:
        peer.note(f"a delta binding was not inspected: {skipped}")
        return peer.task()


def _transact(shard: Shard, docs: list[Document]) -> None:
    shard.flush()
    for binding in range(len(shard.task.resources)):
        shard.store(binding, docs)
    shard.commit()


def _check_restart(peer: Peer, point: Callable[[Shard], None]) -> None:
    task = _task(peer)
    shard = task.shard()
    _transact(shard, OLDER)
    before = len(task.committed)
    point(shard)
    peer.kill()
    shard = task.shard()
    if peer.exact:
        shard.verify()
    if len(task.committed) == before:
        _transact(shard, NEWER)
    shard.verify(rows=True)


def _add_check(name: str, point: Callable[[Shard], None]) -> None:
    @check(
        rule=f"a connector that is killed after {name} resumes from the checkpoint without loss, "
        "and without duplicates if the pattern is exactly-once",
        source="protocol, Open",
        needs=(Need.COMMAND,),
        name=f"restart-after-{name}-resumes",
    )
    def _(peer: Peer) -> None:
        _check_restart(peer, point)


for _name, _point in POINTS.items():
    _add_check(_name, _point)


@check(
    rule="an authoritative endpoint has the checkpoint after a restart",
    source="protocol, Open",
    needs=(Need.COMMAND,),
    patterns=frozenset({Pattern.REMOTE_AUTHORITATIVE}),
    otherwise="the recovery log stores the checkpoint",
)
def checkpoint_survives_restart(peer: Peer) -> None:
    task = peer.task()
    for n in range(2):
        shard = task.shard()
        shard.transact(document("a", f"of start {n}"))
        # The log of a runtime may be lost; the checkpoint of the endpoint must suffice.
        task.log(shard.key_range).checkpoint = b""
        peer.kill()
    task.shard().verify()


@check(
    rule="staged work that the recovery log committed is applied before the first Acknowledged "
    "of the next stream",
    source="protocol, Acknowledge",
    patterns=frozenset({Pattern.IDEMPOTENT_APPLY}),
    otherwise="nothing is staged",
)
def staged_work_is_applied_before_first_acknowledged(peer: Peer) -> None:
    task = peer.task()
    shard = task.shard()
    shard.transact(document("a", "older"))
    shard.flush()
    shard.store(0, [document("a", "newer"), document("b", "newer")])
    shard.start_commit()
    shard.cancel()
    task.shard().verify(rows=True)


@check(
    rule="staged work is applied once, even if several streams open with the same state",
    source="protocol, Acknowledge",
    needs=(Need.READ, Need.DELTA),
    patterns=frozenset({Pattern.IDEMPOTENT_APPLY}),
    otherwise="nothing is staged",
)
def staged_work_is_applied_once(peer: Peer) -> None:
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
