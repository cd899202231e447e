"""Order of messages."""

import random
from collections.abc import Mapping, Sequence

from penstock.protocol.key_range import WHOLE
from penstock.protocol.messages import Acknowledge, Acknowledged, Flush, Open, Opened
from penstock.testing.conformance.check import Failed, Need, check
from penstock.testing.conformance.config import Pattern
from penstock.testing.conformance.documents import PLAIN, document
from penstock.testing.conformance.peer import Peer
from penstock.testing.conformance.shard import Shard
from penstock.testing.conformance.task import Resource

__all__: list[str] = []


@check(
    "open-answers-opened",
    rule="Opened is the answer to Open, and the first thing that is said",
    source="protocol, Open",
)
def _(peer: Peer) -> None:
    task = peer.task()
    exchange = peer.exchange()
    exchange.send(Open(task.spec, task.version, WHOLE))
    exchange.expect(Opened)


@check(
    "opened-comes-once",
    rule="there is one Opened in a stream, however long it is",
    source="protocol, Open",
)
def _(peer: Peer) -> None:
    shard = peer.task().shard()
    for n in range(3):
        shard.transact(document("a", f"of transaction {n}"))
    shard.exchange.end()
    shard.exchange.ended()


@check(
    "first-acknowledge",
    rule="Acknowledged comes at the beginning of every transaction, of the first one, too",
    source="protocol, Acknowledge",
)
def _(peer: Peer) -> None:
    task = peer.task()
    exchange = peer.exchange()
    exchange.send(Open(task.spec, task.version, WHOLE))
    exchange.expect(Opened)
    exchange.send(Acknowledge())
    exchange.expect(Acknowledged, "the first Acknowledged")


@check(
    "end-of-stream-when-idle",
    rule="a runtime that ends the stream between transactions is answered by its end, not an error",
    source="protocol, Acknowledge",
)
def _(peer: Peer) -> None:
    shard = peer.task().shard()
    shard.transact(document("a", "stored"))
    shard.exchange.end()
    shard.exchange.ended()


@check(
    "empty-transaction",
    rule="a transaction may load nothing and store nothing, and still commits its checkpoint",
    source="protocol, StartCommit",
)
def _(peer: Peer) -> None:
    task = peer.task()
    shard = task.shard()
    for _ in range(3):
        shard.transact()
    shard.cancel()
    # Opened is compared with the last checkpoint.
    task.shard().transact()


@check(
    "flush-is-answered-without-loads",
    rule="Flush is answered by Flushed, though there was no Load",
    source="protocol, Flush",
)
def _(peer: Peer) -> None:
    shard = peer.task().shard()
    shard.exchange.send(Flush())
    if found := shard.flushed():
        raise Failed(f"documents came that nobody asked for: {found}")


@check(
    "several-transactions",
    rule="a stream goes through any number of transactions, and each sees the ones before it",
    source="protocol, StartCommit",
)
def _(peer: Peer) -> None:
    task = peer.task()
    shard = task.shard()
    for n in range(5):
        shard.transact(document("same", f"of transaction {n}", n), document(f"own {n}", "once", n))
        if not task.delta(0):
            shard.verify()
    shard.cancel()
    task.shard().verify()


@check(
    "legal-orders",
    rule="Loads and Stores come in any number of messages, of any bindings, also while the last "
    "commit is under way",
    source="protocol, Acknowledge",
)
def _(peer: Peer) -> None:
    task = peer.task(Resource(), Resource())
    shard = task.shard()
    dice = random.Random(1)
    names = [f"k{n}" for n in range(9)]
    for n in range(12):
        pipelined = n > 0 and dice.random() < 0.5
        if n and not pipelined:
            shard.acknowledged()
        asked = _asked(shard, dice, names)
        if pipelined:
            shard.acknowledged()
        found = shard.flush()
        for binding, keys in asked.items():
            held = task.held(binding)
            expected = {key: held[key] for key in keys if held.get(key) is not None}
            if found.get(binding, {}) != expected:
                raise Failed(
                    f"binding {binding} is {peer.shown(found.get(binding))}, "
                    f"and must be {peer.shown(expected)}"
                )
        for name in dice.sample(names, dice.randrange(4)):
            shard.store(dice.randrange(2), [document(name, f"of {n}", n)])
        shard.start_commit()
        shard.exchange.send(Acknowledge())
    shard.acknowledged()
    shard.verify()


def _asked(shard: Shard, dice: random.Random, names: Sequence[str]) -> Mapping[int, Sequence[str]]:
    """Load some keys, each in its own message."""
    asked: dict[int, list[str]] = {0: [], 1: []}
    if not shard.task.delta(0):
        for name in dice.sample(names, dice.randrange(5)):
            binding, doc = dice.randrange(2), document(name, "")
            shard.load(binding, [doc])
            asked[binding].append(PLAIN.key(doc))
    return asked


@check(
    "open-returns-the-last-checkpoint",
    rule="an endpoint that is authoritative returns in Opened what StartCommit committed, "
    "byte for byte",
    source="protocol, Open",
    patterns=frozenset({Pattern.REMOTE_AUTHORITATIVE}),
    otherwise="the checkpoint is the recovery log's",
)
def _(peer: Peer) -> None:
    task = peer.task()
    for n in range(3):
        shard = task.shard()
        shard.transact(document("a", f"of stream {n}"))
        shard.cancel()
    task.shard().verify()


@check(
    "no-loaded-before-acknowledged",
    rule="Loads that are sent before Acknowledged are answered after it",
    source="protocol, Acknowledge",
    needs=(Need.LOADS,),
)
def _(peer: Peer) -> None:
    task = peer.task()
    docs = [document(f"k{n}", "stored") for n in range(20)]
    shard = task.shard()
    shard.transact(*docs)
    shard.flush()
    shard.store(0, [document("other", "stored")])
    shard.start_commit()
    shard.exchange.send(Acknowledge())
    for doc in docs:
        shard.load(0, [doc])
    # The stream is checked against the table of message order, which rejects early responses.
    shard.acknowledged()
    found = shard.flush().get(0, {})
    if len(found) != len(docs):
        raise Failed(f"{len(found)} of {len(docs)} documents came")
