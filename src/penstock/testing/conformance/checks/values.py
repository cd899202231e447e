"""Documents in large numbers, of large size, or with unusual values."""

import random
from collections.abc import Sequence
from typing import Final

from penstock.materialize.errors import ConnectorError, ConnectorUnreachable
from penstock.testing.conformance.check import Need, check
from penstock.testing.conformance.documents import Document, Layout, document, encoded
from penstock.testing.conformance.peer import Peer
from penstock.testing.conformance.raw_messages import load, store
from penstock.testing.conformance.shard import Shard
from penstock.testing.conformance.task import Resource

__all__: list[str] = []

MANY: Final = 3_000
LARGE: Final = (16 << 20) - 1_024
"""Size limit of a document, less some space for its other fields."""


@check(
    "many-documents",
    rule="a transaction may have any number of documents, in messages of any size",
    source="protocol, Store",
)
def _(peer: Peer) -> None:
    docs = [document(f"k{n:06}", f"word {n}", n) for n in range(MANY)]
    sizes = random.Random(0)
    shard = peer.task().shard()
    shard.flush()
    at = 0
    while at < len(docs):
        size = sizes.choice((1, 3, 40, 900))
        shard.store(0, docs[at : at + size])
        at += size
    shard.commit()
    shard.verify()


@check(
    "slices-in-any-order",
    rule="slices may point into the arena in any order, leave gaps, and overlap",
    source="protocol, Store",
)
def _(peer: Peer) -> None:
    task = peer.task()
    docs = [document(name, "stored", n) for n, name in enumerate(("aa", "b", "aab", "c"))]
    shard = task.shard()
    shard.flush()
    _store_scattered(shard, docs)
    shard.commit()
    shard.verify()
    if task.delta(0):
        return
    key = shard.task.layout(0).packed_key
    keys = [key(doc) for doc in docs]
    arena = b"\xff gap " + b"".join(reversed(keys))
    # The message table does not see raw bytes, so a regular Load is sent first.
    shard.load(0, [document("missing", "")])
    shard.asked(0, docs)
    shard.exchange.send_bytes(load(0, arena, [_found(arena, each) for each in keys]), "Load")
    shard.compare(0, shard.flush().get(0, {}))


def _store_scattered(shard: Shard, docs: Sequence[Document]) -> None:
    """Store all documents in one arena, in reverse order, with equal values stored once."""
    layout = shard.task.layout(0)
    names = shard.task.spec.bindings[0].field_selection.values
    columns = [
        layout.packed_keys(docs).to_pylist(),
        layout.packed_values(docs, names).to_pylist(),
        encoded(docs).to_pylist(),
    ]
    arena = b"gap"
    for part in sorted({each for column in columns for each in column}, reverse=True):
        if part not in arena:
            arena += part + b"\0gap"
    keys, values, texts = ([_found(arena, each) for each in column] for column in columns)
    data = store(0, arena, keys, values, texts, [False] * len(docs))
    shard.exchange.send_bytes(data, f"Store of {len(docs)} documents, scattered")
    shard.pending(0, docs)


def _found(arena: bytes, part: bytes) -> tuple[int, int]:
    begin = arena.index(part)
    return begin, begin + len(part)


@check(
    "large-document",
    rule="a document may have up to 16 MiB, and comes back whole",
    source="protocol, Store",
)
def _(peer: Peer) -> None:
    text = "large " * (LARGE // 6)
    shard = peer.task().shard()
    shard.transact({**document("large", "stored"), "text": text}, document("small", "stored"))
    shard.verify()


@check(
    "odd-values",
    rule="keys and values of every kind come back as they were",
    source="protocol, Store",
)
def _(peer: Peer) -> None:
    odd = [
        "",
        " ",
        "Ünïcode ✓ 日本 🎉",
        '\'; drop table "x" --',
        "\\",
        "%s {} $1",
        "\n\t\r",
        "k" * 500,
    ]
    shard = peer.task().shard()
    shard.transact(*(document(name, name, n) for n, name in enumerate(odd)))
    shard.transact({"id": "null", "n": None, "word": None}, {"id": "nothing else"})
    shard.verify()


@check(
    "odd-numbers",
    rule="numbers are exact, as far as 64 bits go",
    source="protocol, Store",
    needs=(Need.LOADS,),
)
def _(peer: Peer) -> None:
    layout = Layout(
        ("n",), {"n": "integer", "value": "integer", "yes": "boolean", "part": "number"}
    )
    odd = [0, -1, 255, 256, -256, 2**53 + 1, -(2**53) - 1, 2**63 - 1, -(2**63)]
    docs: list[Document] = [{"n": n, "value": -n - 1, "yes": n > 0, "part": n / 3} for n in odd]
    docs.append({"n": 7, "value": None, "yes": None, "part": None})
    docs.append({"n": 8})
    shard = peer.task(Resource(layout)).shard()
    shard.transact(*docs)
    shard.verify()


@check(
    "nul-is-kept-or-refused",
    rule="a key or a value with a zero character comes back as it was, or is refused; "
    "it never becomes another",
    source="protocol, Store",
    needs=(Need.LOADS,),
)
def _(peer: Peer) -> None:
    task = peer.task()
    shard = task.shard()
    shard.transact(document("a", "stored"))
    docs = [document("a\0b", "key"), document("c", "val\0ue")]
    for doc in docs:
        shard = task.shard()
        try:
            shard.transact(doc)
        except ConnectorUnreachable:
            raise
        except ConnectorError:
            peer.note("a zero character is refused")
    task.shard().verify()
