"""A stream on which nothing is waited for in vain.

What comes is read in a thread of its own, so that a wait can end when patience
does, and kept with what was sent, so that a failure can show the last messages.
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
    """One Transactions stream, as a check uses it."""

    def __init__(self, stream: Stream, patience_s: float, record: Callable[[str], None]) -> None:
        self._stream = stream
        self._patience_s = patience_s
        self._record = record
        self._came: queue.Queue[Response | Exception | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def send(self, request: Request) -> None:
        """Send what may be sent now."""
        self._sent(lambda: self._stream.send(request), _shown(request))

    def send_bytes(self, data: bytes, shown: str) -> None:
        """Send these bytes, whatever they mean; `shown` is what they are called."""
        self._sent(lambda: self._stream.send_bytes(data), shown)

    def next(self, awaited: str) -> Response:
        """The next response; `awaited` says what is waited for.

        Raises:
            Failed: it did not come in time, or the stream ended instead.
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
        """The next response, which must be of this kind."""
        awaited = awaited or kind.__name__
        found = self.next(awaited)
        if not isinstance(found, kind):
            raise Failed(f"{found.kind} came instead of {awaited}")
        return found

    def refusal(self, of: str) -> ConnectorError:
        """The error that ends the stream because of what was sent; answers before it are let go.

        Raises:
            Failed: the stream goes on, or ends as if nothing had been wrong.
        """
        while True:
            try:
                self.next(f"an error status for {of}")
            except ConnectorError as error:
                return error
            except Failed as error:
                raise Failed(f"{of} was not refused: {error}") from None

    def end(self) -> None:
        """Say that no more will be sent."""
        self._record("▸ end of stream")
        self._stream.end()

    def ended(self) -> None:
        """The connector has nothing more to say, either, and is content.

        Raises:
            Failed: it says something, or does not end the stream.
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
        """Break off, and wait until that is known here."""
        self._record("▸ cancel")
        self._stream.cancel()
        self._reader.join(self._patience_s)

    def close(self) -> None:
        """Break off, if it is not over."""
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
        """What the reader heard, if it did, says more than that nothing can be sent."""
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
