"""A connector of the older protocol generation, with Prepare and Commit."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pyarrow as pa
import pytest

from penstock.materialize import ConnectorConnection, Generation, connect
from penstock.materialize.errors import ConnectorRefused
from penstock.protocol._generated import flow_pb2, materialize_pb2
from penstock.protocol.errors import LocalProtocolError
from penstock.protocol.key_range import WHOLE
from penstock.protocol.messages import (
    Acknowledge,
    Acknowledged,
    Apply,
    Flush,
    Flushed,
    Load,
    Loaded,
    Open,
    Opened,
    StartCommit,
    StartedCommit,
    StateUpdate,
    Store,
)
from tests.sdk.toy import docs, keys, spec


class Older(grpc.GenericRpcHandler):
    """A connector with the protocol of 2021: Apply; Prepare, Prepared; Commit, Committed."""

    def __init__(self) -> None:
        self.rows: dict[bytes, bytes] = {}
        self.checkpoint = b""
        self.heard: list[str] = []

    def service(self, call):
        match call.method.removeprefix("/materialize.Driver/"):
            case "Apply":
                answer = materialize_pb2.ApplyResponse(action_description="made")
                return grpc.unary_unary_rpc_method_handler(
                    lambda _data, _context: answer.SerializeToString()
                )
            case "Transactions":
                return grpc.stream_stream_rpc_method_handler(self.transactions)
            case _:
                return None

    def transactions(self, requests: Iterator[bytes], _context) -> Iterator[bytes]:
        staged: dict[bytes, bytes] = {}
        prepared = b""
        for data in requests:
            number, body = data[0] >> 3, data
            message = materialize_pb2.TransactionRequest.FromString(body)
            self.heard.append(["", "open", "load", "prepare", "store", "commit", "6"][number])
            match number:
                case 1:
                    opened = materialize_pb2.TransactionResponse()
                    opened.opened.runtime_checkpoint = self.checkpoint
                    yield opened.SerializeToString()
                case 2:
                    load = message.load
                    loaded = materialize_pb2.TransactionResponse()
                    for each in load.packed_keys:
                        found = self.rows.get(load.arena[each.begin : each.end])
                        if found is not None:
                            begin = len(loaded.loaded.arena)
                            loaded.loaded.arena += found
                            loaded.loaded.docs_json.add(begin=begin, end=begin + len(found))
                    if loaded.loaded.docs_json:
                        yield loaded.SerializeToString()
                case 3:
                    # Prepare { bytes flow_checkpoint = 1; }, parsed as a message of the same shape.
                    shape = materialize_pb2.TransactionRequest.StartCommit
                    prepared = shape.FromString(body[2:]).runtime_checkpoint
                    state = flow_pb2.DriverCheckpoint(driver_checkpoint_json=b'{"file":1}')
                    inner = state.SerializeToString()
                    yield bytes([3 << 3 | 2, len(inner)]) + inner
                case 4:
                    store = message.store
                    for key, doc in zip(store.packed_keys, store.docs_json, strict=True):
                        staged[store.arena[key.begin : key.end]] = store.arena[doc.begin : doc.end]
                case 5:
                    assert body[1] == 0, "Commit says nothing"
                    self.rows |= staged
                    staged, self.checkpoint = {}, prepared
                    yield bytes([4 << 3 | 2, 0])
                case _:
                    raise AssertionError(f"an older connector was sent field {number}")


@pytest.fixture
def older(tmp_path: Path) -> Iterator[tuple[Older, ConnectorConnection]]:
    handler = Older()
    server = grpc.server(ThreadPoolExecutor(4), handlers=[handler])
    server.add_insecure_port(f"unix:{tmp_path}/older.sock")
    server.start()
    with connect(f"unix:{tmp_path}/older.sock") as connection:
        yield handler, connection
    server.stop(0).wait()


def test_apply_detects_connector_of_prepare_generation(older):
    _, connection = older
    assert connection.generation is Generation.START_COMMIT
    assert connection.apply(Apply(spec(), "v")).action_description == "made"
    assert connection.generation is Generation.PREPARE
    with pytest.raises(ConnectorRefused):
        connection.spec()


def test_transactions_with_prepare_generation_connector_use_prepare_and_commit(older):
    handler, connection = older
    connection.apply(Apply(spec(), "v"))
    stream = connection.transactions()
    stream.send(Open(spec(), "v", WHOLE))
    assert stream.receive() == Opened()
    none = pa.array([b""], pa.binary())
    for number, doc in enumerate(({"id": 1, "n": 1}, {"id": 1, "n": 2})):
        stream.send(Acknowledge())
        assert stream.receive() == Acknowledged()
        stream.send(Load(0, keys(1)))
        if number:
            assert stream.receive() == Loaded(0, docs({"id": 1, "n": 1}))
        stream.send(Flush(f"checkpoint {number}".encode()))
        assert stream.receive() == Flushed(StateUpdate(b'{"file":1}'))
        stream.send(Store(0, keys(1), none, docs(doc), pa.array([bool(number)])))
        stream.send(StartCommit(f"checkpoint {number}".encode()))
        with pytest.raises(LocalProtocolError):
            stream.send(Load(0, keys(1)))  # A commit is pending.
        assert stream.receive() == StartedCommit()
    assert handler.checkpoint == b"checkpoint 1"
    assert list(handler.rows.values()) == docs({"id": 1, "n": 2}).to_pylist()
    one = ["load", "prepare", "store", "commit"]
    assert handler.heard == ["open", *one, *one]
    stream.cancel()
