"""Certificates for tests, created by openssl."""

import subprocess
from pathlib import Path


def authority(folder: Path, name: str) -> Path:
    """Create the certificate and key of a certificate authority; return the certificate."""
    path = folder / f"{name}.crt"
    _openssl(
        *("req", "-x509", "-days", "2", "-subj", f"/CN={name}"),
        *("-keyout", folder / f"{name}.key", "-out", path),
        *_NEW_KEY,
    )
    return path


def certificate(folder: Path, name: str, by: Path) -> tuple[Path, Path]:
    """Create a certificate of `name` signed by an authority, and its key."""
    path, key = folder / f"{name}.crt", folder / f"{name}.key"
    request, names = folder / f"{name}.csr", folder / f"{name}.ext"
    names.write_text(f"subjectAltName=DNS:{name}\n")
    _openssl("req", "-subj", f"/CN={name}", "-keyout", key, "-out", request, *_NEW_KEY)
    _openssl(
        *("x509", "-req", "-days", "2", "-in", request, "-out", path, "-extfile", names),
        *("-CA", by, "-CAkey", by.with_suffix(".key"), "-CAcreateserial"),
    )
    key.chmod(0o600)
    return path, key


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)
