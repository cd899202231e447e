"""Certificate of one run, for connections between its driver and its executors.

The driver creates a key and a self-signed certificate on first use. Only the driver and the
connectors that it starts hold the key. Executors receive the certificate with their Spark task,
in the same pickled object as the token, and trust no other certificate.
"""

import os
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Final

from penstock.clock import SYSTEM_CLOCK

__all__ = ["SERVER_NAME", "RunCertificate", "run_certificate"]

SERVER_NAME: Final = "run.penstock.internal"
"""Name in the certificate. It is fixed, because the host addresses of a run are not known."""

VALID: Final = timedelta(days=3650)
"""Validity, longer than any process runs."""

SKEW: Final = timedelta(days=1)
"""Tolerated lag of the clock of an executor."""


@dataclass(frozen=True, slots=True)
class RunCertificate:
    """A certificate and its key, as PEM."""

    certificate: bytes = field(repr=False)
    key: bytes = field(repr=False)

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Write the certificate and the key with file mode 0600, and return both paths."""
        paths = folder / "run.crt", folder / "run.key"
        for path, data in zip(paths, (self.certificate, self.key), strict=True):
            with open(path, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                file.write(data)
        return paths


@cache
def run_certificate() -> RunCertificate:
    """Return the certificate of this process. The first call creates it."""
    # Deferred: Spark tasks import this module, but only the driver creates a certificate.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, SERVER_NAME)])
    now = datetime.fromtimestamp(SYSTEM_CLOCK.now_ms() / 1_000, UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(now + VALID)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(SERVER_NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    return RunCertificate(
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )
