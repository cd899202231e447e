"""Two ways to the bytes of a COPY: straight from the socket, or through libpq.

libpq hands out one frame at a time, as a Python object, which costs more than
all else that is done with it. So where nothing is encrypted libpq only opens
the connection, and when it is idle the socket is borrowed: we send the query
ourselves and read frames by the megabyte. At rest libpq holds no bytes of its
own, because a server that waits for a query says nothing. Where TLS or GSSAPI
is in use only libpq can read, and its frames are put back together.

Both give the same frames: `d` with data, at the end `c` and `Z`, or `E`.
"""

import contextlib
import os
import select
import socket
import struct
import threading
import time
from typing import Final, Protocol

from psycopg import pq

from penstock.errors import SourceError, TransientError, UsageError
from penstock.sources.postgres.connect import Connection, awaited

__all__ = ["LibpqWire", "SocketWire", "Wire", "open_wire", "said_in"]

QUIET_S: Final = 0.002
"""A socket that was silent for so long has, for now, no more to say."""

WINDOW: Final = 128 << 10
"""So many bytes are waited for at once; a socket's buffer holds more."""

BUSY: Final = 4 << 10
"""A stream that brought so many bytes at once is worth a nap before the next look."""

NAP_S: Final = {socket.AF_UNIX: 0.000_3, socket.AF_INET: 0.001, socket.AF_INET6: 0.001}
"""How long, by the kind of socket: a local one holds about 200 small frames, and then the
server waits; measured at 250,000 rows/s (ADR 0017)."""

PATIENCE_S: Final = 10
"""How long a server may take to accept some bytes before it is given up."""

BORROWED: Final = "its connection is read as a stream"


class Wire(Protocol):
    """The bytes of one COPY."""

    def begin(self, sql: str) -> None:
        """Send `sql`, and wait until the server begins to copy."""
        ...

    def receive(self, into: memoryview) -> int:
        """Put bytes there. None came if it is 0, though they were waited for a little."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Wait until there may be bytes, at most so long."""
        ...

    def send(self, data: bytes) -> None:
        """Send one frame of data. Safe beside `receive` in another thread."""
        ...

    def end(self) -> None:
        """Give the connection back to libpq; the copy has ended, or both are closed."""
        ...


def open_wire(connection: Connection, *, naps: bool = False) -> Wire:
    """The faster of the two that this connection allows.

    With `naps`, for a server that sends many small frames, as a stream of changes is.
    """
    if connection.encrypted:
        return LibpqWire(connection)
    return SocketWire(connection, naps=naps)


class SocketWire:
    """Reads the socket itself."""

    def __init__(self, connection: Connection, *, naps: bool = False) -> None:
        """Of an idle connection."""
        if connection.borrowed or connection.pgconn.is_busy():
            raise UsageError(f"{connection.where} is busy", detail=f"Of it, {BORROWED}.")
        self._connection = connection
        self._early = b""
        self._sending = threading.Lock()
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))
        # The system itself then waits for bytes, and says when none came:
        # one call rather than three for each time the server was the slower.
        self._socket.setblocking(True)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(QUIET_S))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(PATIENCE_S))
        connection.borrowed = True
        self._nap_s = NAP_S.get(self._socket.family, 0.0) if naps else 0.0
        self._busy = False

    def begin(self, sql: str) -> None:
        """Send it as one Query."""
        try:
            self._begin(sql)
        except BaseException:
            if self._socket.fileno() >= 0:
                # It was left halfway, and nobody can tell what comes next.
                self.end()
                self._connection.close()
            raise

    def _begin(self, sql: str) -> None:
        self._connection.expect_answer()
        self._send(_frame(b"Q", sql.encode() + b"\0"))
        seen = bytearray()
        space = memoryview(bytearray(65_536))
        failed: SourceError | None = None
        while True:
            while len(seen) >= 5 and len(seen) > (length := int.from_bytes(seen[1:5])):
                kind, body = bytes(seen[:1]), bytes(seen[5 : length + 1])
                del seen[: length + 1]
                if kind in (b"H", b"W"):  # CopyOut and CopyBoth
                    self._early = bytes(seen)
                    return
                if kind == b"E":
                    failed = self._connection.said(said_in(body))
                if kind == b"Z":
                    self.end()
                    raise failed or UsageError("this is no COPY", detail=sql)
            try:
                if count := self.receive(space):
                    seen += space[:count]
                else:
                    self.wait(60)
            except TransientError as error:
                raise failed or error from None

    def receive(self, into: memoryview) -> int:
        """Read as much as there is."""
        if self._early:
            count = min(len(self._early), len(into))
            into[:count], self._early = self._early[:count], self._early[count:]
            return count
        try:
            count = self._after_nap(into) or self._awaited(into)
        except OSError as error:
            raise self._lost(error) from error
        self._busy = count >= BUSY
        if count:
            self._connection.received()
        return count

    def _after_nap(self, into: memoryview) -> int:
        """What came while nobody waited for it.

        SUBTLE: a server sends a change at a time, and whoever waits for the socket is woken
        by each, at the expense of both. While we sleep it need wake nobody.
        """
        if not self._busy or not self._nap_s:
            return 0
        time.sleep(self._nap_s)  # noqa: TID251 - not for anything to happen
        return self._received(into, len(into), socket.MSG_DONTWAIT)

    def _awaited(self, into: memoryview) -> int:
        """As much as comes in one go; nothing, if that is later than `QUIET_S`."""
        return self._received(into, min(len(into), WINDOW), socket.MSG_WAITALL)

    def _received(self, into: memoryview, most: int, flags: int) -> int:
        try:
            count = self._socket.recv_into(into, most, flags)
        except (BlockingIOError, InterruptedError):
            return 0
        if count == 0:
            raise self._lost()
        return count

    def wait(self, timeout_s: float) -> None:
        """Wait for the socket."""
        if not self._early:
            self._connection.wait(select.POLLIN, timeout_s)

    def send(self, data: bytes) -> None:
        """As one CopyData."""
        with self._sending:
            self._send(_frame(b"d", data))

    def end(self) -> None:
        """Make the socket as libpq left it."""
        if self._socket.fileno() >= 0:
            with contextlib.suppress(OSError):
                for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                    self._socket.setsockopt(socket.SOL_SOCKET, option, _timeval(0))
                self._socket.setblocking(False)
            self._socket.close()
            self._connection.borrowed = False

    def _send(self, frame: bytes) -> None:
        try:
            self._socket.sendall(frame)
        except OSError as error:
            raise self._lost(error) from error

    def _lost(self, error: OSError | None = None) -> TransientError:
        return TransientError(
            f"lost the connection to {self._connection.where}",
            detail=f"{error.strerror}." if error is not None else "The server closed it silently.",
            hint="It may have been stopped, or have had no answer from us for longer than its "
            "wal_sender_timeout; its log says which.",
        )


class LibpqWire:
    """Reads through libpq, which decrypts."""

    def __init__(self, connection: Connection) -> None:
        """Of an idle connection."""
        self._connection = connection
        self._left = b""
        self._copying = False
        # libpq is not made for two threads, and confirming comes from another.
        self._lock = threading.Lock()

    def begin(self, sql: str) -> None:
        """Send it, and look at what kind of answer comes."""
        self._connection.send(sql)
        self._connection.receive()
        if self._connection.pgconn.transaction_status != pq.TransactionStatus.ACTIVE:
            raise UsageError("this is no COPY", detail=sql)
        self._copying = True
        self._connection.borrowed = True

    def receive(self, into: memoryview) -> int:
        """Frames, one after the other, as many as fit."""
        filled = self._fill(into)
        if not filled and awaited(self._connection.fileno(), select.POLLIN, QUIET_S):
            filled = self._fill(into)
        if filled:
            self._connection.received()
        return filled

    def wait(self, timeout_s: float) -> None:
        """Wait for the socket; what libpq holds already was received before."""
        if not self._left:
            self._connection.wait(select.POLLIN, timeout_s)

    def send(self, data: bytes) -> None:
        """As one CopyData."""
        pgconn = self._connection.pgconn
        with self._lock:
            self._connection.ask(lambda: pgconn.put_copy_data(data))
            while self._connection.ask(pgconn.flush):
                if not awaited(self._connection.fileno(), select.POLLOUT, PATIENCE_S):
                    raise self._connection.lost("lost the connection to")

    def end(self) -> None:
        """Nothing was borrowed from libpq."""
        self._connection.borrowed = False

    def _fill(self, into: memoryview) -> int:
        filled = self._put(into, 0)
        pgconn = self._connection.pgconn
        lost: TransientError | None = None
        with self._lock:
            if filled < len(into):
                try:
                    self._connection.ask(pgconn.consume_input)
                except TransientError as error:
                    lost = error  # What came before that is still to be read.
            while self._copying and filled < len(into):
                count, data = self._connection.ask(lambda: pgconn.get_copy_data(1))
                if count == 0:
                    break
                self._left = _frame(b"d", bytes(data)) if count > 0 else self._ending()
                filled = self._put(into, filled)
        if lost is not None and not filled:
            raise lost
        return filled

    def _put(self, into: memoryview, filled: int) -> int:
        count = min(len(self._left), len(into) - filled)
        into[filled : filled + count] = self._left[:count]
        self._left = self._left[count:]
        return filled + count

    def _ending(self) -> bytes:
        """How the copy ended, as frames that say so."""
        self._copying = False
        frames = b""
        while (result := self._connection.pgconn.get_result()) is not None:
            if result.status == pq.ExecStatus.FATAL_ERROR:
                said = self._connection.fields(result)
                body = b"".join(f"{name}{text}\0".encode() for name, text in said.items())
                frames += _frame(b"E", body + b"\0") if said["C"] else b""
            if result.status == pq.ExecStatus.COPY_IN:
                break  # The server has ended its half of a COPY BOTH.
        if not self._connection.closed:
            frames += _frame(b"c", b"") + _frame(b"Z", b"I")
        return frames


def said_in(body: bytes) -> dict[str, str]:
    """The fields of an ErrorResponse, by their letter."""
    fields = (field.decode(errors="replace") for field in body.split(b"\0"))
    return {field[0]: field[1:] for field in fields if field}


def _frame(kind: bytes, body: bytes) -> bytes:
    return kind + (len(body) + 4).to_bytes(4) + body


def _timeval(seconds: float) -> bytes:
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1_000_000))
