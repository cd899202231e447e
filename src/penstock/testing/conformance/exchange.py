"""Stream with timeouts and a record of its messages.

A thread receives the responses, so a wait can time out. Sent and received messages are recorded, so
a failure can show the last ones.
"""

import queue
import threading
from collections.abc import Callable
from typing import Final, NoReturn, TypeVar

from penstock.materialize.client import Stream
from penstock.materialize.errors import ConnectorError
from penstock.protocol.errors import ProtocolError
from penstock.protocol.messages import Load, Loaded, Request, Response, Store
from penstock.testing.conformance.check import Failed

__all__ = ["Exchange"]

_END: Final = None
_T = TypeVar("_T", bound=Response)


class Exchange:
    """Transactions stream of a check."""

    def __init__(self, stream: Stream, patience_s: float, record: Callable[[str], None]) -> None:
        self._stream = stream
        self._patience_s = patience_s
        self._record = record
        self._came: queue.Queue[Response | Exception | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def send(self, request: Request) -> None:
        """Send a request that is valid at this point."""
        self._sent(lambda: self._stream.send(request), _shown(request))

    def send_bytes(self, data: bytes, shown: str) -> None:
        """Send raw bytes; `shown` is their name in the record."""
        self._sent(lambda: self._stream.send_bytes(data), shown)

    def next(self, awaited: str) -> Response:
        """Return the next response; `awaited` is its name in errors.

        Raises:
            Failed: no response arrived in time, or the stream ended.
            ConnectorError: the connector ended the stream with an error.
        """
        try:
            found = self._came.get(timeout=self._patience_s)
        except queue.Empty:
            raise Failed(f"{awaited} did not come within {self._patience_s:g} seconds") from None
        match found:
            case Exception():
                self._came.put(found)
                raise found
            case None:
                self._came.put(_END)
                raise Failed(f"the stream ended instead of {awaited}")
            case response:
                return response

    def expect(self, kind: type[_T], awaited: str = "") -> _T:
        """Return the next response, which must be of this kind."""
        awaited = awaited or kind.__name__
        found = self.next(awaited)
        if not isinstance(found, kind):
            raise Failed(f"{found.kind} came instead of {awaited}")
        return found

    def refusal(self, of: str) -> ConnectorError:
        """Return the error that ends the stream because of a request; drop earlier responses.

        Raises:
            Failed: the stream continues, or ends without an error.
        """
        while True:
            try:
                self.next(f"an error status for {of}")
            except ConnectorError as error:
                return error
            except Failed as error:
                raise Failed(f"{of} was not refused: {error}") from None

    def end(self) -> None:
        """Half-close the stream."""
        self._record("▸ end of stream")
        self._stream.end()

    def ended(self) -> None:
        """Check that the connector ends the stream without an error.

        Raises:
            Failed: another response arrives, or the stream does not end.
        """
        try:
            found = self._came.get(timeout=self._patience_s)
        except queue.Empty:
            raise Failed(
                f"the stream did not end within {self._patience_s:g} seconds after our end of it"
            ) from None
        if isinstance(found, Exception):
            raise found
        if found is not None:
            raise Failed(f"{found.kind} came instead of the end of the stream")

    def cancel(self) -> None:
        """Cancel the stream, and wait until the receiver has ended."""
        self._record("▸ cancel")
        self._stream.cancel()
        self._reader.join(self._patience_s)

    def close(self) -> None:
        """Cancel the stream if it is still open."""
        self._stream.cancel()
        self._reader.join(self._patience_s)

    def _sent(self, send: Callable[[], None], shown: str) -> None:
        self._record(f"▸ {shown}")
        overdue = threading.Event()

        def give_up() -> None:
            overdue.set()
            self._stream.cancel()

        timer = threading.Timer(self._patience_s, give_up)
        timer.daemon = True
        timer.start()
        try:
            send()
        except ConnectorError as error:
            if overdue.is_set():
                raise Failed(
                    f"{shown} could not be sent within {self._patience_s:g} seconds"
                ) from None
            self._raise_cause(error)
        finally:
            timer.cancel()

    def _raise_cause(self, error: ConnectorError) -> NoReturn:
        """Raise the error that the receiver got, if any: it is more specific than a failed send."""
        self._reader.join(self._patience_s)
        kept: list[Response | Exception | None] = []
        while not self._came.empty():
            kept.append(self._came.get())
        for each in kept:
            self._came.put(each)
        raise next((each for each in kept if isinstance(each, Exception)), error)

    def _read(self) -> None:
        while True:
            try:
                found = self._stream.receive()
            except ProtocolError as error:
                self._record(f"◂ {error}")
                self._came.put(Failed(str(error), detail=error.detail, hint=error.hint))
                self._stream.cancel()
                return
            except (ConnectorError, ValueError) as error:
                self._record(f"◂ error: {error}")
                self._came.put(error)
                return
            if found is None:
                self._record("◂ end of stream")
                self._came.put(_END)
                return
            self._record(f"◂ {_shown(found)}")
            self._came.put(found)


def _shown(said: Request | Response) -> str:
    match said:
        case Load(binding, keys):
            return f"Load of {len(keys)} keys of binding {binding}"
        case Store():
            return f"Store of {len(said.packed_keys)} documents of binding {said.binding}"
        case Loaded(binding, docs):
            return f"Loaded: {len(docs)} documents of binding {binding}"
        case _:
            return str(said.kind)
