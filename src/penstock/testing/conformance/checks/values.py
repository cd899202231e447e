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
    rule="a transaction may have any number of documents, in messages of any size",
    source="protocol, Store",
)
def many_documents_are_stored(peer: Peer) -> None:
    docs = [document(f"k{n:06}", f"word {n}", n) for n in range(MANY)]
    sizes = random.Random(0)
    shard = peer.task().shard()
    shard.flush()
    start = 0
    while start < len(docs):
        size = sizes.choice((1, 3, 40, 900))
        shard.store(0, docs[start : start + size])
        start += size
    shard.commit()
    shard.verify()


@check(
    rule="slices may refer to the arena in any order, with gaps and overlaps",
    source="protocol, Store",
)
def slices_in_any_order_are_accepted(peer: Peer) -> None:
    task = peer.task()
    docs = [document(name, "stored", n) for n, name in enumerate(("aa", "b", "aab", "c"))]
    shard = task.shard()
    shard.flush()
    _store_scattered(shard, docs)
    shard.commit()
    shard.verify()
    if task.delta(0):
        return
    layout = shard.task.layout(0)
    keys = [layout.packed_key(doc) for doc in docs]
    arena = b"\xff gap " + b"".join(reversed(keys))
    # The message table does not see raw bytes, so a regular Load is sent first.
    shard.load(0, [document("missing", "")])
    shard.record_load(0, docs)
    shard.exchange.send_bytes(load(0, arena, [_locate(arena, key) for key in keys]), "Load")
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
    for part in sorted({value for column in columns for value in column}, reverse=True):
        if part not in arena:
            arena += part + b"\0gap"
    keys, values, texts = ([_locate(arena, value) for value in column] for column in columns)
    data = store(0, arena, keys, values, texts, [False] * len(docs))
    shard.exchange.send_bytes(data, f"Store of {len(docs)} documents, scattered")
    shard.pending(0, docs)


def _locate(arena: bytes, part: bytes) -> tuple[int, int]:
    begin = arena.index(part)
    return begin, begin + len(part)


@check(
    rule="a document of up to 16 MiB is stored and loaded completely",
    source="protocol, Store",
)
def large_document_is_stored(peer: Peer) -> None:
    text = "large " * (LARGE // 6)
    shard = peer.task().shard()
    shard.transact({**document("large", "stored"), "text": text}, document("small", "stored"))
    shard.verify()


@check(
    rule="keys and values of every kind are preserved",
    source="protocol, Store",
)
def unusual_values_are_preserved(peer: Peer) -> None:
    values = [
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
    shard.transact(*(document(name, name, n) for n, name in enumerate(values)))
    shard.transact({"id": "null", "n": None, "word": None}, {"id": "nothing else"})
    shard.verify()


@check(
    rule="numbers of up to 64 bits are exact",
    source="protocol, Store",
    needs=(Need.LOADS,),
)
def numbers_of_64_bits_are_exact(peer: Peer) -> None:
    layout = Layout(
        ("n",), {"n": "integer", "value": "integer", "yes": "boolean", "part": "number"}
    )
    values = [0, -1, 255, 256, -256, 2**53 + 1, -(2**53) - 1, 2**63 - 1, -(2**63)]
    docs: list[Document] = [{"n": n, "value": -n - 1, "yes": n > 0, "part": n / 3} for n in values]
    docs.append({"n": 7, "value": None, "yes": None, "part": None})
    docs.append({"n": 8})
    shard = peer.task(Resource(layout)).shard()
    shard.transact(*docs)
    shard.verify()


@check(
    rule="a key or a value with a NUL character is preserved or rejected, never altered",
    source="protocol, Store",
    needs=(Need.LOADS,),
)
def nul_character_is_preserved_or_rejected(peer: Peer) -> None:
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
            peer.note("a NUL character is rejected")
    task.shard().verify()
