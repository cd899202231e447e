"""Two transports for the bytes of a COPY: the socket itself, or libpq.

libpq returns one frame at a time as a Python object. This costs more than all other
processing of the frame. Without encryption, libpq therefore only opens the connection.
While the connection is idle, its socket is borrowed: Penstock sends the query and reads
frames in blocks of up to megabytes. An idle libpq has no buffered bytes, because a server
that waits for a query sends nothing. With TLS or GSSAPI only libpq can read, and its
output is assembled into frames again.

Both return the same frames: `d` with data, then `c` and `Z`, or `E`.
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
from penstock.pgclient import Connection, error_fields, poll_socket

__all__ = ["LibpqWire", "SocketWire", "Wire", "open_wire", "parse_error_fields"]

QUIET_S: Final = 0.002
"""Seconds of silence after which a socket counts as having no data for now."""

WINDOW: Final = 128 << 10
"""Maximum bytes to wait for in one call; a socket buffer holds more."""

BUSY: Final = 4 << 10
"""Minimum bytes per receive of a busy stream. The next read of such a stream is delayed."""

NAP_S: Final = {socket.AF_UNIX: 0.000_3, socket.AF_INET: 0.001, socket.AF_INET6: 0.001}
"""Delay in seconds, by address family. A local socket holds about 200 small frames before
the server blocks; measured at 250,000 rows/s (ADR 0017)."""

SEND_TIMEOUT_S: Final = 10
"""Seconds without progress of a send after which the connection counts as lost."""


class Wire(Protocol):
    """Transport for the bytes of one COPY."""

    def begin(self, sql: str) -> None:
        """Send `sql`, and wait until the server starts the COPY."""
        ...

    def receive(self, into: memoryview) -> int:
        """Fill `into`, and return the number of bytes; 0 after a short wait without data."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Wait until data may be available, for at most `timeout_s` seconds."""
        ...

    def send(self, data: bytes) -> None:
        """Send one frame of data. Safe while another thread calls `receive`."""
        ...

    def end(self) -> None:
        """Return the connection to libpq, after the end of the COPY or before it is closed."""
        ...


def open_wire(connection: Connection, *, naps: bool = False) -> Wire:
    """Return the faster transport that this connection allows.

    `naps` suits a server that sends many small frames, as a replication stream does.
    """
    if connection.encrypted:
        return LibpqWire(connection)
    return SocketWire(connection, naps=naps)


class SocketWire:
    """Transport that reads the socket directly."""

    def __init__(self, connection: Connection, *, naps: bool = False) -> None:
        """Borrow the socket of an idle connection."""
        if connection.borrowed or connection.pgconn.is_busy():
            raise UsageError(
                f"connection to {connection.where} is in use",
                detail="The connection is streaming a COPY, or has an unread result.",
            )
        self._connection = connection
        self._early = b""
        self._sending = threading.Lock()
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))
        # With a receive timeout, the kernel waits for bytes and reports their absence: one
        # system call instead of three each time the server is slower than this reader.
        self._socket.setblocking(True)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(QUIET_S))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(SEND_TIMEOUT_S))
        connection.borrowed = True
        self._nap_s = NAP_S.get(self._socket.family, 0.0) if naps else 0.0
        self._busy = False

    def begin(self, sql: str) -> None:
        """Send `sql` as one Query message, and wait for the start of the COPY."""
        try:
            self._begin(sql)
        except BaseException:
            if self._socket.fileno() >= 0:
                # The exchange is incomplete, so the next bytes cannot be interpreted.
                self.end()
                self._connection.close()
            raise

    def _begin(self, sql: str) -> None:
        self._connection.watch.expect_answer()
        self._send(_frame(b"Q", sql.encode() + b"\0"))
        received = bytearray()
        space = memoryview(bytearray(65_536))
        failed: SourceError | None = None
        while True:
            while len(received) >= 5 and len(received) > (length := int.from_bytes(received[1:5])):
                kind, body = bytes(received[:1]), bytes(received[5 : length + 1])
                del received[: length + 1]
                if kind in (b"H", b"W"):  # CopyOut and CopyBoth
                    self._early = bytes(received)
                    return
                if kind == b"E":
                    failed = self._connection.server_error(parse_error_fields(body))
                if kind == b"Z":
                    self.end()
                    raise failed or UsageError("statement does not start a COPY", detail=sql)
            try:
                if count := self.receive(space):
                    received += space[:count]
                else:
                    self.wait(60)
            except TransientError as error:
                raise failed or error from None

    def receive(self, into: memoryview) -> int:
        """Read the available bytes."""
        if self._early:
            count = min(len(self._early), len(into))
            into[:count], self._early = self._early[:count], self._early[count:]
            return count
        try:
            count = self._receive_after_nap(into) or self._receive_within_quiet(into)
        except OSError as error:
            raise self._lost_error(error) from error
        self._busy = count >= BUSY
        if count:
            self._connection.watch.received()
        return count

    def _receive_after_nap(self, into: memoryview) -> int:
        """Return the number of bytes that arrived during a delay.

        SUBTLE: the server sends one change at a time. A reader that waits on the socket is woken
        by each of them, which costs both sides time. During the sleep, the server wakes no reader.
        """
        if not self._busy or not self._nap_s:
            return 0
        time.sleep(self._nap_s)  # noqa: TID251 - does not wait for an event
        return self._receive_some(into, len(into), socket.MSG_DONTWAIT)

    def _receive_within_quiet(self, into: memoryview) -> int:
        """Receive up to `WINDOW` bytes; return 0 if none arrive within `QUIET_S`."""
        return self._receive_some(into, min(len(into), WINDOW), socket.MSG_WAITALL)

    def _receive_some(self, into: memoryview, max_bytes: int, flags: int) -> int:
        try:
            count = self._socket.recv_into(into, max_bytes, flags)
        except (BlockingIOError, InterruptedError):
            return 0
        if count == 0:
            raise self._lost_error()
        return count

    def wait(self, timeout_s: float) -> None:
        """Wait until the socket is readable."""
        if not self._early:
            self._connection.wait(select.POLLIN, timeout_s)

    def send(self, data: bytes) -> None:
        """Send `data` as one CopyData message."""
        with self._sending:
            self._send(_frame(b"d", data))

    def end(self) -> None:
        """Restore the socket options that libpq expects."""
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
            raise self._lost_error(error) from error

    def _lost_error(self, error: OSError | None = None) -> TransientError:
        return TransientError(
            f"lost the connection to {self._connection.where}",
            detail=f"{error.strerror}."
            if error is not None
            else "The server closed the connection without an error message.",
            hint="The server was stopped, or received no feedback within wal_sender_timeout. See "
            "the log of the server.",
        )


class LibpqWire:
    """Transport that reads through libpq, which decrypts."""

    def __init__(self, connection: Connection) -> None:
        """Use an idle connection."""
        self._connection = connection
        self._left = b""
        self._copying = False
        # libpq is not thread-safe, and another thread sends confirmations.
        self._lock = threading.Lock()

    def begin(self, sql: str) -> None:
        """Send `sql`, and verify that the response starts a COPY."""
        self._connection.send(sql)
        self._connection.receive()
        if self._connection.pgconn.transaction_status != pq.TransactionStatus.ACTIVE:
            raise UsageError("statement does not start a COPY", detail=sql)
        self._copying = True
        self._connection.borrowed = True

    def receive(self, into: memoryview) -> int:
        """Copy as many frames as fit."""
        filled = self._fill(into)
        if not filled and poll_socket(self._connection.fileno(), select.POLLIN, QUIET_S):
            filled = self._fill(into)
        if filled:
            self._connection.watch.received()
        return filled

    def wait(self, timeout_s: float) -> None:
        """Wait until the socket is readable; data buffered by libpq was already received."""
        if not self._left:
            self._connection.wait(select.POLLIN, timeout_s)

    def send(self, data: bytes) -> None:
        """Send `data` as one CopyData message."""
        pgconn = self._connection.pgconn
        with self._lock:
            self._connection.call_libpq(lambda: pgconn.put_copy_data(data))
            while self._connection.call_libpq(pgconn.flush):
                if not poll_socket(self._connection.fileno(), select.POLLOUT, SEND_TIMEOUT_S):
                    raise self._connection.lost_error()

    def end(self) -> None:
        """Mark the connection as free. Nothing else was changed."""
        self._connection.borrowed = False

    def _fill(self, into: memoryview) -> int:
        filled = self._put(into, 0)
        pgconn = self._connection.pgconn
        lost: TransientError | None = None
        with self._lock:
            if filled < len(into):
                try:
                    self._connection.call_libpq(pgconn.consume_input)
                except TransientError as error:
                    lost = error  # Data that arrived before the error is still to be read.
            while self._copying and filled < len(into):
                count, data = self._connection.call_libpq(lambda: pgconn.get_copy_data(1))
                if count == 0:
                    break
                self._left = _frame(b"d", bytes(data)) if count > 0 else self._end_frames()
                filled = self._put(into, filled)
        if lost is not None and not filled:
            raise lost
        return filled

    def _put(self, into: memoryview, filled: int) -> int:
        count = min(len(self._left), len(into) - filled)
        into[filled : filled + count] = self._left[:count]
        self._left = self._left[count:]
        return filled + count

    def _end_frames(self) -> bytes:
        """Return frames that represent the end of the COPY, or its error."""
        self._copying = False
        frames = b""
        while (result := self._connection.pgconn.get_result()) is not None:
            if result.status == pq.ExecStatus.FATAL_ERROR:
                fields = error_fields(result)
                body = b"".join(f"{name}{text}\0".encode() for name, text in fields.items())
                frames += _frame(b"E", body + b"\0") if fields["C"] else b""
            if result.status == pq.ExecStatus.COPY_IN:
                break  # The server has ended its side of a COPY BOTH.
        if not self._connection.closed:
            frames += _frame(b"c", b"") + _frame(b"Z", b"I")
        return frames


def parse_error_fields(body: bytes) -> dict[str, str]:
    """Return the fields of an ErrorResponse, by their one-letter code."""
    fields = (field.decode(errors="replace") for field in body.split(b"\0"))
    return {field[0]: field[1:] for field in fields if field}


def _frame(kind: bytes, body: bytes) -> bytes:
    return kind + (len(body) + 4).to_bytes(4) + body


def _timeval(seconds: float) -> bytes:
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1_000_000))
