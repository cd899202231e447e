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
    rule="Opened is the response to Open, and the first response of a stream",
    source="protocol, Open",
)
def open_returns_opened_first(peer: Peer) -> None:
    task = peer.task()
    exchange = peer.exchange()
    exchange.send(Open(task.spec, task.version, WHOLE))
    exchange.expect(Opened)


@check(
    rule="a stream has exactly one Opened",
    source="protocol, Open",
)
def stream_has_one_opened(peer: Peer) -> None:
    shard = peer.task().shard()
    for n in range(3):
        shard.transact(document("a", f"of transaction {n}"))
    shard.exchange.end()
    shard.exchange.expect_end()


@check(
    rule="every transaction begins with Acknowledged, including the first",
    source="protocol, Acknowledge",
)
def first_transaction_is_acknowledged(peer: Peer) -> None:
    task = peer.task()
    exchange = peer.exchange()
    exchange.send(Open(task.spec, task.version, WHOLE))
    exchange.expect(Opened)
    exchange.send(Acknowledge())
    exchange.expect(Acknowledged, "the first Acknowledged")


@check(
    rule="if the runtime ends the stream between transactions, the connector ends it without "
    "an error",
    source="protocol, Acknowledge",
)
def end_of_idle_stream_is_no_error(peer: Peer) -> None:
    shard = peer.task().shard()
    shard.transact(document("a", "stored"))
    shard.exchange.end()
    shard.exchange.expect_end()


@check(
    rule="a transaction without loads and stores commits its checkpoint",
    source="protocol, StartCommit",
)
def empty_transaction_commits_checkpoint(peer: Peer) -> None:
    task = peer.task()
    shard = task.shard()
    for _ in range(3):
        shard.transact()
    shard.cancel()
    # Opened is compared with the last checkpoint.
    task.shard().transact()


@check(
    rule="the response to Flush is Flushed, also without a Load",
    source="protocol, Flush",
)
def flush_without_loads_returns_flushed(peer: Peer) -> None:
    shard = peer.task().shard()
    shard.exchange.send(Flush())
    if loaded := shard.flushed():
        raise Failed(f"received documents that no Load requested: {loaded}")


@check(
    rule="a stream has any number of transactions, and each transaction sees the earlier ones",
    source="protocol, StartCommit",
)
def transactions_see_earlier_transactions(peer: Peer) -> None:
    task = peer.task()
    shard = task.shard()
    for n in range(5):
        shard.transact(document("same", f"of transaction {n}", n), document(f"own {n}", "once", n))
        if not task.delta(0):
            shard.verify()
    shard.cancel()
    task.shard().verify()


@check(
    rule="Loads and Stores may use any number of messages and any order of bindings, also "
    "during the previous commit",
    source="protocol, Acknowledge",
)
def valid_message_orders_are_accepted(peer: Peer) -> None:
    task = peer.task(Resource(), Resource())
    shard = task.shard()
    rng = random.Random(1)
    names = [f"k{n}" for n in range(9)]
    for n in range(12):
        pipelined = n > 0 and rng.random() < 0.5
        if n and not pipelined:
            shard.acknowledged()
        requested = _load_some(shard, rng, names)
        if pipelined:
            shard.acknowledged()
        loaded = shard.flush()
        for binding, keys in requested.items():
            held = task.held(binding)
            expected = {key: held[key] for key in keys if held.get(key) is not None}
            if loaded.get(binding, {}) != expected:
                raise Failed(
                    f"binding {binding} is {peer.render(loaded.get(binding))}, "
                    f"and must be {peer.render(expected)}"
                )
        for name in rng.sample(names, rng.randrange(4)):
            shard.store(rng.randrange(2), [document(name, f"of {n}", n)])
        shard.start_commit()
        shard.exchange.send(Acknowledge())
    shard.acknowledged()
    shard.verify()


def _load_some(
    shard: Shard, rng: random.Random, names: Sequence[str]
) -> Mapping[int, Sequence[str]]:
    """Load some keys, each in its own message."""
    requested: dict[int, list[str]] = {0: [], 1: []}
    if not shard.task.delta(0):
        for name in rng.sample(names, rng.randrange(5)):
            binding, doc = rng.randrange(2), document(name, "")
            shard.load(binding, [doc])
            requested[binding].append(PLAIN.key(doc))
    return requested


@check(
    rule="an authoritative endpoint returns in Opened the exact checkpoint of the last StartCommit",
    source="protocol, Open",
    patterns=frozenset({Pattern.REMOTE_AUTHORITATIVE}),
    otherwise="the recovery log stores the checkpoint",
)
def open_returns_last_checkpoint(peer: Peer) -> None:
    task = peer.task()
    for n in range(3):
        shard = task.shard()
        shard.transact(document("a", f"of stream {n}"))
        shard.cancel()
    task.shard().verify()


@check(
    rule="responses to Loads that precede Acknowledged follow Acknowledged",
    source="protocol, Acknowledge",
    needs=(Need.LOADS,),
)
def loaded_follows_acknowledged(peer: Peer) -> None:
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
    loaded = shard.flush().get(0, {})
    if len(loaded) != len(docs):
        raise Failed(f"received {len(loaded)} of {len(docs)} documents")
