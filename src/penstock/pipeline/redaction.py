"""Redaction of secrets in the texts of connectors.

A connector receives the passwords of its endpoint, and its endpoint may quote them in an error.
`redact` replaces every secret of a configuration by `***`: as text, quoted, percent-encoded,
hexadecimal and base64.
"""

import base64
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote, unquote

__all__ = ["SECRET_NAMES", "URL_SCHEME", "redact"]

SECRET_NAMES: Final = re.compile(
    r"""(?ix) pass(word|wd|phrase)?$ | passw(or)?d(?!.*file$) | pwd$ | secret | token | credential
    | authorization | cookie | signature$ | ^sig$ | scram_\w*key
    | (private|api|access|account|auth|encryption|shared|signing|master)[-_ ]?key"""
)
URL_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def redact(text: str, config: Mapping[str, Any]) -> str:
    """Return `text` without the secrets of `config`, in whatever encoding they stand there."""
    forms = {form for secret in _secrets(config) for form in _encodings(secret)}
    for form in sorted(forms, key=len, reverse=True):
        text = text.replace(form, "***")
    return text


def _secrets(value: Any, *, named: bool = False) -> Iterator[str]:
    match value:
        case dict():
            for key, inner in value.items():
                yield from _secrets(inner, named=named or bool(SECRET_NAMES.search(str(key))))
        case list() | tuple():
            for inner in value:
                yield from _secrets(inner, named=named)
        case str() if named and value:
            yield value
        case str():
            for start in URL_SCHEME.finditer(value):
                login = value[start.end() :].rpartition("@")[0]
                if password := login.partition(":")[2]:
                    yield password
                    yield unquote(password)
        case _:
            pass


def _encodings(secret: str) -> Iterator[str]:
    data = secret.encode()
    yield from (secret, quote(secret, ""), json.dumps(secret)[1:-1], repr(secret)[1:-1])
    yield from (data.hex(), data.hex().upper())
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        for before in range(3):
            # The characters that depend on the secret alone, whatever stands around it.
            encoded = encode(b"\0" * before + data).decode().rstrip("=")
            inner = encoded[(before * 4 + 2) // 3 : (before + len(data)) * 4 // 3]
            if len(inner) > 3:
                yield inner
