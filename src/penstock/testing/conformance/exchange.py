"""Stream with timeouts and a record of its messages.

A thread receives the responses, so a wait can time out. Sent and received messages are recorded, so
a failure can show the last ones.
"""

import queue
import threading
from collections.abc import Callable
from typing import Final, NoReturn, TypeVar

from penstock.materialize.connector_client import ConnectorStream
from penstock.materialize.errors import ConnectorError
from penstock.protocol.errors import ProtocolError
from penstock.protocol.messages import Load, Loaded, Request, Response, Store
from penstock.testing.conformance.check import Failed

__all__ = ["Exchange"]

_END: Final = None
_T = TypeVar("_T", bound=Response)


class Exchange:
    """Transactions stream of a check."""

    def __init__(
        self, stream: ConnectorStream, patience_s: float, record: Callable[[str], None]
    ) -> None:
        self._stream = stream
        self._patience_s = patience_s
        self._record = record
        self._responses: queue.Queue[Response | Exception | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def send(self, request: Request) -> None:
        """Send a request that is valid at this point."""
        self._send(lambda: self._stream.send(request), _describe(request))

    def send_bytes(self, data: bytes, description: str) -> None:
        """Send raw bytes; `description` is their name in the record."""
        self._send(lambda: self._stream.send_bytes(data), description)

    def next(self, awaited: str) -> Response:
        """Return the next response; `awaited` is its name in errors.

        Raises:
            Failed: no response arrived in time, or the stream ended.
            ConnectorError: the connector ended the stream with an error.
        """
        try:
            received = self._responses.get(timeout=self._patience_s)
        except queue.Empty:
            raise Failed(f"no {awaited} within {self._patience_s:g} seconds") from None
        match received:
            case Exception():
                self._responses.put(received)
                raise received
            case None:
                self._responses.put(_END)
                raise Failed(f"the stream ended instead of {awaited}")
            case response:
                return response

    def expect(self, kind: type[_T], awaited: str = "") -> _T:
        """Return the next response, which must be of this kind."""
        awaited = awaited or kind.__name__
        response = self.next(awaited)
        if not isinstance(response, kind):
            raise Failed(f"received {response.kind} instead of {awaited}")
        return response

    def expect_rejection(self, request: str) -> ConnectorError:
        """Return the error that ends the stream because of a request; drop earlier responses.

        Raises:
            Failed: the stream continues, or ends without an error.
        """
        while True:
            try:
                self.next(f"error status for {request}")
            except ConnectorError as error:
                return error
            except Failed as error:
                raise Failed(f"{request} was not rejected: {error}") from None

    def end(self) -> None:
        """Half-close the stream."""
        self._record("▸ end of stream")
        self._stream.end()

    def expect_end(self) -> None:
        """Check that the connector ends the stream without an error.

        Raises:
            Failed: another response arrives, or the stream does not end.
        """
        try:
            received = self._responses.get(timeout=self._patience_s)
        except queue.Empty:
            raise Failed(
                f"the stream did not end within {self._patience_s:g} seconds after the half-close"
            ) from None
        if isinstance(received, Exception):
            raise received
        if received is not None:
            raise Failed(f"received {received.kind} instead of the end of the stream")

    def cancel(self) -> None:
        """Cancel the stream, and wait until the receiver has ended."""
        self._record("▸ cancel")
        self._stream.cancel()
        self._reader.join(self._patience_s)

    def close(self) -> None:
        """Cancel the stream if it is still open."""
        self._stream.cancel()
        self._reader.join(self._patience_s)

    def _send(self, send: Callable[[], None], description: str) -> None:
        self._record(f"▸ {description}")
        timed_out = threading.Event()

        def cancel() -> None:
            timed_out.set()
            self._stream.cancel()

        timer = threading.Timer(self._patience_s, cancel)
        timer.daemon = True
        timer.start()
        try:
            send()
        except ConnectorError as error:
            if timed_out.is_set():
                raise Failed(
                    f"could not send {description} within {self._patience_s:g} seconds"
                ) from None
            self._raise_cause(error)
        finally:
            timer.cancel()

    def _raise_cause(self, error: ConnectorError) -> NoReturn:
        """Raise the error that the receiver got, if any: it is more specific than a failed send."""
        self._reader.join(self._patience_s)
        received: list[Response | Exception | None] = []
        while not self._responses.empty():
            received.append(self._responses.get())
        for item in received:
            self._responses.put(item)
        raise next((item for item in received if isinstance(item, Exception)), error)

    def _read(self) -> None:
        while True:
            try:
                response = self._stream.receive()
            except ProtocolError as error:
                self._record(f"◂ {error}")
                self._responses.put(Failed(str(error), detail=error.detail, hint=error.hint))
                self._stream.cancel()
                return
            except (ConnectorError, ValueError) as error:
                self._record(f"◂ error: {error}")
                self._responses.put(error)
                return
            if response is None:
                self._record("◂ end of stream")
                self._responses.put(_END)
                return
            self._record(f"◂ {_describe(response)}")
            self._responses.put(response)


def _describe(message: Request | Response) -> str:
    match message:
        case Load(binding, keys):
            return f"Load of {len(keys)} keys of binding {binding}"
        case Store():
            return f"Store of {len(message.packed_keys)} documents of binding {message.binding}"
        case Loaded(binding, docs):
            return f"Loaded: {len(docs)} documents of binding {binding}"
        case _:
            return str(message.kind)
