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
from penstock.materialize.client import Connection, Stream
from penstock.materialize.errors import ConnectorError
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

__all__ = ["Session"]


@dataclass(slots=True)
class Session:
    """An open stream, and the known checkpoint of its endpoint."""

    id: str
    """Unique id among all streams, past and present."""

    version: str
    """Version of the specification in the Open request."""

    checkpoint: Checkpoint
    """Checkpoint of the endpoint after the last commit is acknowledged."""

    _stream: Stream
    _hearing: "_Hearing | None" = field(default=None, init=False)

    @classmethod
    def open(
        cls, connection: Connection, request: Open, *, id: str, logged: Checkpoint | None
    ) -> "Session":
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
        self._hearing = _Hearing(self._stream, loaded)

    def load(self, request: Load) -> None:
        """Send a request for documents."""
        self._stream.send(request)

    def await_acknowledged(self) -> None:
        """Wait until the last commit is acknowledged, after `begin`."""
        if self._hearing is not None:
            self._hearing.await_acknowledged()

    def flush(self) -> None:
        """End the load phase, and wait until all requested documents have arrived."""
        assert self._hearing is not None
        self._hearing.await_acknowledged()
        self._stream.send(Flush())
        self._hearing.end()
        self._hearing = None

    def settle(self) -> None:
        """Wait until the last commit is acknowledged, before the next `begin`."""
        while not self._stream.acknowledged:
            found = self._next()
            if not isinstance(found, Acknowledged):
                raise InternalError(f"{found.kind} was not to come now")

    def store(self, request: Store) -> None:
        """Send documents of this transaction."""
        self._stream.send(request)

    def start_commit(self, checkpoint: Checkpoint) -> None:
        """End the store phase, and send the checkpoint to commit."""
        self._stream.send(StartCommit(encode(checkpoint)))
        self.checkpoint = checkpoint

    def started_commit(self) -> StateUpdate | None:
        """Wait for StartedCommit, and return the connector state for the recovery log."""
        found = self._next()
        if not isinstance(found, StartedCommit):
            raise InternalError(f"{found.kind} came instead of StartedCommit")
        return found.state

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


class _Hearing:
    """Thread that receives all responses from Acknowledged to Flushed."""

    def __init__(self, stream: Stream, loaded: Callable[[Loaded], None]) -> None:
        self._stream = stream
        self._loaded = loaded
        self._error: BaseException | None = None
        self._acknowledged = threading.Event()
        if stream.acknowledged:
            self._acknowledged.set()
        self._thread = threading.Thread(target=self._hear, name="loaded", daemon=True)
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

    def _hear(self) -> None:
        try:
            while not isinstance(found := _next(self._stream), Flushed):
                if isinstance(found, Loaded):
                    self._loaded(found)
                else:
                    self._acknowledged.set()
        except BaseException as error:  # noqa: BLE001 - thread boundary: the waiter raises it
            self._error = error
        finally:
            self._acknowledged.set()


def _next(stream: Stream) -> Response:
    found = stream.receive()
    if found is None:
        raise ConnectorError("the connector ended the stream in the middle of a transaction")
    return found


def _expect(stream: Stream, kind: type[Opened], address: str) -> Opened:
    found = stream.receive()
    if not isinstance(found, kind):
        raise ConnectorError(f"the connector at {address} ended the stream instead of opening it")
    return found
