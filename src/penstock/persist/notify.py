"""Waking listeners: the writer rings, readers hear, and nobody depends on it.

A writer listens on a loopback port, whose address stands in its epoch's entry,
and sends each connected reader the log's new length after every commit. A
reader that hears nothing polls, only later. The writer never waits for a
reader: a full socket misses a ring, a broken one is dropped.

    greeting    "PNSTBELL", the location's id and a newline, so that a reader
                knows whom it reached
    ring        8 bytes, little-endian, the number of entries there are now
"""

import contextlib
import selectors
import socket
import struct
import threading
from typing import Final

from penstock.telemetry import fields, logger

__all__ = ["NotificationListener", "Notifier", "Wakeups"]

log = logger("persist")

_GREETING: Final = b"PNSTBELL"
_RING: Final = struct.Struct("<Q")
READERS_AT_MOST: Final = 256


class Wakeups:
    """Wakes every listener of one client."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: list[threading.Event] = []

    def subscribe(self) -> threading.Event:
        """An event of one's own, set whenever there may be something new."""
        event = threading.Event()
        with self._lock:
            self._listeners.append(event)
        return event

    def unsubscribe(self, event: threading.Event) -> None:
        """No longer."""
        with self._lock:
            self._listeners.remove(event)

    def tell(self) -> None:
        """There may be something new."""
        if self._listeners:
            with self._lock:
                for event in self._listeners:
                    event.set()


class Notifier:
    """The writer's end."""

    def __init__(self, host: str) -> None:
        self._door = socket.create_server((host, 0), backlog=64)
        self._door.setblocking(False)
        self._host = host
        self._greeting = b""
        self._readers: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._door, selectors.EVENT_READ)
        self._wake_out, self._wake_in = socket.socketpair()
        self._selector.register(self._wake_out, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="penstock-bell", daemon=True)

    @property
    def address(self) -> str:
        """Where readers may connect."""
        return f"{self._host}:{self._door.getsockname()[1]}"

    def start(self, location: str) -> None:
        """Begin to answer, in the name of `location`."""
        self._greeting = _GREETING + location.encode() + b"\n"
        self._thread.start()

    def ring(self, seqno: int) -> None:
        """Tell every reader, without waiting for any."""
        if not self._readers:
            return
        told = _RING.pack(seqno)
        with self._lock:
            for reader in list(self._readers):
                try:
                    reader.send(told)
                except BlockingIOError:
                    pass  # It has rings to read already.
                except OSError:
                    self._drop(reader)

    def close(self) -> None:
        """Hang up."""
        self._wake_in.send(b"x")
        if self._thread.ident is not None:
            self._thread.join()
        with self._lock:
            for reader in list(self._readers):
                self._drop(reader)
        self._selector.close()
        for each in (self._door, self._wake_in, self._wake_out):
            each.close()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._wake_out:
                    return
                if key.fileobj is self._door:
                    self._welcome()
                elif isinstance(key.fileobj, socket.socket):
                    self._hear(key.fileobj)

    def _welcome(self) -> None:
        try:
            reader, _ = self._door.accept()
        except OSError:
            return
        with self._lock:
            if len(self._readers) >= READERS_AT_MOST:
                reader.close()
                return
            reader.setblocking(False)
            reader.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                reader.send(self._greeting)
            except OSError:
                reader.close()
                return
            self._readers.add(reader)
            self._selector.register(reader, selectors.EVENT_READ)

    def _hear(self, reader: socket.socket) -> None:
        """Readers have nothing to say: what comes is their hanging up."""
        with self._lock, contextlib.suppress(OSError):
            if reader in self._readers and reader.recv(64) == b"":
                self._drop(reader)

    def _drop(self, reader: socket.socket) -> None:
        self._readers.discard(reader)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(reader)
        reader.close()


class NotificationListener:
    """A reader's end: passes on what the writer rings."""

    def __init__(self, wakeups: Wakeups) -> None:
        self._wakeups = wakeups
        self._lock = threading.Lock()
        self._address = ""
        self._line: socket.socket | None = None
        self._failed = ""
        self._closed = False

    def attend(self, address: str, location: str) -> None:
        """Listen to the writer at `address`, if it is there and writes `location`."""
        with self._lock:
            if self._closed or not address or address in (self._address, self._failed):
                return
            self._hang_up()
            try:
                line = _connected(address, _GREETING + location.encode() + b"\n")
            except (OSError, ValueError):
                # Another machine's loopback, or a writer that is gone. Polling goes on.
                self._failed = address
                log.debug("writer cannot be heard", extra=fields(address=address))
                return
            self._address, self._line = address, line
            threading.Thread(
                target=self._listen, args=(line, address), name="penstock-ear", daemon=True
            ).start()

    def close(self) -> None:
        """Stop listening."""
        with self._lock:
            self._closed = True
            self._hang_up()

    def _listen(self, line: socket.socket, address: str) -> None:
        with contextlib.suppress(OSError):
            while line.recv(4096):
                self._wakeups.tell()
        with self._lock:
            if self._address == address:
                self._address, self._line = "", None
                self._failed = address
        line.close()
        self._wakeups.tell()

    def _hang_up(self) -> None:
        if self._line is not None:
            with contextlib.suppress(OSError):
                self._line.shutdown(socket.SHUT_RDWR)
        self._line, self._address = None, ""


def _connected(address: str, greeting: bytes) -> socket.socket:
    host, _, port = address.rpartition(":")
    line = socket.create_connection((host, int(port)), timeout=1)
    try:
        if _received(line, len(greeting)) != greeting:
            raise OSError("somebody else answers there")
        line.settimeout(None)
    except OSError:
        line.close()
        raise
    return line


def _received(line: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        more = line.recv(size - len(found))
        if not more:
            break
        found += more
    return found
