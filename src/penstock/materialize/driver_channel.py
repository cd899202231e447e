"""Channel from the Spark tasks of a job to its driver: the commit barrier, and errors.

The driver listens on a socket. Both ends prove with HMAC that they have the secret of the job.
Unless the address is a loopback address, the connection uses TLS with the certificate of the run.

A message is its length (8 bytes, big-endian) and its pickled value. Before authentication, a
message has at most 256 bytes and is not unpickled: unpickling data of an unauthenticated peer
would execute its code.

Spark reports an exception of a worker as text only. A Spark task at the end of a job returns its
error in the result. A Spark task whose rows feed another stage has no such result, so its error
is pickled into the text of the exception.
"""

import base64
import pickle
import re
import socket
import ssl
import struct
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import answer_challenge, deliver_challenge
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import PenstockError
from penstock.materialize.commit_barrier import CommitBarrier, CommitNotRecorded, ShardReport
from penstock.materialize.run_certificate import SERVER_NAME, RunCertificate

if TYPE_CHECKING:
    from penstock.materialize.shard import ShardPlan

__all__ = ["Address", "DriverChannel", "DriverChannelServer", "restore_errors", "transport_errors"]

AUTHENTICATE_S: Final = 60.0
"""Timeout of the peer in the TLS handshake and in the authentication."""

_LENGTH: Final = struct.Struct(">Q")

_PICKLED_ERROR: Final = re.compile(r"penstock error <([A-Za-z0-9+/=]+)>")


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


class DriverChannelServer:
    """Server side of the driver channel, for one job."""

    def __init__(
        self,
        barrier: CommitBarrier,
        host: str,
        secret: bytes,
        count: int,
        certificate: RunCertificate | None = None,
    ) -> None:
        """Listen on a free port of `host` for `count` Spark tasks; a certificate enables TLS."""
        self._barrier = barrier
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=2 * count)
        self._secret = secret
        self._tls = None if certificate is None else _server_context(certificate)
        self.address = Address(
            host,
            int(self._listener.getsockname()[1]),
            secret,
            None if certificate is None else certificate.certificate,
        )
        self._closed = False
        self._connections: list[tuple[_Accepted, threading.Thread]] = []
        self._seen: set[int] = set()
        self._thread = threading.Thread(target=self._accept, name="driver channel", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Process all messages that have arrived, then disconnect. Waiting Spark tasks fail."""
        self._closed = True
        self._barrier.fail()
        with suppress(OSError):
            # A connection wakes the thread if it is blocked in accept.
            socket.create_connection((self.address.host, self.address.port), timeout=1).close()
        self._listener.close()
        self._thread.join()
        for accepted, thread in self._connections:
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
            self._connections.append((accepted, thread))

    def _serve(self, accepted: "_Accepted") -> None:
        try:
            # In this thread, because a silent client must not block other connections.
            connection = accepted.connect(self._tls)
            connection.authenticate(self._secret, server=True)
        except (AuthenticationError, EOFError, OSError):
            accepted.end(socket.SHUT_RDWR)
            return
        try:
            shard: int = connection.recv()
            if shard in self._seen:
                self._barrier.fail()  # A second attempt: the first Spark task is lost.
            self._seen.add(shard)
            connection.send(not self._barrier.failed)
            while (message := connection.recv()) is not None:
                self._answer(connection, shard, *message)
        except (CommitNotRecorded, EOFError, OSError):
            self._barrier.fail()
        except BaseException:
            self._barrier.fail()
            raise
        finally:
            accepted.end(socket.SHUT_RDWR)

    def _answer(
        self, connection: "FramedConnection", shard: int, call: str, *arguments: Any
    ) -> None:
        match call:
            case "opened":
                self._barrier.opened(shard)
            case "plan_next":
                connection.send(self._barrier.plan_next(shard))
            case "commit":
                connection.send(self._barrier.commit(shard, *arguments))
            case _:
                self._barrier.acknowledged(shard, *arguments)


class _Accepted:
    """Accepted connection. The TLS handshake takes place in the thread that serves it."""

    def __init__(self, raw: socket.socket) -> None:
        # With a second handle, another thread can shut the socket down during a read.
        self._control = raw.dup()
        self._raw = raw

    def connect(self, tls: ssl.SSLContext | None) -> "FramedConnection":
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


class DriverChannel:
    """Client side of the driver channel, in a Spark task; a `ShardChannel`."""

    def __init__(self, address: Address, shard: int) -> None:
        """Connect to the driver as the shard with this number.

        Raises:
            CommitNotRecorded: the driver cannot be reached, or the job has already failed.
        """
        try:
            self._connection = _connect(address)
        except (OSError, EOFError, AuthenticationError) as error:
            raise _driver_lost(error) from error
        if not self._request(shard):
            self._connection.close()
            raise CommitNotRecorded(detail="Another shard has failed.")

    def opened(self) -> None:
        """See `ShardChannel`."""
        self._send(("opened",))

    def plan_next(self) -> "ShardPlan | None":
        """See `ShardChannel`."""
        plan: ShardPlan | None = self._request(("plan_next",))
        return plan

    def commit(self, report: ShardReport) -> bool:
        """See `ShardChannel`."""
        return bool(self._request(("commit", report)))

    def acknowledged(self, acknowledged_ms: int) -> None:
        """See `ShardChannel`."""
        self._send(("acknowledged", acknowledged_ms))

    def close(self, *, done: bool) -> None:
        """Disconnect. Unless `done`, the job fails and no other shard waits for this one."""
        with suppress(CommitNotRecorded):
            if done:
                self._send(None)
        self._connection.close()

    def _request(self, message: Any) -> Any:
        self._send(message)
        try:
            return self._connection.recv()
        except (OSError, EOFError) as error:
            raise _driver_lost(error) from error

    def _send(self, message: Any) -> None:
        try:
            self._connection.send(message)
        except OSError as error:
            raise _driver_lost(error) from error


def _connect(address: Address) -> "FramedConnection":
    raw = socket.create_connection((address.host, address.port), AUTHENTICATE_S)
    try:
        if address.certificate is not None:
            context = _client_context(address.certificate)
            raw = context.wrap_socket(raw, server_hostname=SERVER_NAME)
        connection = FramedConnection(raw)
        connection.authenticate(address.secret, server=False)
    except BaseException:
        raw.close()
        raise
    return connection


def _driver_lost(error: Exception) -> CommitNotRecorded:
    return CommitNotRecorded(
        detail=f"The connection to the driver is lost: {type(error).__name__}."
    )


class FramedConnection:
    """One end of a connection. A single thread sends and receives."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

    def authenticate(self, secret: bytes, *, server: bool) -> None:
        """Prove to the peer that this end has `secret`, and require the same proof.

        Raises:
            AuthenticationError: the peer does not have the secret.
            OSError, EOFError: the connection failed.
        """
        steps = (deliver_challenge, answer_challenge)
        for step in steps if server else reversed(steps):
            try:
                step(self, secret)  # type: ignore[arg-type]
            except (AssertionError, ValueError) as error:
                raise AuthenticationError("no challenge or answer was received") from error
        self._socket.settimeout(None)

    def send(self, value: Any) -> None:
        """Send a pickled value."""
        self.send_bytes(pickle.dumps(value))

    def recv(self) -> Any:
        """Return the next value.

        Raises:
            EOFError: the peer has closed the connection.
        """
        return pickle.loads(self.recv_bytes())

    def send_bytes(self, data: bytes) -> None:
        """Send one message."""
        self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def recv_bytes(self, maxlength: int | None = None) -> bytes:
        """Return the next message.

        Raises:
            OSError: the message is longer than `maxlength`.
            EOFError: the peer has closed the connection.
        """
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if maxlength is not None and length > maxlength:
            raise OSError("message is too long")
        return self._read(length)

    def __del__(self) -> None:
        """Close a connection that has no more references."""
        self._socket.close()

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _read(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            chunk = self._socket.recv(min(count - len(data), 1 << 20))
            if not chunk:
                raise EOFError
            data += chunk
        return bytes(data)


def _server_context(certificate: RunCertificate) -> ssl.SSLContext:
    """Return the TLS settings of the driver."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        context.load_cert_chain(*certificate.write(Path(folder)))
    return context


def _client_context(certificate: bytes) -> ssl.SSLContext:
    """Return the TLS settings of an executor."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=certificate.decode())
    return context


@contextmanager
def transport_errors() -> Iterator[None]:
    """Raise a `PenstockError` of the block in a form that `restore_errors` decodes.

    Use it within a Spark task.
    """
    try:
        yield
    except PenstockError as error:
        text = base64.b64encode(pickle.dumps(error)).decode()
        raise RuntimeError(f"penstock error <{text}>") from error


@contextmanager
def restore_errors() -> Iterator[None]:
    """Raise the `PenstockError` of a Spark task instead of Spark's own exception.

    Use it in the driver, around the job.
    """
    try:
        yield
    except Exception as raised:
        if (match := _PICKLED_ERROR.search(str(raised))) is None:
            raise
        error = pickle.loads(base64.b64decode(match[1]))
        if not isinstance(error, PenstockError):
            raise
        raise error from None
