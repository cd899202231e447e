"""Pickled messages over a socket, with TLS on networks that others can read.

A message is its length (8 bytes, big-endian) and its bytes. Both ends first prove with HMAC that
they have the secret of the job. Until then, a message has at most 256 bytes and is not unpickled:
unpickling data of an unauthenticated peer would execute its code.
"""

import pickle
import socket
import ssl
import struct
import tempfile
from multiprocessing import AuthenticationError
from multiprocessing.connection import answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any, Final

from penstock.materialize.run_certificate import SERVER_NAME, RunCertificate

__all__ = ["AUTHENTICATE_S", "FramedConnection", "client_context", "server_context"]

AUTHENTICATE_S: Final = 60.0
"""Timeout of the peer in the TLS handshake and in the authentication."""

_LENGTH: Final = struct.Struct(">Q")


class FramedConnection:
    """One end of a connection. A single thread sends and receives."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line

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
        self._line.settimeout(None)

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
        self._line.sendall(_LENGTH.pack(len(data)) + data)

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
        self._line.close()

    def close(self) -> None:
        """Close the connection."""
        self._line.close()

    def _read(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            chunk = self._line.recv(min(count - len(data), 1 << 20))
            if not chunk:
                raise EOFError
            data += chunk
        return bytes(data)


def server_context(certificate: RunCertificate) -> ssl.SSLContext:
    """Return the TLS settings of the driver."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        context.load_cert_chain(*certificate.write(Path(folder)))
    return context


def client_context(certificate: bytes) -> tuple[ssl.SSLContext, str]:
    """Return the TLS settings of an executor, and the server name to verify."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=certificate.decode())
    return context, SERVER_NAME
