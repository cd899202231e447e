"""What is kept out of the catalog: secrets that were written into the file itself.

Whoever can read a lake can read its catalog. `${NAME}` says nothing and stays as it is.

What is a secret is told by its name, and what stands below such a name is one too; by
its place in a URL or a connection string; and of a connector that is not ours, of which
we do not know what its names mean, every text is taken for one; as are properties of Kafka's
clients, but for those that are known to be none. What was hidden stays as
it is when it is hidden again, so that a definition can be compared with an earlier one.
"""

import base64
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote, unquote

from penstock.pipeline.written import VARIABLE
from penstock.sources.kafka.properties import is_harmless

__all__ = ["HIDDEN", "hides_secrets", "objects_without_secrets", "redact", "without_secrets"]

HIDDEN: Final = "(not kept)"

_NAMES: Final = re.compile(
    r"""(?ix) pass(word|wd|phrase)?$ | passw(or)?d(?!.*file$) | pwd$ | secret | token | credential
    | authorization | cookie | signature$ | ^sig$ | scram_\w*key
    | (private|api|access|account|auth|encryption|shared|signing|master)[-_ ]?key"""
)
_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_PAIR: Final = re.compile(
    r"""(?x) ([\w.%+-]+) (\s*=\s*)
    ( \(not\ kept\)
    | "(?:[^"\\]|\\.)*"                   # as Java has it
    | '(?:[^'\\]|\\.)*'                   # as libpq has it: quoted, or with backslashes
    | (?:\\.|&(?![\w.%+-]+=)|[^\s\\&])*   # an & ends it only before another pair
    )"""
)
_OF_URL: Final = re.compile(r"(?<=[?&;])([^=&;\s]+)(=)([^&]*)")
_ONLY_VARIABLES: Final = re.compile(rf"(?i:(?:bearer|basic|token)\s+)?(?:{VARIABLE})+")
_OF_KAFKA: Final = frozenset({"properties", "reader_properties"})
_TOKEN_AS_USER: Final = frozenset({"http", "https", "git+https"})
"""Where who has a token for a password gives it in place of a user."""


def objects_without_secrets(
    sections: Mapping[str, Any] | None, *, inherited: bool = True
) -> dict[str, Any]:
    """Definitions by the names of their objects, which say nothing of what is in them.

    Unless `inherited`, neither do names of mappings, such as those of a schema.
    """
    return {
        name: without_secrets(each, inherited=inherited) for name, each in (sections or {}).items()
    }


def without_secrets(value: Any, *, named: bool = False, inherited: bool = True) -> Any:
    """`value` as it may be kept; `named` is whether its name says that it is a secret."""
    match value:
        case dict():
            return {
                key: _below(value, key, inner, named=named, inherited=inherited)
                for key, inner in value.items()
            }
        case list():
            return [without_secrets(inner, named=named, inherited=inherited) for inner in value]
        case None | bool():
            return value
        case str() if not named:
            return _without_logins(value)
        case _ if named:
            return _kept(str(value))
        case _:
            return value


def _below(outer: dict[Any, Any], key: Any, inner: Any, *, named: bool, inherited: bool) -> Any:
    """What stands under a key."""
    if key == "endpoint" and isinstance(outer.get("connector"), dict):
        return _without_literals(inner)
    if (
        key in _OF_KAFKA
        and isinstance(inner, dict)
        and isinstance(outer.get("brokers"), str | list)
    ):
        return {
            name: without_secrets(each, named=not is_harmless(str(name), each))
            for name, each in inner.items()
        }
    named = (named and inherited) or bool(_NAMES.search(str(key)))
    return without_secrets(inner, named=named, inherited=inherited)


def hides_secrets(value: Any) -> bool:
    """Whether something was left out of a definition."""
    match value:
        case dict():
            return any(map(hides_secrets, value.values()))
        case list():
            return any(map(hides_secrets, value))
        case _:
            return isinstance(value, str) and HIDDEN in value


def _without_literals(value: Any) -> Any:
    """Only variables, and what is no text."""
    match value:
        case dict():
            hidden = without_secrets(value)
            return {key: _without_literals(inner) for key, inner in hidden.items()}
        case list():
            return [_without_literals(inner) for inner in value]
        case str():
            return _kept(value)
        case _:
            return value


def _without_logins(text: str) -> str:
    starts = [*_URL.finditer(text)]
    if not starts:
        return _without_parameters(text)
    parts = [_without_parameters(text[: starts[0].start()])]
    ends = [*(each.start() for each in starts[1:]), len(text)]
    for start, end in zip(starts, ends, strict=True):
        parts.append(start[0] + _without_login(start[1].lower(), text[start.end() : end]))
    return "".join(parts)


def _without_login(scheme: str, rest: str) -> str:
    """What follows `scheme://`, up to where another URL begins."""
    host = re.split(r"[/?#]", rest, maxsplit=1)[0]
    end = len(host)
    if "@" in rest[end:] and re.match(r"[^\[:]+:(?![0-9,]|\$\{|$)", host):
        # No port begins so. It is a password with a / or the like in it, as it must not be.
        end = rest.rindex("@") + 1
    login, at, place = rest[:end].rpartition("@")
    if not at or (" " in login and ":" not in login):
        return _without_parameters(rest, _OF_URL)
    user, colon, password = login.partition(":")
    if scheme in _TOKEN_AS_USER and password in ("", "x-oauth-basic"):
        user = _kept(user)
    login = f"{user}:{_kept(password) if password else ''}" if colon else user
    return f"{login}@{_without_parameters(place + rest[end:], _OF_URL)}"


def _without_parameters(text: str, pairs: re.Pattern[str] = _PAIR) -> str:
    def kept(found: re.Match[str]) -> str:
        name, between, value = found.groups()
        return f"{name}{between}{_kept(value)}" if _NAMES.search(unquote(name)) else found[0]

    return pairs.sub(kept, text)


def _kept(secret: str) -> str:
    return secret if _ONLY_VARIABLES.fullmatch(secret.strip("'\"")) else HIDDEN


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
                yield from _secrets(inner, named=named or bool(_NAMES.search(str(key))))
        case list() | tuple():
            for inner in value:
                yield from _secrets(inner, named=named)
        case str() if named and value:
            yield value
        case str():
            for start in _URL.finditer(value):
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
