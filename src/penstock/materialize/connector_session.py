"""Stream from a shard to its connector: one Open, then one transaction after another.

    Open ▸ Opened, Acknowledge ▸ Acknowledged
    Flush ▸ Flushed, Store…, StartCommit ▸ StartedCommit     a transaction
    Acknowledge ▸ Acknowledged                               once the recovery log has it

Acknowledge is sent as early as the protocol permits. Its answer is required before the next
Flush. Until then the next transaction can be read, and its Loads can be sent. Loaded documents
arrive while further Loads are sent, so a separate thread receives during the load phase.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.errors import InternalError
from penstock.materialize.checkpoint import NOTHING, Checkpoint, decode, encode
from penstock.materialize.connector_client import ConnectorConnection, ConnectorStream
from penstock.materialize.errors import ConnectorFailed
from penstock.protocol.messages import (
    Acknowledge,
    Acknowledged,
    Flush,
    Flushed,
    Load,
    Loaded,
    Open,
    Opened,
    Response,
    StartCommit,
    StartedCommit,
    StateUpdate,
    Store,
)

__all__ = ["ConnectorSession"]


@dataclass(slots=True)
class ConnectorSession:
    """An open stream, and the known checkpoint of its endpoint."""

    id: str
    """Unique id among all streams, past and present."""

    version: str
    """Version of the specification in the Open request."""

    checkpoint: Checkpoint
    """Checkpoint of the endpoint after the last commit is acknowledged."""

    _stream: ConnectorStream
    _receiver: "_Receiver | None" = field(default=None, init=False)

    @classmethod
    def open(
        cls, connection: ConnectorConnection, request: Open, *, id: str, logged: Checkpoint | None
    ) -> "ConnectorSession":
        """Open a stream, which becomes the only writer of its key range.

        `logged` is the checkpoint if the endpoint does not store one.

        Raises:
            ConnectorError: the connector rejected the request, or cannot be reached.
            UsageError: the checkpoint of the endpoint was not written by Penstock.
        """
        stream = connection.transactions()
        try:
            stream.send(request)
            opened = _expect(stream, Opened, connection.address)
            held = decode(opened.checkpoint, connector=connection.address)
            stream.send(Acknowledge())
        except BaseException:
            stream.cancel()
            raise
        if held is None:
            held = logged or NOTHING
        return cls(id, request.version, held, stream)

    @property
    def idle(self) -> bool:
        """Return whether the stream is open and its last commit is acknowledged."""
        return self._stream.idle and not self._stream.over

    def begin(self, loaded: Callable[[Loaded], None]) -> None:
        """Begin a transaction. A separate thread calls `loaded` with the loaded documents."""
        self._receiver = _Receiver(self._stream, loaded)

    def load(self, request: Load) -> None:
        """Send a request for documents."""
        self._stream.send(request)

    def await_acknowledged(self) -> None:
        """Wait until the last commit is acknowledged, after `begin`."""
        if self._receiver is not None:
            self._receiver.await_acknowledged()

    def flush(self) -> None:
        """End the load phase, and wait until all requested documents have arrived."""
        assert self._receiver is not None
        self._receiver.await_acknowledged()
        self._stream.send(Flush())
        self._receiver.end()
        self._receiver = None

    def settle(self) -> None:
        """Wait until the last commit is acknowledged, before the next `begin`."""
        while not self._stream.acknowledged:
            response = self._next()
            if not isinstance(response, Acknowledged):
                raise InternalError(f"unexpected response {response.kind}")

    def store(self, request: Store) -> None:
        """Send documents of this transaction."""
        self._stream.send(request)

    def start_commit(self, checkpoint: Checkpoint) -> None:
        """End the store phase, and send the checkpoint to commit."""
        self._stream.send(StartCommit(encode(checkpoint)))
        self.checkpoint = checkpoint

    def started_commit(self) -> StateUpdate | None:
        """Wait for StartedCommit, and return the connector state for the recovery log."""
        response = self._next()
        if not isinstance(response, StartedCommit):
            raise InternalError(f"received {response.kind} instead of StartedCommit")
        return response.state

    def acknowledge(self) -> None:
        """Report to the connector that the recovery log contains the commit."""
        self._stream.send(Acknowledge())

    def close(self) -> None:
        """Close the stream. An uncommitted transaction is rolled back."""
        if self._stream.idle:
            self._stream.end()
        else:
            self._stream.cancel()

    def _next(self) -> Response:
        return _next(self._stream)


class _Receiver:
    """Thread that receives all responses from Acknowledged to Flushed."""

    def __init__(self, stream: ConnectorStream, loaded: Callable[[Loaded], None]) -> None:
        self._stream = stream
        self._loaded = loaded
        self._error: BaseException | None = None
        self._acknowledged = threading.Event()
        if stream.acknowledged:
            self._acknowledged.set()
        self._thread = threading.Thread(target=self._receive_responses, name="loaded", daemon=True)
        self._thread.start()

    def await_acknowledged(self) -> None:
        self._acknowledged.wait()
        self._check()

    def end(self) -> None:
        self._thread.join()
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _receive_responses(self) -> None:
        try:
            while not isinstance(response := _next(self._stream), Flushed):
                if isinstance(response, Loaded):
                    self._loaded(response)
                else:
                    self._acknowledged.set()
        except BaseException as error:  # noqa: BLE001 - thread boundary: the waiter raises it
            self._error = error
        finally:
            self._acknowledged.set()


def _next(stream: ConnectorStream) -> Response:
    response = stream.receive()
    if response is None:
        raise ConnectorFailed("connector ended the stream during a transaction")
    return response


def _expect(stream: ConnectorStream, kind: type[Opened], address: str) -> Opened:
    response = stream.receive()
    if not isinstance(response, kind):
        raise ConnectorFailed(f"connector at {address} ended the stream before Opened")
    return response
