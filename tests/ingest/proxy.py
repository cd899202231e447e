"""TCP proxy that can cut, stall, discard and redirect connections."""

import contextlib
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self


class Proxy:
    """Proxy between clients and the server at `port`."""

    def __init__(self, port: int) -> None:
        self.target = port
        self.refuses = False
        """True: new connections are closed at once."""

        self._flows = threading.Event()
        self._flows.set()
        self._lock = threading.Lock()
        self._ends: list[socket.socket] = []
        self._swallowed: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]

    def __enter__(self) -> Self:
        self._spawn(self._listen)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.flow()
        self.cut()
        for thread in self._threads:
            thread.join()

    def cut(self) -> None:
        """Close all connections."""
        with self._lock:
            ends, self._ends = self._ends, []
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def stall(self) -> None:
        """Stop forwarding; connections stay open."""
        self._flows.clear()

    def flow(self) -> None:
        """Forward again, stalled bytes first."""
        self._flows.set()

    def swallow(self) -> None:
        """Discard all bytes of the present connections, which stay open; new ones work."""
        with self._lock:
            self._swallowed.update(self._ends)

    def _listen(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.refuses:
                client.close()
                continue
            try:
                server = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                client.close()
                continue
            with self._lock:
                self._ends += [client, server]
            self._spawn(self._pass, client, server)
            self._spawn(self._pass, server, client)

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self._flows.wait()
                if source not in self._swallowed:
                    sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        source.close()

    def _spawn(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, name="proxy", daemon=True)
        self._threads.append(thread)
        thread.start()
