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
    "load-returns-what-was-stored",
    rule="a loaded document is the one that was stored, as JSON",
    source="protocol, Load",
    needs=(Need.LOADS,),
)
def _(peer: Peer) -> None:
    task = peer.task()
    shard = task.shard()
    nested = {"deep": [1, 2.5, {"er": None}], "empty": {}, "list": [], "yes": True}
    shard.transact({**document("a", "stored", 7), "more": nested}, {"id": "b"})
    shard.verify()


@check(
    "load-missing-key-omitted",
    rule="for a key that is not there no document comes",
    source="protocol, Load",
    needs=(Need.LOADS,),
)
def _(peer: Peer) -> None:
    task = peer.task()
    there, missing = document("there", "stored"), document("missing", "")
    shard = task.shard()
    shard.load(0, [missing])
    _only(peer, shard.flush().get(0, {}), set())
    shard.store(0, [there])
    shard.commit()
    shard.load(0, [missing, there, document("missing, too", "")])
    _only(peer, shard.flush().get(0, {}), {PLAIN.key(there)})


def _only(peer: Peer, found: object, expected: set[str]) -> None:
    if not isinstance(found, dict) or found.keys() != expected:
        raise Failed(f"{peer.shown(found)} came, and only {sorted(expected)} is there")


@check(
    "flushed-after-last-loaded",
    rule="every document has come before Flushed does",
    source="protocol, Flush",
    needs=(Need.LOADS,),
)
def _(peer: Peer) -> None:
    docs = [document(f"k{n:04}", "stored", n) for n in range(600)]
    shard = peer.task().shard()
    shard.transact(*docs)
    for at in range(0, len(docs), 7):
        shard.load(0, docs[at : at + 7])
    found = shard.flush().get(0, {})
    if len(found) != len(docs):
        raise Failed(f"Flushed came when {len(found)} of {len(docs)} documents were there")
    # A late document would arrive before the response to StartCommit.
    shard.commit()


@check(
    "pipelined-loads-see-the-commit",
    rule="Loads that are sent while a commit is under way see what it committed",
    source="protocol, Acknowledge",
    needs=(Need.LOADS,),
)
def _(peer: Peer) -> None:
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
    "load-sees-only-what-is-committed",
    rule="what a transaction has stored is not loaded by another before it commits",
    source="protocol, Load",
    needs=(Need.LOADS,),
    patterns=EXACTLY_ONCE,
    otherwise="what is stored is written through",
)
def _(peer: Peer) -> None:
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
    found = reader.flush().get(0, {})
    if PLAIN.key(document("b", "")) in found:
        raise Failed("a document was loaded that no transaction has committed")
    reader.compare(0, found)
    writer.commit()
    reader.commit()
    reader.verify()


@check(
    "several-bindings",
    rule="each binding has its own documents, though keys are the same",
    source="protocol, Load",
)
def _(peer: Peer) -> None:
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
    "several-key-fields",
    rule="a key may have several fields, of every type that a key can have",
    source="protocol, Load",
    needs=(Need.LOADS,),
)
def _(peer: Peer) -> None:
    layout = Layout(
        ("word", "n", "yes"),
        {"word": "string", "n": "integer", "yes": "boolean", "value": "string"},
    )
    task = peer.task(Resource(layout))
    if task.spec.bindings[0].field_selection.keys != layout.keys:
        raise Skipped("the connector takes no key of several fields")
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
