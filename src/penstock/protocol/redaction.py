"""Redaction of secrets in texts of connectors.

A connector receives the passwords of its endpoint, and the endpoint may quote them in an error.
A string of a configuration is a secret if

    the schema of the connector marks its property   secret, writeOnly, airbyte_secret,
                                                     format: password
    the name of its key says so                      `password`, `api_key`, …
    its place says so                                the login in a URL, `password=…` in a DSN

`redact` replaces each secret by `***`: as text, percent-encoded, with the escapes of JSON or
Python, hexadecimal and base64.
"""

import base64
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Final
from urllib.parse import unquote

__all__ = ["SECRET_NAMES", "URL_SCHEME", "redact", "redact_secrets", "secret_fields", "secrets_of"]

SECRET_NAMES: Final = re.compile(
    r"""(?ix) pass(word|wd|phrase)?$ | passw(or)?d(?!.*file$) | pwd$ | secret | token | credential
    | authorization | cookie | signature$ | ^sig$ | scram_\w*key
    | (private|api|access|account|auth|encryption|shared|signing|master)[-_ ]?key"""
)
URL_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")

_KEY_NAMES: Final = re.compile(r"(?i)^(?!.*(primary|partition|foreign|sort)[-_ ]?key$).*key$")
_KEY_CHARACTERS: Final = 12
"""A shorter value below `key` is the name of a column, not a secret."""

_DSN_NAMES: Final = re.compile(r"(?i)dsn$|connection[-_ ]?string$")
_PAIR: Final = re.compile(r"([\w.-]+)\s*=\s*('(?:[^'\\]|\\.)*'|[^\s;&]+)")
_URL_LOGIN: Final = re.compile(r"(://[^/:\s@]*:)((?:(?!://)\S)+)(?=@)")
"""Up to the last `@`, because the password may contain one."""

_LINE_CHARACTERS: Final = 8
"""Shorter lines of a multi-line key, such as its end, do not reveal it."""

_UNMARKED_CHARACTERS: Final = 4
"""Shorter strings are not taken for secrets where no schema and no name says so."""


def redact(text: str, config: Mapping[str, Any], marked: Collection[str] | None = ()) -> str:
    """Return `text` without the secrets of `config`; see `secrets_of`."""
    return redact_secrets(text, secrets_of(config, marked))


def redact_secrets(text: str, secrets: Iterable[str]) -> str:
    """Return `text` without `secrets`, in any encoding, and without the logins of URLs."""
    forms = {form for secret in secrets if secret for form in _encodings(secret)}
    for form in sorted(forms, key=len, reverse=True):
        text = re.sub("".join(map(_escapes, form)), "***", text)
    return _URL_LOGIN.sub(r"\1***", text)


def secrets_of(config: Any, marked: Collection[str] | None = ()) -> set[str]:
    """Return the secrets of a configuration.

    `marked` are the properties that the schema marks. None means that the schema could not be
    read: then every string is taken for a secret.
    """
    return {secret for secret in _secrets(config, marked, secret=False) if secret}


def _secrets(value: Any, marked: Collection[str] | None, *, secret: bool) -> Iterator[str]:
    match value:
        case Mapping():
            for key, inner in value.items():
                name = str(key)
                named = name in (marked or ()) or SECRET_NAMES.search(name) is not None
                yield from _secrets(inner, marked, secret=secret or named)
                if isinstance(inner, str):
                    yield from _named(name, inner)
        case list() | tuple():
            for inner in value:
                yield from _secrets(inner, marked, secret=secret)
        case str():
            if secret or (marked is None and len(value) >= _UNMARKED_CHARACTERS):
                yield value
            yield from _logins(value)
        case int() | float() if secret and not isinstance(value, bool):
            yield str(value)
        case _:
            pass


def _named(name: str, value: str) -> Iterator[str]:
    """Yield the secrets of a string below a key that often, but not always, names a secret."""
    if _KEY_NAMES.search(name) and len(value) >= _KEY_CHARACTERS:
        yield value
    if _DSN_NAMES.search(name) and URL_SCHEME.search(value) is None:
        yield value.rpartition("@")[0].partition(":")[2]  # As in user:password@tcp(host)/name.


def _logins(text: str) -> Iterator[str]:
    """Yield the passwords in URLs and in pairs such as `password=…`."""
    for start in URL_SCHEME.finditer(text):
        login = text[start.end() :].rpartition("@")[0]
        if password := login.partition(":")[2]:
            yield from (password, unquote(password))
            # The first @ ends the login, if the second one is within the path.
            first = f"{password}@".partition("/")[0].rpartition("@")[0]
            yield from (first, unquote(first))
    for name, value in _PAIR.findall(text):
        if SECRET_NAMES.search(name):
            bare = re.sub(r"\\(.)", r"\1", value[1:-1]) if value[0] == "'" else value
            yield from (bare, unquote(bare))


def _encodings(secret: str) -> Iterator[str]:
    data = secret.encode(errors="surrogatepass")
    yield secret
    yield from (line for line in secret.splitlines() if len(line) >= _LINE_CHARACTERS)
    yield from (data.hex(), data.hex().upper())
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        for before in range(3):
            # The characters that depend on the secret alone, not on its neighbours.
            encoded = encode(b"\0" * before + data).decode().rstrip("=")
            inner = encoded[(before * 4 + 2) // 3 : (before + len(data)) * 4 // 3]
            if len(inner) > 3:
                yield inner


def _escapes(character: str) -> str:
    """Return a pattern of all ways to write a character: in a URL, in JSON, in Python."""
    data = character.encode(errors="surrogatepass")
    percent = "".join(f"%{byte:02x}" for byte in data)
    utf16 = character.encode("utf-16-be", errors="surrogatepass")
    units = "".join(rf"\\u{utf16[start : start + 2].hex()}" for start in range(0, len(utf16), 2))
    python = re.escape(repr(character)[1:-1])
    short = re.escape(json.dumps(character)[1:-1])
    forms = [re.escape(character), short, python, f"(?i:{percent}|{units})"]
    if character in "/\"'":
        forms.append(re.escape(f"\\{character}"))
    if character == " ":
        forms.append(r"\+")
    return f"(?:{'|'.join(dict.fromkeys(forms))})"


def secret_fields(*schemas: str) -> frozenset[str]:
    """Return the names of properties that JSON schemas mark as secret, at any depth.

    A schema that is not JSON marks nothing.
    """
    names: set[str] = set()
    for text in schemas:
        try:
            schema = json.loads(text)
        except ValueError:
            continue
        _mark(schema, "", schema, names, set())
    return frozenset(names - {""})


def _mark(node: Any, name: str, schema: Any, names: set[str], seen: set[tuple[str, str]]) -> None:
    match node:
        case list():
            for inner in node:
                _mark(inner, name, schema, names, seen)
        case Mapping():
            annotations = (node.get(key) for key in ("secret", "writeOnly", "airbyte_secret"))
            if True in annotations or node.get("format") == "password":
                names.add(name)
            for key, inner in node.items():
                if key in ("properties", "patternProperties") and isinstance(inner, Mapping):
                    for property_name, below in inner.items():
                        _mark(below, property_name, schema, names, seen)
                elif key == "$ref" and (str(inner), name) not in seen:
                    seen.add((str(inner), name))
                    _mark(_resolve(schema, str(inner)), name, schema, names, seen)
                else:
                    _mark(inner, name, schema, names, seen)
        case _:
            pass


def _resolve(schema: Any, reference: str) -> Any:
    """Return the part of a schema that a reference points to; None if it does not exist."""
    for part in reference.removeprefix("#/").split("/"):
        schema = schema.get(part) if isinstance(schema, Mapping) else None
    return schema
