"""TLS and bearer token of a connection to a connector.

An address is `host:port` or `unix:PATH`. Without TLS, only addresses that other hosts and users
cannot reach are allowed: Unix sockets in the file system and loopback. Other addresses need the
option for plaintext. An abstract socket has no owner and no permissions, so it needs the option
too. The rule also protects a bearer token, which is readable without TLS.
"""

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

from penstock.errors import UsageError

__all__ = ["Security", "is_private", "read_pem"]


@dataclass(frozen=True, slots=True)
class Security:
    """Credentials of this side, and checks of the peer."""

    ca: Path | bytes | None = field(default=None, repr=False)
    """CA file, or PEM, that verifies the peer. Enables TLS."""

    certificate: Path | None = None
    """Certificate file of this side, with `key`. Enables TLS."""

    key: Path | None = None
    token: str = field(default="", repr=False)
    plaintext: bool = False
    """True to allow addresses beyond loopback without TLS."""

    server_name: str = ""
    """Name that the certificate of the peer must have, if it is not the host."""

    @property
    def tls(self) -> bool:
        """Return whether the connection is encrypted."""
        return self.ca is not None or self.certificate is not None

    def check(self, address: str) -> None:
        """Reject a plaintext connection to a public address.

        Raises:
            UsageError: the address needs TLS, or only one of certificate and key is set.
        """
        if (self.certificate is None) is not (self.key is None):
            raise UsageError(
                f'TLS certificate or private key for address "{address}" is missing',
                hint="Set both, the certificate and its key, or neither.",
            )
        if not self.tls and not self.plaintext and not is_private(address):
            raise UsageError(
                f'address "{address}" needs TLS',
                detail="In plaintext, others can read documents and configuration with passwords.",
                hint="Set TLS certificates (--tls-cert and --tls-key, --tls-ca), or allow "
                "plaintext (--plaintext).",
            )

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the gRPC metadata of each call."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()


def is_private(address: str) -> bool:
    """Return whether other hosts and users cannot reach an address."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_pem(path: Path | bytes | None) -> bytes | None:
    """Return the certificates or keys in a file; PEM is returned as it is."""
    if path is None or isinstance(path, bytes):
        return path
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(
            f'could not read certificate file "{path}"', detail=f"{error.strerror}."
        ) from error
