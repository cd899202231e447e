"""How private a line to a connector is.

An address is `host:port` or `unix:PATH`. Plaintext goes only where nobody else can
listen: over a unix socket that is a file, and over loopback. Anywhere else it must be
asked for by name; an abstract socket has no owner, so whoever is on the machine could
speak there. A bearer token without TLS could be read by whoever listens, so it goes
nowhere that plaintext does not.
"""

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

from penstock.errors import UsageError

__all__ = ["Security", "is_private", "read_pem"]


@dataclass(frozen=True, slots=True)
class Security:
    """What is shown to the other end, and asked of it."""

    ca: Path | bytes | None = field(default=None, repr=False)
    """Authority whose certificates are trusted, as a file or as PEM; turns TLS on."""

    certificate: Path | None = None
    """Our own, with `key`; turns TLS on."""

    key: Path | None = None
    token: str = field(default="", repr=False)
    plaintext: bool = False
    """Whether to go without TLS beyond loopback."""

    server_name: str = ""
    """Whom the other end's certificate must name, if it is not the host."""

    @property
    def tls(self) -> bool:
        """Whether the line is encrypted."""
        return self.ca is not None or self.certificate is not None

    def check(self, address: str) -> None:
        """Refuse what would be said in the open.

        Raises:
            UsageError: the line would not be private, or half of a certificate is missing.
        """
        if (self.certificate is None) is not (self.key is None):
            raise UsageError(
                f'the certificate for "{address}" is not whole',
                hint="Give a certificate and its key, or neither.",
            )
        if not self.tls and not self.plaintext and not is_private(address):
            raise UsageError(
                f'"{address}" would be spoken to in plaintext',
                detail="Documents and configuration, passwords among them, could be read.",
                hint="Give TLS certificates (--tls-cert and --tls-key, --tls-ca), or say that "
                "plaintext is wanted (--plaintext).",
            )

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes along with each call."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()


def is_private(address: str) -> bool:
    """Whether nobody else can listen."""
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
            f'certificate file "{path}" cannot be read', detail=f"{error.strerror}."
        ) from error
