"""Shards: overlapping, disjoint, split and joined."""

import dataclasses
from collections.abc import Sequence

from penstock.materialize.errors import ConnectorError
from penstock.protocol.key_range import WHOLE, KeyRange
from penstock.protocol.messages import Acknowledge, Open, Opened
from penstock.testing.conformance.check import Failed, Skipped, check
from penstock.testing.conformance.config import Pattern
from penstock.testing.conformance.documents import document
from penstock.testing.conformance.peer import Peer
from penstock.testing.conformance.shard import Shard
from penstock.testing.conformance.task import Task

__all__ = ["cannot_commit"]

_REMOTE = frozenset({Pattern.REMOTE_AUTHORITATIVE})
_LOG = "the checkpoint is the recovery log's"


def cannot_commit(shard: Shard, word: str) -> None:
    """Continue a shard that another has taken over, as a zombie would.

    Raises:
        Failed: its transaction was acknowledged.
    """
    try:
        shard.flush()
        shard.store(0, [document("a", word), document("z", word)])
        shard.begin_commit()
        shard.started_commit(logged=False)
        shard.exchange.send(Acknowledge())
        shard.acknowledged()
    except ConnectorError:
        shard.log.in_doubt = None
        shard.peer.connectors.serves()
        return
    raise Failed("a shard that another has taken over came to Acknowledged")


@check(
    "second-open-ends-the-first",
    rule="a shard that opens ends the older one that has its keys, before it answers Opened",
    source="protocol, Fencing",
)
def _(peer: Peer) -> None:
    task = peer.task()
    first = task.shard()
    first.transact(document("a", "committed"))
    second = task.shard()
    cannot_commit(first, "of the older")
    second.transact(document("b", "committed"))
    try:
        second.verify(rows=True)
        second.absent(0, document("z", ""))
    except Skipped as skipped:
        peer.note(f"what came of it at the endpoint was not looked at: {skipped}")


@check(
    "second-open-ends-a-store",
    rule="a shard that opens does not wait for an older one that is in the midst of Store, "
    "and nothing of that is to be seen",
    source="protocol, Fencing",
    patterns=frozenset(Pattern) - {Pattern.PUSH_ONLY},
    otherwise="what is pushed cannot be taken back",
)
def _(peer: Peer) -> None:
    task = peer.task()
    first = task.shard()
    first.transact(document("a", "committed"))
    first.flush()
    first.store(0, [document("a", "of the older")])
    peer.pause()
    second = task.shard()
    if peer.exact:
        second.verify()
    second.transact(document("a", "of the newer"))
    second.verify()


@check(
    "fence-overlap",
    rule="a range that overlaps in part is enough to end the older shard",
    source="protocol, Fencing",
)
def _(peer: Peer) -> None:
    task = peer.task()
    older = task.part(KeyRange(0, 0xBFFFFFFF))
    older.transact(document("a", "committed"))
    _open_as_new(peer, task, KeyRange(0x80000000, 0xFFFFFFFF))
    cannot_commit(older, "of the older")


def _open_as_new(peer: Peer, task: Task, key_range: KeyRange) -> Opened:
    """Open a shard without comparing its checkpoint with the log."""
    exchange = peer.exchange()
    exchange.send(Open(task.spec, task.version, key_range))
    return exchange.expect(Opened)


@check(
    "fence-disjoint-ranges",
    rule="shards that have no key in common do not end each other",
    source="protocol, Fencing",
)
def _(peer: Peer) -> None:
    task = peer.task()
    left, right = (task.part(each) for each in WHOLE.split())
    for n in range(2):
        left.transact(document("left", f"of {n}"))
        right.transact(document("right", f"of {n}"))
    left.transact()
    right.verify()


@check(
    "fence-other-materialization-untouched",
    rule="materializations do not end each other's shards",
    source="protocol, Fencing",
)
def _(peer: Peer) -> None:
    first, second = peer.task(), peer.task()
    one = first.shard()
    one.transact(document("a", "of the first"))
    other = second.shard()
    other.transact(document("a", "of the second"))
    one.transact(document("b", "of the first"))
    one.verify()
    other.verify()


@check(
    "fence-split",
    rule="shards that split another go on from its checkpoint, and it cannot commit again",
    source="protocol, Fencing",
)
def _(peer: Peer) -> None:
    task = peer.task()
    parent = task.shard()
    parent.transact(document("a", "of the parent"))
    parent.transact(document("b", "of the parent"))
    _split(task, [parent])[0].verify()


@check(
    "fence-split-twice",
    rule="shards that split what was split before go on from the checkpoint of the narrowest "
    "that has their keys",
    source="protocol, Fencing",
)
def _(peer: Peer) -> None:
    _split_twice(peer.task())[0].verify()


@check(
    "fence-join",
    rule="a shard that joins others, all or some of them, does not go back to a checkpoint older "
    "than theirs",
    source="protocol, Fencing",
    patterns=_REMOTE,
    otherwise=_LOG,
)
def _(peer: Peer) -> None:
    task = peer.task()
    parent = task.shard()
    parent.transact(document("a", "of the parent"))
    _join(peer, task, [task.part(each) for each in WHOLE.split()])
    # The fence of the whole range still exists when four shards become two.
    task = peer.task()
    task.shard().transact(document("a", "of the parent"))
    quarters = [each for half in WHOLE.split() for each in half.split()]
    _join(peer, task, [task.part(each) for each in quarters], WHOLE.split())


@check(
    "fence-join-of-four",
    rule="a shard that joins what was split twice goes back to no checkpoint of either time, "
    "and then commits its own",
    source="protocol, Fencing",
    patterns=_REMOTE,
    otherwise=_LOG,
)
def _(peer: Peer) -> None:
    task = peer.task()
    _join(peer, task, _split_twice(task))


def _split(task: Task, parents: Sequence[Shard]) -> list[Shard]:
    """Split each shard in two, which commit; compare the opened checkpoint with the parent's."""
    found = []
    for parent in parents:
        children = [task.part(each) for each in parent.key_range.split()]
        cannot_commit(parent, "of the parent, late")
        for child in children:
            child.transact(document(f"of {child.key_range}", "stored"))
        found += children
    return found


def _split_twice(task: Task) -> list[Shard]:
    whole = task.shard()
    whole.transact(document("a", "of the whole"))
    return _split(task, _split(task, [whole]))


def _join(
    peer: Peer, task: Task, parts: Sequence[Shard], ranges: Sequence[KeyRange] = (WHOLE,)
) -> None:
    """Join shards that have reached a common checkpoint, and check the opened checkpoint."""
    old = sorted({each.stored.hex() for each in task.logs.values()})
    common = task.next_checkpoint()
    for part in parts:
        part.flush()
        part.store(0, [document(f"last of {part.key_range}", "stored")])
        part.begin_commit(common)
        part.started_commit()
        part.acknowledge()
        part.cancel()
    known = task.log(parts[0].key_range)
    task.logs = {}
    for each in ranges:
        first, said = (_open_as_new(peer, task, each).checkpoint for _ in range(2))
        if {first, said} - {b"", common}:
            raise Failed(
                f"Opened has checkpoint {first.hex()}, the second time {said.hex()}, "
                f"and must have {common.hex()} or none",
                detail=f"Those of before were {', '.join(old)}.",
            )
        task.logs[each] = dataclasses.replace(known, checkpoint=said, stored=said)
    for each in ranges:
        joined = task.part(each)
        joined.transact(document(f"joined {each}", "stored"))
        joined.cancel()
    task.part(ranges[0]).verify()
