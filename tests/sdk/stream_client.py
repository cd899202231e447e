"""Client that sends the messages of a runtime to the toy connector."""

import threading

import pyarrow as pa

from penstock.materialize import ConnectorConnection, ConnectorStream
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


def opened(
    connection: ConnectorConnection, key_range=WHOLE, version="v", names=(), **options
) -> ConnectorStream:
    stream = connection.transactions()
    stream.send(Open(spec(*names, **options), version, key_range))
    assert isinstance(stream.receive(), Opened)
    return stream


def ready(connection: ConnectorConnection, **options) -> ConnectorStream:
    stream = opened(connection, **options)
    stream.send(Acknowledge())
    assert stream.receive() == Acknowledged()
    return stream


def store(*ids: int, binding: int = 0) -> Store:
    none = pa.array([b""] * len(ids), pa.binary())
    documents = docs(*({"id": number} for number in ids))
    return Store(binding, keys(*ids), none, documents, pa.array([False] * len(ids)))


def committed(stream: ConnectorStream, *stores: Store, checkpoint: bytes = b"cp") -> StartedCommit:
    stream.send(Flush())
    assert stream.receive() == Flushed()
    for message in stores:
        stream.send(message)
    stream.send(StartCommit(checkpoint))
    response = stream.receive()
    assert isinstance(response, StartedCommit)
    return response


def drained(stream: ConnectorStream) -> None:
    while stream.receive() is not None:
        pass


def until(condition) -> None:
    waited = threading.Event()
    for _ in range(PATIENCE_S * 100):
        if condition():
            return
        waited.wait(0.01)
    raise AssertionError("condition did not become true")
