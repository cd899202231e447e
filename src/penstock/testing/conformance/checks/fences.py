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
_LOG = "the recovery log stores the checkpoint"


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
        shard.log.indeterminate = None
        shard.peer.connectors.serves()
        return
    raise Failed("a shard that another has taken over reached Acknowledged")


@check(
    rule="before Opened, a shard fences the older shard of the same keys",
    source="protocol, Fencing",
)
def second_open_fences_first_shard(peer: Peer) -> None:
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
        peer.note(f"the result at the endpoint was not inspected: {skipped}")


@check(
    rule="a shard opens without waiting for an older shard in Store, whose stores have no effect",
    source="protocol, Fencing",
    patterns=frozenset(Pattern) - {Pattern.PUSH_ONLY},
    otherwise="pushed documents cannot be rolled back",
)
def second_open_fences_shard_in_store(peer: Peer) -> None:
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
    rule="a partial overlap of the key ranges fences the older shard",
    source="protocol, Fencing",
)
def open_of_overlapping_range_fences_shard(peer: Peer) -> None:
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
    rule="shards with disjoint key ranges do not fence each other",
    source="protocol, Fencing",
)
def open_of_disjoint_range_fences_nothing(peer: Peer) -> None:
    task = peer.task()
    left, right = (task.part(half) for half in WHOLE.split())
    for n in range(2):
        left.transact(document("left", f"of {n}"))
        right.transact(document("right", f"of {n}"))
    left.transact()
    right.verify()


@check(
    rule="materializations do not fence the shards of each other",
    source="protocol, Fencing",
)
def open_of_other_materialization_fences_nothing(peer: Peer) -> None:
    first, second = peer.task(), peer.task()
    one = first.shard()
    one.transact(document("a", "of the first"))
    other = second.shard()
    other.transact(document("a", "of the second"))
    one.transact(document("b", "of the first"))
    one.verify()
    other.verify()


@check(
    rule="shards that split another resume from its checkpoint, and the parent cannot commit again",
    source="protocol, Fencing",
)
def split_shards_resume_from_parent_checkpoint(peer: Peer) -> None:
    task = peer.task()
    parent = task.shard()
    parent.transact(document("a", "of the parent"))
    parent.transact(document("b", "of the parent"))
    _split(task, [parent])[0].verify()


@check(
    rule="shards of a second split resume from the checkpoint of the narrowest shard that has "
    "their keys",
    source="protocol, Fencing",
)
def shards_split_twice_resume_from_narrowest_checkpoint(peer: Peer) -> None:
    _split_twice(peer.task())[0].verify()


@check(
    rule="a shard that joins some or all others resumes from no checkpoint older than theirs",
    source="protocol, Fencing",
    patterns=_REMOTE,
    otherwise=_LOG,
)
def joined_shard_resumes_from_last_checkpoint(peer: Peer) -> None:
    task = peer.task()
    parent = task.shard()
    parent.transact(document("a", "of the parent"))
    _join(peer, task, [task.part(half) for half in WHOLE.split()])
    # The fence of the whole range still exists when four shards become two.
    task = peer.task()
    task.shard().transact(document("a", "of the parent"))
    quarters = [quarter for half in WHOLE.split() for quarter in half.split()]
    _join(peer, task, [task.part(quarter) for quarter in quarters], WHOLE.split())


@check(
    rule="a shard that joins the shards of two splits resumes from no earlier checkpoint, and "
    "commits its own",
    source="protocol, Fencing",
    patterns=_REMOTE,
    otherwise=_LOG,
)
def shard_joined_from_four_resumes_from_last_checkpoint(peer: Peer) -> None:
    task = peer.task()
    _join(peer, task, _split_twice(task))


def _split(task: Task, parents: Sequence[Shard]) -> list[Shard]:
    """Split each shard in two, which commit; compare the opened checkpoint with the parent's."""
    shards = []
    for parent in parents:
        children = [task.part(half) for half in parent.key_range.split()]
        cannot_commit(parent, "of the parent, late")
        for child in children:
            child.transact(document(f"of {child.key_range}", "stored"))
        shards += children
    return shards


def _split_twice(task: Task) -> list[Shard]:
    whole = task.shard()
    whole.transact(document("a", "of the whole"))
    return _split(task, _split(task, [whole]))


def _join(
    peer: Peer, task: Task, parts: Sequence[Shard], ranges: Sequence[KeyRange] = (WHOLE,)
) -> None:
    """Join shards that have reached a common checkpoint, and check the opened checkpoint."""
    earlier = sorted({log.stored.hex() for log in task.logs.values()})
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
    for key_range in ranges:
        first, second = (_open_as_new(peer, task, key_range).checkpoint for _ in range(2))
        if {first, second} - {b"", common}:
            raise Failed(
                f"Opened has checkpoint {first.hex()}, the second time {second.hex()}, "
                f"and must have {common.hex()} or none",
                detail=f"Earlier checkpoints were {', '.join(earlier)}.",
            )
        task.logs[key_range] = dataclasses.replace(known, checkpoint=second, stored=second)
    for key_range in ranges:
        joined = task.part(key_range)
        joined.transact(document(f"joined {key_range}", "stored"))
        joined.cancel()
    task.part(ranges[0]).verify()
