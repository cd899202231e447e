"""Lifecycle vectors of tests/vectors/flow.json, executed over gRPC."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock.materialize import ConnectorConnection, ConnectorStream, connect
from penstock.materialize.errors import ConnectorError, ConnectorRefused
from penstock.protocol.errors import LocalProtocolError, RemoteProtocolError
from penstock.protocol.key_range import WHOLE
from penstock.protocol.messages import (
    Acknowledge,
    Acknowledged,
    Flush,
    Flushed,
    Kind,
    Load,
    Open,
    Opened,
    StartCommit,
    StartedCommit,
    Store,
)
from penstock.protocol.transaction import Role, Transaction
from penstock.sdk import serve
from tests.protocol.vectors import cases
from tests.sdk.toy import Toy, ToyTransactor, docs, keys, spec

CASES = {case["id"]: case for case in cases("lifecycle")}
TESTED = {"life-02", "life-06", "life-07", "life-08", "life-09", "life-11"}
ELSEWHERE = {
    "life-10": "in tests/protocol/test_transaction.py, walked from both ends",
    "life-12": "in tests/materialize/test_exists_flag.py, by a connector that watches",
    "life-13": "in tests/materialize/test_spill.py, key_not_requested; so does the suite",
}


def test_every_lifecycle_vector_has_a_test() -> None:
    assert CASES.keys() == TESTED | ELSEWHERE.keys()


def outcome(name: str) -> str:
    return str(CASES[name]["expect"]["outcome"])


@pytest.fixture
def toy() -> Toy:
    return Toy()


@pytest.fixture
def connection(toy: Toy, tmp_path: Path) -> Iterator[ConnectorConnection]:
    with serve(toy, f"unix:{tmp_path}/toy.sock") as server, connect(server.address) as line:
        yield line


def opened(connection: ConnectorConnection, *, delta: bool = False) -> ConnectorStream:
    stream = connection.transactions()
    stream.send(Open(spec(delta=delta), "v", WHOLE))
    assert isinstance(stream.receive(), Opened)
    stream.send(Acknowledge())
    return stream


def ready(connection: ConnectorConnection, *, delta: bool = False) -> ConnectorStream:
    stream = opened(connection, delta=delta)
    assert stream.receive() == Acknowledged()
    return stream


def store(*ids: int) -> Store:
    none = pa.array([b""] * len(ids), pa.binary())
    found = docs(*({"id": each} for each in ids))
    return Store(0, keys(*ids), none, found, pa.array([False] * len(ids)))


class FullDisk(ToyTransactor):
    def store(self, documents: Iterator[Any]) -> None:
        next(documents)
        raise OSError("the disk is full")


def test_life_02_failed_store_is_reported_instead_of_started_commit(
    toy: Toy, connection: ConnectorConnection
) -> None:
    assert outcome("life-02").endswith("transactor.Store: <err>")
    toy.transactor = FullDisk
    stream = ready(connection)
    stream.send(Flush())
    assert stream.receive() == Flushed()

    def commit() -> None:
        stream.send(store(1))
        stream.send(StartCommit(b"cp"))
        stream.receive()

    with pytest.raises(ConnectorError, match="the disk is full"):
        commit()
    assert toy.checkpoint == b""


def test_life_06_stream_end_between_transactions_closes_cleanly(
    toy: Toy, connection: ConnectorConnection
) -> None:
    assert outcome("life-06") == "driver sees EOF and exits cleanly"
    stream = ready(connection)
    stream.end()
    assert stream.receive() is None
    assert toy.events[-1] == "close 1"


def test_life_07_stream_end_after_load_is_rejected(connection: ConnectorConnection) -> None:
    said = outcome("life-07").removeprefix("driver error: ")
    assert said.startswith("unexpected EOF")
    stream = ready(connection)
    stream.send(Load(0, keys(1)))
    stream.end()
    with pytest.raises(ConnectorRefused, match="unexpected EOF"):
        stream.receive()


def test_life_08_loaded_before_acknowledged_raises_remote_protocol_error() -> None:
    assert outcome("life-08") == "protocol error"
    where = Transaction(Role.RUNTIME).after_sending(Kind.OPEN).after_receiving(Kind.OPENED)
    where = where.after_sending(Kind.ACKNOWLEDGE).after_sending(Kind.LOAD)
    with pytest.raises(RemoteProtocolError, match="Loaded was sent after Opened"):
        where.after_receiving(Kind.LOADED)


def test_life_09_flush_before_acknowledged_raises_local_protocol_error(
    connection: ConnectorConnection,
) -> None:
    assert outcome("life-09").startswith("protocol violation")
    stream = opened(connection)
    with pytest.raises(LocalProtocolError, match="Flush may not be sent before Acknowledged"):
        stream.send(Flush())
    assert stream.receive() == Acknowledged()
    stream.send(Flush())
    assert stream.receive() == Flushed()


def test_life_11_delta_binding_accepts_flush_and_rejects_load(
    toy: Toy, connection: ConnectorConnection
) -> None:
    expected = CASES["life-11"]["expect"]
    stream = ready(connection, delta=True)
    stream.send(Flush())
    assert expected["flush_sent"]
    assert stream.receive() == Flushed()
    for each in range(expected["stores_sent"]):
        stream.send(store(each))
    stream.send(StartCommit(b"cp"))
    assert isinstance(stream.receive(), StartedCommit)
    assert len(toy.rows["things"]) == expected["stores_sent"]

    assert expected["loads_sent"] == 0
    stream.send(Acknowledge())
    assert stream.receive() == Acknowledged()
    stream.send(Load(0, keys(1)))
    with pytest.raises(ConnectorRefused, match="delta updates"):
        stream.receive()
