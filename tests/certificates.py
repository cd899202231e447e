"""Certificates for tests, made by openssl."""

import subprocess
from pathlib import Path


def authority(folder: Path, name: str) -> Path:
    """The certificate of one who signs others."""
    found = folder / f"{name}.crt"
    _openssl(
        *("req", "-x509", "-days", "2", "-subj", f"/CN={name}"),
        *("-keyout", folder / f"{name}.key", "-out", found),
        *_NEW_KEY,
    )
    return found


def certificate(folder: Path, name: str, by: Path) -> tuple[Path, Path]:
    """A certificate of `name`, and its key, signed by an authority."""
    found, key = folder / f"{name}.crt", folder / f"{name}.key"
    request, names = folder / f"{name}.csr", folder / f"{name}.ext"
    names.write_text(f"subjectAltName=DNS:{name}\n")
    _openssl("req", "-subj", f"/CN={name}", "-keyout", key, "-out", request, *_NEW_KEY)
    _openssl(
        *("x509", "-req", "-days", "2", "-in", request, "-out", found, "-extfile", names),
        *("-CA", by, "-CAkey", by.with_suffix(".key"), "-CAcreateserial"),
    )
    key.chmod(0o600)
    return found, key


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)
