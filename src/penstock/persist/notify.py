"""Notifications from a writer to the readers of other processes.

A writer listens on a loopback port. The entry of its epoch contains the address. After
every commit the writer sends each connected reader the new length of the log. Readers
without a connection poll, so a lost notification costs time only. The writer never
waits for a reader: a full socket misses a notification, a broken socket is closed.

    greeting        "PNSTBELL", the id of the location and a newline; identifies the writer
    notification    8 bytes, little-endian: the number of entries in the log
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
_NOTIFICATION: Final = struct.Struct("<Q")
READERS_AT_MOST: Final = 256


class Wakeups:
    """Wakes every listener of one client."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: list[threading.Event] = []

    def subscribe(self) -> threading.Event:
        """Return a new event, set whenever the log may have grown."""
        event = threading.Event()
        with self._lock:
            self._listeners.append(event)
        return event

    def unsubscribe(self, event: threading.Event) -> None:
        with self._lock:
            self._listeners.remove(event)

    def wake_all(self) -> None:
        """Set the events of all subscribers."""
        if self._listeners:
            with self._lock:
                for event in self._listeners:
                    event.set()


class Notifier:
    """The writer's side: a server that sends notifications."""

    def __init__(self, host: str) -> None:
        self._server = socket.create_server((host, 0), backlog=64)
        self._server.setblocking(False)
        self._host = host
        self._greeting = b""
        self._readers: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._wake_out, self._wake_in = socket.socketpair()
        self._selector.register(self._wake_out, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="penstock-notifier", daemon=True)

    @property
    def address(self) -> str:
        """Address of the server, as host:port."""
        return f"{self._host}:{self._server.getsockname()[1]}"

    def start(self, location: str) -> None:
        """Accept readers of `location`."""
        self._greeting = _GREETING + location.encode() + b"\n"
        self._thread.start()

    def notify(self, seqno: int) -> None:
        """Notify every reader, without blocking."""
        if not self._readers:
            return
        message = _NOTIFICATION.pack(seqno)
        with self._lock:
            for reader in list(self._readers):
                try:
                    reader.send(message)
                except BlockingIOError:
                    pass  # Unread notifications will wake the reader.
                except OSError:
                    self._drop(reader)

    def close(self) -> None:
        self._wake_in.send(b"x")
        if self._thread.ident is not None:
            self._thread.join()
        with self._lock:
            for reader in list(self._readers):
                self._drop(reader)
        self._selector.close()
        for sock in (self._server, self._wake_in, self._wake_out):
            sock.close()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._wake_out:
                    return
                if key.fileobj is self._server:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket):
                    self._drop_if_closed(key.fileobj)

    def _accept(self) -> None:
        try:
            reader, _ = self._server.accept()
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

    def _drop_if_closed(self, reader: socket.socket) -> None:
        """Drop a reader that closed its connection. Readers send nothing."""
        with self._lock, contextlib.suppress(OSError):
            if reader in self._readers and reader.recv(64) == b"":
                self._drop(reader)

    def _drop(self, reader: socket.socket) -> None:
        self._readers.discard(reader)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(reader)
        reader.close()


class NotificationListener:
    """The reader's side: wakes local listeners at each notification."""

    def __init__(self, wakeups: Wakeups) -> None:
        self._wakeups = wakeups
        self._lock = threading.Lock()
        self._address = ""
        self._connection: socket.socket | None = None
        self._failed = ""
        self._closed = False

    def connect(self, address: str, location: str) -> None:
        """Connect to the writer at `address` if it runs and writes `location`."""
        with self._lock:
            if self._closed or not address or address in (self._address, self._failed):
                return
            self._disconnect()
            try:
                connection = _connect(address, _GREETING + location.encode() + b"\n")
            except (OSError, ValueError):
                # The loopback of another host, or a dead writer. The client polls.
                self._failed = address
                log.debug("writer not reachable for notifications", extra=fields(address=address))
                return
            self._address, self._connection = address, connection
            threading.Thread(
                target=self._listen,
                args=(connection, address),
                name="penstock-notifications",
                daemon=True,
            ).start()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._disconnect()

    def _listen(self, connection: socket.socket, address: str) -> None:
        with contextlib.suppress(OSError):
            while connection.recv(4096):
                self._wakeups.wake_all()
        with self._lock:
            if self._address == address:
                self._address, self._connection = "", None
                self._failed = address
        connection.close()
        self._wakeups.wake_all()

    def _disconnect(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
        self._connection, self._address = None, ""


def _connect(address: str, greeting: bytes) -> socket.socket:
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=1)
    try:
        if _receive(connection, len(greeting)) != greeting:
            raise OSError("another server listens at this address")
        connection.settimeout(None)
    except OSError:
        connection.close()
        raise
    return connection


def _receive(connection: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        more = connection.recv(size - len(received))
        if not more:
            break
        received += more
    return received
