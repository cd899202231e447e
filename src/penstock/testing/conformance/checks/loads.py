"""Results of Load."""

from penstock.protocol.key_range import WHOLE
from penstock.protocol.messages import Acknowledge
from penstock.testing.conformance.check import Failed, Need, Skipped, check
from penstock.testing.conformance.config import EXACTLY_ONCE
from penstock.testing.conformance.documents import PLAIN, Layout, document
from penstock.testing.conformance.peer import Peer
from penstock.testing.conformance.task import Resource

__all__: list[str] = []


@check(
    rule="Load returns the stored document as JSON",
    source="protocol, Load",
    needs=(Need.LOADS,),
)
def load_returns_stored_document(peer: Peer) -> None:
    task = peer.task()
    shard = task.shard()
    nested = {"deep": [1, 2.5, {"er": None}], "empty": {}, "list": [], "yes": True}
    shard.transact({**document("a", "stored", 7), "more": nested}, {"id": "b"})
    shard.verify()


@check(
    rule="Load returns no document for a missing key",
    source="protocol, Load",
    needs=(Need.LOADS,),
)
def load_of_missing_key_returns_nothing(peer: Peer) -> None:
    task = peer.task()
    stored, missing = document("stored", "stored"), document("missing", "")
    shard = task.shard()
    shard.load(0, [missing])
    _check_keys(peer, shard.flush().get(0, {}), set())
    shard.store(0, [stored])
    shard.commit()
    shard.load(0, [missing, stored, document("missing, too", "")])
    _check_keys(peer, shard.flush().get(0, {}), {PLAIN.key(stored)})


def _check_keys(peer: Peer, loaded: object, expected: set[str]) -> None:
    if not isinstance(loaded, dict) or loaded.keys() != expected:
        raise Failed(f"received {peer.render(loaded)}, and only {sorted(expected)} exists")


@check(
    rule="every Loaded precedes Flushed",
    source="protocol, Flush",
    needs=(Need.LOADS,),
)
def flushed_follows_last_loaded(peer: Peer) -> None:
    docs = [document(f"k{n:04}", "stored", n) for n in range(600)]
    shard = peer.task().shard()
    shard.transact(*docs)
    for start in range(0, len(docs), 7):
        shard.load(0, docs[start : start + 7])
    loaded = shard.flush().get(0, {})
    if len(loaded) != len(docs):
        raise Failed(f"received Flushed after {len(loaded)} of {len(docs)} documents")
    # A late document would arrive before the response to StartCommit.
    shard.commit()


@check(
    rule="Loads that are sent during a commit see the committed documents",
    source="protocol, Acknowledge",
    needs=(Need.LOADS,),
)
def pipelined_load_returns_committed_document(peer: Peer) -> None:
    task = peer.task()
    shard = task.shard()
    shard.transact(document("a", "older"), document("b", "older"))
    shard.flush()
    shard.store(0, [document("a", "newer"), document("c", "newer")])
    shard.start_commit()
    shard.exchange.send(Acknowledge())
    shard.load(0, [document(name, "") for name in "abc"])
    shard.acknowledged()
    shard.compare(0, shard.flush().get(0, {}))


@check(
    rule="a transaction does not load uncommitted documents of another one",
    source="protocol, Load",
    needs=(Need.LOADS,),
    patterns=EXACTLY_ONCE,
    otherwise="stores are written through",
)
def load_omits_uncommitted_documents(peer: Peer) -> None:
    task = peer.task()
    shard = task.shard()
    shard.transact(document("a", "committed"))
    shard.cancel()
    left, right = WHOLE.split()
    writer, reader = task.part(left), task.part(right)
    writer.flush()
    writer.store(0, [document("a", "not committed"), document("b", "not committed")])
    peer.pause()
    reader.load(0, [document("a", ""), document("b", "")])
    loaded = reader.flush().get(0, {})
    if PLAIN.key(document("b", "")) in loaded:
        raise Failed("Load returned a document that no transaction has committed")
    reader.compare(0, loaded)
    writer.commit()
    reader.commit()
    reader.verify()


@check(
    rule="bindings have separate documents, even with equal keys",
    source="protocol, Load",
)
def bindings_have_separate_documents(peer: Peer) -> None:
    task = peer.task(*[Resource()] * 3)
    shard = task.shard()
    for n in range(2):
        shard.flush()
        for binding in (2, 0, 1):
            shard.store(binding, [document("same", f"of {binding} in {n}", n)])
        for binding in (0, 2):
            shard.store(binding, [document(f"own of {binding}", f"in {n}", n)])
        shard.commit()
    shard.verify()


@check(
    rule="a key may have several fields, of every key type",
    source="protocol, Load",
    needs=(Need.LOADS,),
)
def key_of_several_fields_is_accepted(peer: Peer) -> None:
    layout = Layout(
        ("word", "n", "yes"),
        {"word": "string", "n": "integer", "yes": "boolean", "value": "string"},
    )
    task = peer.task(Resource(layout))
    if task.spec.bindings[0].field_selection.keys != layout.keys:
        raise Skipped("the connector does not accept a key of several fields")
    docs = [
        {"word": word, "n": n, "yes": yes, "value": f"{word}{n}{yes}"}
        for word in ("a", "ab", "b")
        for n in (-1, 0, 1, 11)
        for yes in (True, False)
    ]
    shard = task.shard()
    shard.transact(*docs)
    shard.transact(*({**doc, "value": "newer"} for doc in docs[::3]))
    shard.verify()
