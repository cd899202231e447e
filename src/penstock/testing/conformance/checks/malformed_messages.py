"""Invalid messages, and messages in an invalid order.

Each must end its stream with an error status and have no other effect. Committed documents stay,
documents of the invalid message are not stored, and the connector continues to serve.
"""

import contextlib
import enum
from collections.abc import Callable
from typing import Final

import pyarrow as pa

from penstock.materialize.errors import ConnectorError
from penstock.protocol.key_range import WHOLE
from penstock.protocol.messages import (
    Acknowledge,
    Acknowledged,
    Flush,
    Flushed,
    Load,
    Open,
    Opened,
    StartCommit,
    Store,
)
from penstock.protocol.wire import encode, encode_request
from penstock.testing.conformance import raw_messages as raw
from penstock.testing.conformance.check import Need, Skipped, check
from penstock.testing.conformance.documents import PLAIN, Document, document, encoded
from penstock.testing.conformance.exchange import Exchange
from penstock.testing.conformance.peer import Peer
from penstock.testing.conformance.task import Task

__all__: list[str] = []

LATE: Document = document("z", "of a broken message")


class Phase(enum.IntEnum):
    """Progress of a stream before the message is sent."""

    NEW = 0
    OPENED = 1
    LOADING = 2
    STORING = 3


Send = Callable[[Exchange, Task], None]


def _to(phase: Phase, exchange: Exchange, task: Task) -> None:
    if phase >= Phase.OPENED:
        exchange.send(_open(task))
        exchange.expect(Opened)
    if phase >= Phase.LOADING:
        exchange.send(Acknowledge())
        exchange.expect(Acknowledged)
    if phase >= Phase.STORING:
        exchange.send(Flush())
        exchange.expect(Flushed)


def _open(task: Task) -> Open:
    state = task.log(WHOLE).state.json or b"{}"
    return Open(task.spec, task.version, WHOLE, state)


def _check_rejected(peer: Peer, phase: Phase, subject: str, send: Send) -> None:
    """Send a message in this phase, and check that an error is its only effect."""
    task = peer.task()
    shard = task.shard()
    shard.transact(document("a", "committed"))
    shard.cancel()
    exchange = peer.exchange(checked=False)
    _to(phase, exchange, task)
    with contextlib.suppress(ConnectorError):  # The stream may end before all of it is sent.
        send(exchange, task)
    exchange.expect_rejection(subject)
    peer.connectors.serves()
    shard = task.shard()
    try:
        shard.verify()
        if subject not in _AFTER_A_STORE or peer.exact:
            shard.absent(0, LATE)
    except Skipped as skipped:
        peer.note(f"the result at the endpoint was not inspected: {skipped}")


_END_AFTER_STORE: Final = "the end of the stream after a Store"
_WITHOUT_CHECKPOINT: Final = "StartCommit without a runtime_checkpoint"
_AFTER_A_STORE: Final = (_END_AFTER_STORE, _WITHOUT_CHECKPOINT)
"""Messages after a valid Store, which a non-transactional endpoint may have written already."""


def _add_check(
    name: str, phase: Phase, subject: str, send: Send, needs: tuple[Need, ...] = ()
) -> None:
    @check(
        rule=f"{subject} ends the stream with an error, and changes nothing",
        source=f"protocol, {_section(name)}",
        needs=needs,
        name=f"{name}-is-rejected",
    )
    def _(peer: Peer) -> None:
        _check_rejected(peer, phase, subject, send)


def _section(name: str) -> str:
    """Return the section of the rule that the message violates."""
    words = {
        "open": "Open",
        "load": "Load",
        "flush": "Flush",
        "store": "Store",
        "start": "StartCommit",
        "acknowledge": "Acknowledge",
    }
    return next((words[part] for part in name.split("-") if part in words), "Messages")


def _bytes(data: bytes, description: str) -> Send:
    return lambda exchange, _task: exchange.send_bytes(data, description)


def _store(task: Task, binding: int = 0) -> Store:
    names = task.spec.bindings[0].field_selection.values
    return Store(
        binding,
        PLAIN.packed_keys([LATE]),
        PLAIN.packed_values([LATE], names),
        encoded([LATE]),
        pa.array([False], pa.bool_()),
    )


def _stores_with(exchange: Exchange, task: Task, kind: str) -> None:
    """Send a Store with one error."""
    good = _store(task)
    parts = [
        column.to_pylist()[0] for column in (good.packed_keys, good.packed_values, good.docs_json)
    ]
    arena = b"".join(parts)
    ends = [len(parts[0]), len(parts[0]) + len(parts[1]), len(arena)]
    key, value, doc = (0, ends[0]), (ends[0], ends[1]), (ends[1], ends[2])
    data = {
        "lists": lambda: raw.store(0, arena, [key], [value], [doc, doc], [False]),
        "exists": lambda: raw.store(0, arena, [key], [value], [doc], []),
        "arena": lambda: raw.store(0, arena, [key], [value], [(ends[1], ends[2] + 9)], [False]),
        "deletes": lambda: raw.store(0, arena, [key], [value], [doc], [False], [False, True]),
        "nothing": lambda: raw.store(0, b"", [], [], [], []),
    }[kind]()
    exchange.send_bytes(data, f"Store with wrong {kind}")
    exchange.send_bytes(encode_request(StartCommit(task.next_checkpoint())), "StartCommit")


def _stores(kind: str) -> Send:
    return lambda exchange, task: _stores_with(exchange, task, kind)


def _commits_early(exchange: Exchange, task: Task) -> None:
    exchange.send(StartCommit(task.next_checkpoint()))


def _commits_without_checkpoint(exchange: Exchange, task: Task) -> None:
    exchange.send(_store(task))
    exchange.send_bytes(raw.message(raw.START_COMMIT), "StartCommit without a checkpoint")


def _stores_early(exchange: Exchange, task: Task) -> None:
    exchange.send(_store(task))
    exchange.send(StartCommit(task.next_checkpoint()))


def _stores_to_missing_binding(exchange: Exchange, task: Task) -> None:
    exchange.send(_store(task, binding=9))
    exchange.send(StartCommit(task.next_checkpoint()))


def _loads(exchange: Exchange, _task: Task) -> None:
    exchange.send(Load(0, PLAIN.packed_keys([LATE])))


def _loads_missing_binding(exchange: Exchange, _task: Task) -> None:
    exchange.send(Load(9, PLAIN.packed_keys([LATE])))
    exchange.send(Flush())


def _loads_and_ends(exchange: Exchange, task: Task) -> None:
    _loads(exchange, task)
    exchange.end()


def _stores_and_ends(exchange: Exchange, task: Task) -> None:
    exchange.send(_store(task))
    exchange.end()


def _opens_again(exchange: Exchange, task: Task) -> None:
    exchange.send(_open(task))


def _opens_without_version(exchange: Exchange, task: Task) -> None:
    data = raw.open_request(encode(task.spec), "", WHOLE.begin, WHOLE.end)
    exchange.send_bytes(data, "Open without a version")


def _opens_backwards(exchange: Exchange, task: Task) -> None:
    data = raw.open_request(encode(task.spec), task.version, 9, 3)
    exchange.send_bytes(data, "Open of keys from 9 to 3")


def _loads_outside(exchange: Exchange, _task: Task) -> None:
    exchange.send_bytes(raw.load(0, b"\x02key\x00", [(0, 50)]), "Load of a slice beyond the arena")
    exchange.send(Flush())


def _loads_backwards(exchange: Exchange, _task: Task) -> None:
    exchange.send_bytes(raw.load(0, b"\x02key\x00", [(5, 0)]), "Load of a slice from 5 to 0")
    exchange.send(Flush())


def _loads_nothing(exchange: Exchange, _task: Task) -> None:
    exchange.send_bytes(raw.load(0, b"", []), "Load without keys")
    exchange.send(Flush())


_BOTH = raw.message(raw.FLUSH) + raw.message(raw.ACKNOWLEDGE)

_add_check("empty-request", Phase.LOADING, "an empty request", _bytes(b"", "nothing"))
_add_check(
    "garbage",
    Phase.LOADING,
    "a request that is not a message",
    _bytes(b"\xff\xff\xff", "three bytes"),
)
_add_check(
    "request-with-two-fields",
    Phase.LOADING,
    "a request with two fields",
    _bytes(_BOTH, "Flush, Acknowledge"),
)
_add_check(
    "first-message-other-than-open",
    Phase.NEW,
    "a stream that does not begin with Open",
    lambda exchange, _task: exchange.send(Acknowledge()),
)
_add_check("open-without-version", Phase.NEW, "Open without a version", _opens_without_version)
_add_check("open-with-reversed-range", Phase.NEW, "Open with a reversed range", _opens_backwards)
_add_check("second-open", Phase.LOADING, "a second Open", _opens_again)
_add_check(
    "flush-before-acknowledge",
    Phase.OPENED,
    "Flush without an Acknowledge",
    lambda exchange, _task: exchange.send(Flush()),
)
_add_check(
    "second-acknowledge",
    Phase.LOADING,
    "a second Acknowledge",
    lambda exchange, _task: exchange.send(Acknowledge()),
)
_add_check("store-before-flush", Phase.LOADING, "Store before Flush", _stores_early)
_add_check("start-commit-before-flush", Phase.LOADING, "StartCommit before Flush", _commits_early)
_add_check(
    "start-commit-without-checkpoint",
    Phase.STORING,
    _WITHOUT_CHECKPOINT,
    _commits_without_checkpoint,
)
_add_check("load-after-flush", Phase.STORING, "Load after Flush", _loads, (Need.LOADS,))
_add_check("load-without-keys", Phase.LOADING, "Load without keys", _loads_nothing, (Need.LOADS,))
_add_check(
    "load-outside-arena",
    Phase.LOADING,
    "a Load slice beyond its arena",
    _loads_outside,
    (Need.LOADS,),
)
_add_check(
    "load-with-reversed-slice",
    Phase.LOADING,
    "a Load slice with a reversed range",
    _loads_backwards,
    (Need.LOADS,),
)
_add_check(
    "load-of-missing-binding",
    Phase.LOADING,
    "Load of a missing binding",
    _loads_missing_binding,
    (Need.LOADS,),
)
_add_check(
    "store-with-unequal-lists", Phase.STORING, "Store with one key and two docs", _stores("lists")
)
_add_check("store-without-exists", Phase.STORING, "Store without exists", _stores("exists"))
_add_check("store-without-documents", Phase.STORING, "Store without documents", _stores("nothing"))
_add_check("store-outside-arena", Phase.STORING, "a Store slice beyond its arena", _stores("arena"))
_add_check(
    "store-with-unequal-deletes",
    Phase.STORING,
    "Store with one key and two deletes",
    _stores("deletes"),
    (Need.DELETES,),
)
_add_check(
    "store-to-missing-binding",
    Phase.STORING,
    "Store to a missing binding",
    _stores_to_missing_binding,
)
_add_check(
    "end-after-load",
    Phase.LOADING,
    "the end of the stream after a Load",
    _loads_and_ends,
    (Need.LOADS,),
)
_add_check("end-after-store", Phase.STORING, _END_AFTER_STORE, _stores_and_ends)
