"""What a runtime says to the toy, step by step."""

import threading

import pyarrow as pa

from penstock.materialize import Connection, Stream
from penstock.protocol.key_range import WHOLE
from penstock.protocol.messages import (
    Acknowledge,
    Acknowledged,
    Flush,
    Flushed,
    Open,
    Opened,
    StartCommit,
    StartedCommit,
    Store,
)
from tests.sdk.toy import docs, keys, spec

PATIENCE_S = 30


def opened(connection: Connection, key_range=WHOLE, version="v", names=(), **options) -> Stream:
    stream = connection.transactions()
    stream.send(Open(spec(*names, **options), version, key_range))
    assert isinstance(stream.receive(), Opened)
    return stream


def ready(connection: Connection, **options) -> Stream:
    stream = opened(connection, **options)
    stream.send(Acknowledge())
    assert stream.receive() == Acknowledged()
    return stream


def store(*ids: int, binding: int = 0) -> Store:
    none = pa.array([b""] * len(ids), pa.binary())
    found = docs(*({"id": each} for each in ids))
    return Store(binding, keys(*ids), none, found, pa.array([False] * len(ids)))


def committed(stream: Stream, *stores: Store, checkpoint: bytes = b"cp") -> StartedCommit:
    stream.send(Flush())
    assert stream.receive() == Flushed()
    for each in stores:
        stream.send(each)
    stream.send(StartCommit(checkpoint))
    found = stream.receive()
    assert isinstance(found, StartedCommit)
    return found


def drained(stream: Stream) -> None:
    while stream.receive() is not None:
        pass


def until(condition) -> None:
    waited = threading.Event()
    for _ in range(PATIENCE_S * 100):
        if condition():
            return
        waited.wait(0.01)
    raise AssertionError("it did not come")
