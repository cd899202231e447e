"""A shard's stream to its connector: opened once, then one transaction after another.

    Open ▸ Opened, Acknowledge ▸ Acknowledged
    Flush ▸ Flushed, Store…, StartCommit ▸ StartedCommit     a transaction
    Acknowledge ▸ Acknowledged                               once the recovery log has it

Acknowledge is sent as soon as it may be, and its answer is needed before the next Flush.
Until then the next transaction may be read, and its Loads be sent. What is loaded comes
while more is asked for, so during the load phase a thread of its own receives.
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
    """A stream that is open, and what its endpoint is known to hold."""

    id: str
    """Which stream it is, among all that ever were."""

    version: str
    """Of the specification that it was opened with."""

    checkpoint: Checkpoint
    """What the endpoint holds once the last commit is acknowledged."""

    _stream: Stream
    _hearing: "_Hearing | None" = field(default=None, init=False)

    @classmethod
    def open(
        cls, connection: Connection, request: Open, *, id: str, logged: Checkpoint | None
    ) -> "Session":
        """Be the one who writes these keys; `logged` counts if the endpoint keeps no checkpoint.

        Raises:
            ConnectorError: the connector refused, or cannot be reached.
            UsageError: the endpoint has a checkpoint that is none of ours.
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
        """Whether it is there, and nothing is under way that the endpoint might still lose."""
        return self._stream.idle and not self._stream.over

    def begin(self, loaded: Callable[[Loaded], None]) -> None:
        """Begin a transaction: what is loaded is handed to `loaded`, by a thread."""
        self._hearing = _Hearing(self._stream, loaded)

    def load(self, request: Load) -> None:
        """Ask for documents."""
        self._stream.send(request)

    def await_acknowledged(self) -> None:
        """Wait until the last commit is acknowledged, in a transaction that has begun."""
        if self._hearing is not None:
            self._hearing.await_acknowledged()

    def flush(self) -> None:
        """End the load phase: all that was asked for is here."""
        assert self._hearing is not None
        self._hearing.await_acknowledged()
        self._stream.send(Flush())
        self._hearing.end()
        self._hearing = None

    def settle(self) -> None:
        """Wait until the last commit is acknowledged, when no other transaction has begun."""
        while not self._stream.acknowledged:
            found = self._next()
            if not isinstance(found, Acknowledged):
                raise InternalError(f"{found.kind} was not to come now")

    def store(self, request: Store) -> None:
        """Hand over documents of this transaction."""
        self._stream.send(request)

    def start_commit(self, checkpoint: Checkpoint) -> None:
        """That was all of the transaction."""
        self._stream.send(StartCommit(encode(checkpoint)))
        self.checkpoint = checkpoint

    def started_commit(self) -> StateUpdate | None:
        """Wait until all is stored; what the recovery log is to keep for the connector."""
        found = self._next()
        if not isinstance(found, StartedCommit):
            raise InternalError(f"{found.kind} came instead of StartedCommit")
        return found.state

    def acknowledge(self) -> None:
        """The recovery log has the commit."""
        self._stream.send(Acknowledge())

    def close(self) -> None:
        """Say no more; what was not committed is rolled back."""
        if self._stream.idle:
            self._stream.end()
        else:
            self._stream.cancel()

    def _next(self) -> Response:
        return _next(self._stream)


class _Hearing:
    """Receives from Acknowledge to Flushed."""

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
        """Wait for Acknowledged."""
        self._acknowledged.wait()
        self._check()

    def end(self) -> None:
        """Wait for Flushed."""
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
        except BaseException as error:  # noqa: BLE001 - the thread's door: raised by who waits
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
