"""The server of the SDK: order, threads, cancellation, contract checks."""

import base64
import json
import socket
import threading
import traceback
from dataclasses import replace
from pathlib import Path

import grpc
import pyarrow as pa
import pytest

from penstock.errors import Fenced, UsageError
from penstock.materialize import connect
from penstock.materialize.errors import ConnectorError, ConnectorRefused, ConnectorUnreachable
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
    StateUpdate,
    Store,
    Validate,
    ValidateBinding,
)
from penstock.protocol.specs import CollectionSpec
from penstock.protocol.transport_security import Security
from penstock.protocol.wire import encode_request
from penstock.sdk import LoadedDocuments, Refused, ValidatedBinding, serve
from tests.certificates import authority, certificate
from tests.sdk.stream_client import (
    PATIENCE_S,
    committed,
    drained,
    opened,
    ready,
    store,
    until,
)
from tests.sdk.toy import ENDPOINT, LOWER, UPPER, Toy, ToyTransactor, docs, keys, question, spec


def test_transactions_in_sequence_are_committed(toy, connection):
    stream = ready(connection)
    assert committed(stream, store(1, 2)).state == StateUpdate(b'{"commits": 1}')
    stream.send(Acknowledge())
    stream.send(Load(0, keys(2, 3)))
    assert stream.receive() == Acknowledged()
    assert stream.receive() == Loaded(0, docs({"id": 2}))
    committed(stream, store(3))
    stream.send(Acknowledge())
    assert stream.receive() == Acknowledged()
    stream.end()
    assert stream.receive() is None
    assert toy.events[-1] == "close 1"
    assert sorted(toy.rows["things"]) == keys(1, 2, 3).to_pylist()
    assert toy.events.count("load 1") == 2
    assert "cancel 1" not in toy.events


def test_loads_are_received_during_acknowledge(toy, connection):
    gate = threading.Event()

    class Slow(ToyTransactor):
        def acknowledge(self) -> None:
            assert gate.wait(PATIENCE_S)
            super().acknowledge()

    toy.transactor = Slow
    stream = opened(connection)
    stream.send(Acknowledge())
    for each in range(200):
        stream.send(Load(0, keys(each)))
    assert "load 1" not in toy.events
    gate.set()
    assert stream.receive() == Acknowledged()
    committed(stream)
    assert toy.events[:3] == ["open 1", "acknowledge 1", "load 1"]


def test_document_of_16_mb_round_trips(toy, connection):
    stream = ready(connection)
    big = {"id": 1, "text": "x" * ((16 << 20) - 40)}
    none = pa.array([b""], pa.binary())
    committed(stream, Store(0, keys(1), none, docs(big), pa.array([False])))
    stream.send(Acknowledge())
    stream.send(Load(0, keys(1)))
    assert stream.receive() == Acknowledged()
    assert stream.receive() == Loaded(0, docs(big))


def test_loaded_documents_are_split_into_messages(toy, connection):
    stream = ready(connection)
    ids = range(300)
    big = docs(*({"id": each, "text": "x" * 20_000} for each in ids))
    none = pa.array([b""] * len(ids), pa.binary())
    committed(stream, Store(0, keys(*ids), none, big, pa.array([False] * len(ids))))
    stream.send(Acknowledge())
    stream.send(Load(0, keys(*ids)))
    stream.send(Load(0, keys(1_000)))
    assert stream.receive() == Acknowledged()
    stream.send(Flush())
    found: list[Loaded] = []
    while isinstance(response := stream.receive(), Loaded):
        found.append(response)
    assert response == Flushed()
    assert len(found) > 3
    assert pa.concat_arrays([each.docs_json for each in found]).equals(big)


# Violations of the contract of the SDK.


class EndsLoad(ToyTransactor):
    def load(self, keys):
        yield from ()


class LoadsOtherThings(ToyTransactor):
    def load(self, keys):
        for _ in keys:
            yield {"a": "document"}


class LoadsTooMuch(ToyTransactor):
    def load(self, keys):
        for batch in keys:
            yield from super().load(iter([batch]))
            found = pa.array([b"{}"] * 2, pa.binary())
            yield LoadedDocuments(batch.binding, found)


class EndsStore(ToyTransactor):
    def store(self, documents):
        next(documents)


class StateIsAList(ToyTransactor):
    def start_commit(self, checkpoint):
        return StateUpdate(b"[1]")


class StateIsADict(ToyTransactor):
    def start_commit(self, checkpoint):
        return {"commits": 1}


class LoadsText(ToyTransactor):
    def load(self, keys):
        for batch in keys:
            yield LoadedDocuments(batch.binding, pa.array(["{}"]))


class LoadsNulls(ToyTransactor):
    def load(self, keys):
        for batch in keys:
            yield LoadedDocuments(batch.binding, pa.array([None], pa.binary()))


class HasNoLoad(ToyTransactor):
    def load(self, keys):
        return super(ToyTransactor, self).load(keys)


class Breaks(ToyTransactor):
    def store(self, documents):
        list(documents)
        raise ValueError("the disk hunter2 is full")


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (EndsLoad, "load returned before the end of its keys"),
        (LoadsOtherThings, "load yielded a dict, not a LoadedDocuments"),
        (LoadsTooMuch, "load yielded more documents of things than were requested"),
        (EndsStore, "store returned before the end of its documents"),
        (StateIsAList, "connector state of start_commit is not a JSON object"),
        (StateIsADict, "start_commit returned a dict"),
        (LoadsText, "load yielded documents of things that are not a column of bytes"),
        (LoadsNulls, "load yielded documents of things that are not a column of bytes"),
        (HasNoLoad, "does not implement load, needed for things"),
        (Breaks, r'connector "toy" failed: ValueError: the disk \*\*\* is full'),
    ],
    ids=lambda it: it.__name__ if isinstance(it, type) else None,
)
def test_contract_violation_is_reported(toy, connection, kind, says):
    toy.transactor = kind
    stream = ready(connection)

    def run_transaction():
        stream.send(Load(0, keys(1)))
        stream.send(Flush())
        while not isinstance(stream.receive(), Flushed):
            pass
        stream.send(store(1))
        stream.send(store(2))
        stream.send(StartCommit(b"cp"))
        drained(stream)

    with pytest.raises(ConnectorError, match=says):
        run_transaction()
    assert toy.checkpoint == b""
    assert toy.events[-1] == "close 1"
    toy.transactor = ToyTransactor
    ready(connection).cancel()


def test_checkpoint_of_wrong_type_is_reported(toy, connection):
    toy.checkpoint = "text"
    with pytest.raises(ConnectorError, match="checkpoint of the transactor is a str"):
        opened(connection)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (ValidatedBinding({}, ()), "result of validate has no resource_path in binding 0"),
        ({}, "validate returned a dict"),
    ],
    ids=["no path", "a dict"],
)
def test_invalid_result_of_validate_is_reported(tmp_path, answer, says):
    class Broken(Toy):
        def validate(self, request):
            return [answer]

    with (
        serve(Broken(), f"unix:{tmp_path}/broken.sock") as server,
        connect(server.address) as connection,
        pytest.raises(ConnectorError, match=says),
    ):
        connection.validate(question())


# Violations of the protocol by the runtime: reported, rolled back, other streams continue.


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ([b""], "has 0 of its fields set"),
        ([encode_request(Flush())], "Flush was sent after nothing"),
        ([encode_request(Open(spec(), "v", WHOLE))] * 2, "Open was sent after Open"),
        ([encode_request(Open(spec("a", "a"), "v", WHOLE))], "is used twice"),
    ],
)
def test_protocol_violation_of_runtime_is_reported(toy, connection, data, says):
    stream = connection.transactions(checked=False)

    def run_transaction():
        for message in data:
            stream.send_bytes(message)
        drained(stream)

    with pytest.raises(ConnectorRefused, match=says):
        run_transaction()
    ready(connection).cancel()


@pytest.mark.parametrize(
    ("load", "delta", "says"),
    [
        (Load(3, keys(1)), False, "Load of binding 3, but the number of bindings is 1"),
        (Load(0, keys(1)), True, "which has delta updates"),
    ],
)
def test_load_of_invalid_binding_is_rejected(connection, load, delta, says):
    stream = ready(connection, delta=delta)
    stream.send(load)
    with pytest.raises(ConnectorRefused, match=says):
        drained(stream)


class Truncating(ToyTransactor):
    accepts_empty = True

    def store(self, documents):
        for batch in documents:
            if batch.empties:
                assert len(batch) == 0
                self.toy.rows.pop(str(batch.binding), None)


def test_truncating_store_removes_documents(toy, connection):
    toy.rows = {"things": {b"key": b"{}"}, "others": {b"key": b"{}"}}
    toy.transactor = Truncating
    stream = ready(connection, names=("things", "others"))
    committed(stream, store(1, binding=1), Store.truncate(0), store(1))
    assert toy.rows == {"others": {b"key": b"{}"}}


@pytest.mark.parametrize(
    ("transactor", "key_range", "stores", "says"),
    [
        (ToyTransactor, WHOLE, [], "Store truncates things, but the connector does not"),
        (
            Truncating,
            LOWER,
            [],
            "Store truncates things in a stream of key range 00000000-7fffffff",
        ),
        (Truncating, WHOLE, [store(1)], "Store truncates things after other documents"),
        (Truncating, WHOLE, [Store.truncate(0)], "Store truncates things after other documents"),
    ],
    ids=["not accepted", "of a part", "after a document", "twice"],
)
def test_invalid_truncating_store_is_rejected(toy, connection, transactor, key_range, stores, says):
    toy.transactor = transactor
    stream = ready(connection, key_range=key_range)
    with pytest.raises(ConnectorRefused, match=says):
        committed(stream, *stores, Store.truncate(0))


def test_stream_end_after_load_is_rejected(connection):
    stream = ready(connection)
    stream.send(Load(0, keys(1)))
    stream.end()
    with pytest.raises(ConnectorRefused, match="unexpected EOF"):
        drained(stream)


def test_client_does_not_send_message_out_of_order(connection):
    stream = opened(connection)
    with pytest.raises(LocalProtocolError, match="Flush may not be sent after Open"):
        stream.send(Flush())
    stream.send(Acknowledge())
    assert stream.receive() == Acknowledged()


# Ends of streams.


def test_cancelled_stream_is_rolled_back_at_once(toy, connection):
    """The transactor is cancelled, even while one of its methods runs."""

    class Busy(ToyTransactor):
        def store(self, documents):
            super().store(documents)
            self.record("busy")
            assert self.cancelled.wait(PATIENCE_S)
            raise RuntimeError("broken off")

    toy.transactor = Busy
    stream = ready(connection)
    stream.send(Flush())
    assert stream.receive() == Flushed()
    stream.send(store(1))
    stream.send(StartCommit(b"cp"))
    until(lambda: "busy 1" in toy.events)
    stream.cancel()
    until(lambda: "close 1" in toy.events)
    assert "cancel 1" in toy.events
    assert toy.rows == {}


def test_idle_stream_ends_with_its_call(toy, connection):
    stream = ready(connection)
    stream.cancel()
    until(lambda: "close 1" in toy.events)


def test_newer_stream_closes_older_before_it_opens(toy, connection):
    class Stubborn(ToyTransactor):
        def store(self, documents):
            super().store(documents)
            self.record("busy")
            assert self.cancelled.wait(PATIENCE_S)

    toy.transactor = Stubborn
    older = ready(connection)
    older.send(Flush())
    assert older.receive() == Flushed()
    older.send(store(1))
    older.send(StartCommit(b"older"))
    until(lambda: "busy 1" in toy.events)
    toy.transactor = ToyTransactor
    newer = opened(connection, key_range=LOWER)
    assert toy.events.index("close 1") < toy.events.index("open 2")
    assert "commit 1" not in toy.events
    with pytest.raises(ConnectorError, match="newer stream") as caught:
        older.receive()
    assert caught.value.__cause__.code() is grpc.StatusCode.ABORTED
    other = opened(connection, key_range=UPPER)
    another = opened(connection, materialization="another")
    newer.send(Acknowledge())
    assert newer.receive() == Acknowledged()
    for each in (newer, other, another):
        each.cancel()


def test_open_after_older_stream_that_does_not_end_fails(toy, connection, monkeypatch):
    monkeypatch.setattr("penstock.sdk.server.END_OLDER_S", 0.2)
    gate = threading.Event()

    class Uncancellable(ToyTransactor):
        def acknowledge(self):
            self.record("blocked")
            gate.wait(PATIENCE_S)

    toy.transactor = Uncancellable
    older = opened(connection)
    older.send(Acknowledge())
    until(lambda: "blocked 1" in toy.events)
    try:
        with pytest.raises(ConnectorError, match=r"older stream .* does not end"):
            opened(connection)
    finally:
        gate.set()
    until(lambda: "close 1" in toy.events)
    toy.transactor = ToyTransactor
    ready(connection).cancel()


def test_stopped_server_rolls_back(toy, tmp_path):
    with serve(toy, f"unix:{tmp_path}/toy.sock") as server, connect(server.address) as connection:
        stream = ready(connection)
        server.stop()
        assert toy.events[-1] == "close 1"
        with pytest.raises(ConnectorError):
            drained(stream)


def test_send_after_failure_raises_the_failure(toy, connection):
    """The error is the cause, not the closed stream."""
    toy.transactor = Breaks
    stream = ready(connection)
    with pytest.raises(ConnectorError, match="the disk"):
        committed(stream, store(1))

    def send_on():
        for _ in range(10_000):
            stream.send_bytes(encode_request(store(1)))

    with pytest.raises(ConnectorError, match="the disk"):
        send_on()


# Unary calls and their errors.


def test_unary_calls_reach_connector(connection):
    answer = connection.spec()
    assert '"place"' in answer.endpoint_spec_schema_json
    assert '"name"' in answer.resource_spec_schema_json
    assert answer.documentation_url == f"{Path.cwd().as_uri()}/docs/toy"
    assert connection.apply(Apply(spec(), "v")).action_description == "applied"
    with pytest.raises(ConnectorRefused, match="cannot drop resources"):
        connection.delete(Apply(spec(), "v"))


@pytest.mark.parametrize(
    ("endpoint", "resource", "says"),
    [
        ("{}", '{"name":"x"}', "configuration of endpoint is invalid: place: field required"),
        (ENDPOINT, '{"nmae":"hunter2"}', "configuration of resource 0 is invalid"),
        ("[]", "{}", "configuration of endpoint is invalid"),
        ("{", "{}", "configuration of endpoint is invalid"),
    ],
)
def test_invalid_configuration_is_reported_without_values(connection, endpoint, resource, says):
    with pytest.raises(ConnectorRefused, match=says) as caught:
        connection.validate(question(endpoint, resource))
    assert "hunter2" not in "".join([str(caught.value), *caught.value.__notes__])


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (Refused("no such hunter2", hint="Make hunter2."), ConnectorRefused, "no such ***"),
        (Fenced("a newer one"), ConnectorError, "a newer one"),
        (UsageError("bad"), ConnectorRefused, "bad"),
        (RuntimeError("password=hunter2"), ConnectorError, "RuntimeError: password=***"),
    ],
)
def test_error_of_connector_is_redacted(toy, connection, error, kind, says):
    toy.fails = error
    with pytest.raises(kind) as caught:
        connection.validate(question())
    report = "\n".join([str(caught.value), *caught.value.__notes__])
    assert says in report
    assert "hunter2" not in report


@pytest.mark.parametrize(
    "encoded", [base64.b64encode(b"u:hunter2").decode(), b"hunter2".hex(), "hunter2"]
)
def test_error_of_a_connector_shows_no_encoding_of_a_secret(toy, connection, encoded):
    class Breaks(ToyTransactor):
        def acknowledge(self):
            raise RuntimeError(f"header {encoded}.")

    toy.transactor = Breaks
    stream = opened(connection)
    stream.send(Acknowledge())
    toy.fails = RuntimeError(f"header {encoded}.")
    for call in (lambda: connection.validate(question()), stream.receive):
        with pytest.raises(ConnectorError) as caught:
            call()
        text = "".join(traceback.format_exception(caught.value))
        assert "***" in text
        assert encoded not in text


@pytest.mark.parametrize("name", ["key", "pin"])
def test_error_with_secret_of_resource_is_redacted(toy, connection, name):
    resource = json.dumps({"name": "things", name: "swordfish"})
    toy.fails = RuntimeError("no table for swordfish, nor for hunter2")
    with pytest.raises(ConnectorError, match=r"no table for \*\*\*, nor for \*\*\*"):
        connection.validate(question(resource=resource))

    class Breaks(ToyTransactor):
        def acknowledge(self):
            raise RuntimeError("swordfish")

    toy.transactor = Breaks
    [binding] = spec().bindings
    bound = replace(spec(), bindings=(replace(binding, resource_spec_json=resource),))
    stream = connection.transactions()
    stream.send(Open(bound, "v", WHOLE))
    assert isinstance(stream.receive(), Opened)
    stream.send(Acknowledge())
    with pytest.raises(ConnectorError, match=r"RuntimeError: \*\*\*"):
        stream.receive()


def test_invalid_collection_is_rejected_before_validate(toy, connection):
    toy.fails = AssertionError("it was asked")
    asked = Validate("m", ENDPOINT, (ValidateBinding('{"name":"x"}', CollectionSpec("c")),))
    with pytest.raises(ConnectorRefused, match=r"binding 0 \(c\): the collection has no key"):
        connection.validate(asked)


def test_connect_without_server_raises_connector_unreachable(tmp_path):
    with (
        connect(f"unix:{tmp_path}/nobody.sock") as connection,
        pytest.raises(ConnectorUnreachable, match="no answer from the connector"),
    ):
        connection.spec()


# TLS, tokens and sockets.


def test_call_without_token_is_rejected(toy):
    with serve(toy, "127.0.0.1:0", Security(token="open sesame")) as server:
        with connect(server.address, Security(token="open sesame")) as connection:
            connection.spec()
            ready(connection).cancel()
        for wrong in (Security(), Security(token="open")):
            with connect(server.address, wrong) as connection:
                with pytest.raises(ConnectorRefused, match="bearer token for connector"):
                    connection.spec()
                stream = connection.transactions()
                with pytest.raises(ConnectorRefused, match="bearer token for connector"):
                    stream.receive()


def test_mutual_tls_rejects_peer_without_trusted_certificate(toy, tmp_path):
    """Server and client both verify the certificate of the peer."""
    ours, theirs = authority(tmp_path, "ours"), authority(tmp_path, "theirs")
    server_pair = certificate(tmp_path, "localhost", ours)
    known, stranger = (
        certificate(tmp_path, name, by) for name, by in (("known", ours), ("stranger", theirs))
    )
    with serve(toy, "127.0.0.1:0", Security(ours, *server_pair)) as server:
        address = f"localhost:{server.address.rpartition(':')[2]}"
        with connect(address, Security(ours, *known)) as connection:
            connection.spec()
            ready(connection).cancel()
        for wrong in (Security(ours), Security(ours, *stranger), Security(theirs, *known)):
            with (
                connect(address, wrong) as connection,
                pytest.raises(ConnectorUnreachable),
            ):
                connection.spec()
        with connect(address) as connection, pytest.raises(ConnectorUnreachable):
            connection.spec()
    with serve(toy, "127.0.0.1:0", Security(None, *server_pair)) as server:
        address = f"localhost:{server.address.rpartition(':')[2]}"
        with connect(address, Security(ours)) as connection:
            connection.spec()
        elsewhere = Security(ours, server_name="elsewhere")
        with connect(address, elsewhere) as connection, pytest.raises(ConnectorUnreachable):
            connection.spec()


def test_certificate_without_key_is_rejected(tmp_path):
    with pytest.raises(UsageError, match="is missing"):
        connect("localhost:1", Security(certificate=tmp_path / "x"))
    pair = (tmp_path / "nothing.crt", tmp_path / "nothing.key")
    with pytest.raises(UsageError, match="could not read"):
        connect("localhost:1", Security(None, *pair))


def test_plaintext_beyond_loopback_needs_option(toy):
    with pytest.raises(UsageError, match="needs TLS"):
        serve(toy, "0.0.0.0:0")
    with pytest.raises(UsageError, match="needs TLS"):
        connect("connector.example:80")


def test_abstract_socket_needs_option_for_plaintext(toy, tmp_path):
    address = f"unix-abstract:{tmp_path}"
    with pytest.raises(UsageError, match="needs TLS"):
        serve(toy, address)
    asked = Security(plaintext=True)
    with serve(toy, address, asked) as server, connect(server.address, asked) as connection:
        connection.spec()


def test_address_in_use_is_rejected(toy, tmp_path):
    with (
        serve(toy, "127.0.0.1:0") as server,
        pytest.raises(UsageError, match="cannot listen on"),
    ):
        serve(Toy(), server.address)
    address = f"unix:{tmp_path}/toy.sock"
    with serve(toy, address), pytest.raises(UsageError, match="is in use"):
        serve(Toy(), address)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as killed:
        killed.bind(f"{tmp_path}/toy.sock")  # The socket file remains.
    with serve(toy, address), connect(address) as connection:
        connection.spec()


def test_socket_is_accessible_to_owner_only(toy, tmp_path):
    with serve(toy, f"unix:{tmp_path}/toy.sock"):
        assert (tmp_path / "toy.sock").stat().st_mode & 0o777 == 0o600
