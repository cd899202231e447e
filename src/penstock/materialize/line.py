"""Driver channel: the connection from Spark tasks to the driver for the commit barrier of a job.

The driver listens on a socket. Both ends prove that they know a secret of the job (HMAC), because
messages are pickled. Unless the address is a loopback address, the connection uses TLS with
the certificate of the run.
"""

import socket
import ssl
import threading
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from typing import TYPE_CHECKING, Any

from penstock.materialize.framed import (
    AUTHENTICATE_S,
    FramedConnection,
    client_context,
    server_context,
)
from penstock.materialize.rounds import NotLogged, Rounds, Told
from penstock.materialize.run_certificate import RunCertificate

if TYPE_CHECKING:
    from penstock.materialize.shard import ShardPlan

__all__ = ["Address", "Line", "RoundsServer"]


@dataclass(frozen=True, slots=True)
class Address:
    """Address of the driver channel of one job, and the secret for it."""

    host: str
    port: int
    secret: bytes
    certificate: bytes | None = None
    """Certificate of the driver, as PEM; None without TLS."""

    def __repr__(self) -> str:
        return f"Address({self.host}:{self.port})"


class RoundsServer:
    """Server side of the driver channel, for one job."""

    def __init__(
        self,
        rounds: Rounds,
        host: str,
        secret: bytes,
        count: int,
        certificate: RunCertificate | None = None,
    ) -> None:
        """Listen on a free port of `host` for `count` Spark tasks; a certificate enables TLS."""
        self._rounds = rounds
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=2 * count)
        self._secret = secret
        self._tls = None if certificate is None else server_context(certificate)
        self.address = Address(
            host,
            int(self._listener.getsockname()[1]),
            secret,
            None if certificate is None else certificate.certificate,
        )
        self._closed = False
        self._lines: list[tuple[_Accepted, threading.Thread]] = []
        self._seen: set[int] = set()
        self._thread = threading.Thread(target=self._accept, name="rounds", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Process all messages that have arrived, then disconnect. Waiting Spark tasks fail."""
        self._closed = True
        self._rounds.fail()
        with suppress(OSError):
            # A connection wakes the thread if it is blocked in accept.
            socket.create_connection((self.address.host, self.address.port), timeout=1).close()
        self._listener.close()
        self._thread.join()
        for accepted, thread in self._lines:
            accepted.end(socket.SHUT_RD)  # Messages that have arrived are still read.
            thread.join()
            accepted.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                accepted = _Accepted(self._listener.accept()[0])
            except OSError:
                continue
            thread = threading.Thread(
                target=self._serve, args=(accepted,), name="shard", daemon=True
            )
            thread.start()
            self._lines.append((accepted, thread))

    def _serve(self, accepted: "_Accepted") -> None:
        try:
            # In this thread, because a silent client must not block other connections.
            line = accepted.connect(self._tls)
            line.authenticate(self._secret, server=True)
        except (AuthenticationError, EOFError, OSError):
            accepted.end(socket.SHUT_RDWR)
            return
        try:
            at: int = line.recv()
            if at in self._seen:
                self._rounds.fail()  # A second attempt: the first Spark task is lost.
            self._seen.add(at)
            line.send(not self._rounds.broken)
            while (said := line.recv()) is not None:
                verb, *what = said
                match verb:
                    case "opened":
                        self._rounds.opened(at)
                    case "offer":
                        line.send(self._rounds.offer(at))
                    case "commit":
                        line.send(self._rounds.commit(at, *what))
                    case _:
                        self._rounds.settled(at, *what)
        except (NotLogged, EOFError, OSError):
            self._rounds.fail()
        except BaseException:
            self._rounds.fail()
            raise
        finally:
            accepted.end(socket.SHUT_RDWR)


class _Accepted:
    """Accepted connection. The TLS handshake takes place in the thread that serves it."""

    def __init__(self, raw: socket.socket) -> None:
        # With a second handle, another thread can shut the socket down during a read.
        self._control = raw.dup()
        self._raw = raw

    def connect(self, tls: ssl.SSLContext | None) -> FramedConnection:
        self._raw.settimeout(AUTHENTICATE_S)
        if tls is not None:
            self._raw = tls.wrap_socket(self._raw, server_side=True)
        return FramedConnection(self._raw)

    def end(self, how: int) -> None:
        with suppress(OSError):
            self._control.shutdown(how)

    def close(self) -> None:
        self._raw.close()
        self._control.close()


class Line:
    """Client side of the driver channel, in a Spark task."""

    def __init__(self, address: Address, at: int) -> None:
        """Connect to the driver as the shard with number `at`.

        Raises:
            NotLogged: the driver cannot be reached, or the job has already failed.
        """
        try:
            self._line = _connect(address)
        except (OSError, EOFError, AuthenticationError) as error:
            raise _lost(error) from error
        if not self._ask(at):
            self._line.close()
            raise NotLogged(detail="Another shard has failed.")

    def opened(self) -> None:
        """See `Rounds`."""
        self._say(("opened",))

    def offer(self) -> "ShardPlan | None":
        """See `Rounds`."""
        found: ShardPlan | None = self._ask(("offer",))
        return found

    def commit(self, told: Told) -> bool:
        """See `Rounds`."""
        return bool(self._ask(("commit", told)))

    def settled(self, acknowledged_ms: int) -> None:
        """See `Rounds`."""
        self._say(("settled", acknowledged_ms))

    def close(self, *, done: bool) -> None:
        """Disconnect. Unless `done`, the job fails and no other shard waits for this one."""
        with suppress(NotLogged):
            if done:
                self._say(None)
        self._line.close()

    def _ask(self, what: Any) -> Any:
        self._say(what)
        try:
            return self._line.recv()
        except (OSError, EOFError) as error:
            raise _lost(error) from error

    def _say(self, what: Any) -> None:
        try:
            self._line.send(what)
        except OSError as error:
            raise _lost(error) from error


def _connect(address: Address) -> FramedConnection:
    raw = socket.create_connection((address.host, address.port), AUTHENTICATE_S)
    try:
        if address.certificate is not None:
            context, name = client_context(address.certificate)
            raw = context.wrap_socket(raw, server_hostname=name)
        line = FramedConnection(raw)
        line.authenticate(address.secret, server=False)
    except BaseException:
        raw.close()
        raise
    return line


def _lost(error: Exception) -> NotLogged:
    return NotLogged(detail=f"The driver is not there any more: {type(error).__name__}.")
