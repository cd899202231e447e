"""Redaction of secrets in definitions before they are stored in the catalog.

Everyone with read permission on a lake can read its catalog. `${NAME}` contains no secret and
remains.

A value is a secret if its name, or the name of a mapping that contains it, says so, or by its
place in a URL or connection string. For a remote connector, whose names have unknown meanings,
every text is a secret. For the properties of Kafka clients, every property is a secret except
known harmless ones. Redaction is idempotent, so a definition can be compared with an earlier
one.
"""

import re
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import unquote

from penstock.pipeline import VARIABLE
from penstock.protocol.redaction import SECRET_NAMES, URL_SCHEME
from penstock.sources.registry import harmless_properties

__all__ = ["HIDDEN", "hides_secrets", "objects_without_secrets", "without_secrets"]

HIDDEN: Final = "(not kept)"

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
_TOKEN_AS_USER: Final = frozenset({"http", "https", "git+https"})
"""URL schemes where a token can be the user name."""


def objects_without_secrets(
    sections: Mapping[str, Any] | None, *, inherited: bool = True
) -> dict[str, Any]:
    """Redact definitions by object name; the object name itself does not mark a secret.

    If `inherited` is false, the names of mappings, such as the properties of a schema, do
    not mark the values below them either.
    """
    return {
        name: without_secrets(section, inherited=inherited)
        for name, section in (sections or {}).items()
    }


def without_secrets(value: Any, *, is_secret: bool = False, inherited: bool = True) -> Any:
    """Return a redacted copy of `value`; `is_secret` is true if its name marks a secret."""
    match value:
        case dict():
            return {
                key: _below(value, key, inner, is_secret=is_secret, inherited=inherited)
                for key, inner in value.items()
            }
        case list():
            return [
                without_secrets(inner, is_secret=is_secret, inherited=inherited) for inner in value
            ]
        case None | bool():
            return value
        case str() if not is_secret:
            return _without_logins(value)
        case _ if is_secret:
            return _redact(str(value))
        case _:
            return value


def _below(outer: dict[Any, Any], key: Any, inner: Any, *, is_secret: bool, inherited: bool) -> Any:
    if key == "endpoint" and isinstance(outer.get("connector"), dict):
        return _without_literals(inner)
    is_harmless = harmless_properties(outer, str(key)) if isinstance(inner, dict) else None
    if is_harmless is not None:
        return {
            name: without_secrets(section, is_secret=not is_harmless(str(name), section))
            for name, section in inner.items()
        }
    is_secret = (is_secret and inherited) or bool(SECRET_NAMES.search(str(key)))
    return without_secrets(inner, is_secret=is_secret, inherited=inherited)


def hides_secrets(value: Any) -> bool:
    """Return whether the redaction removed a value from a definition."""
    match value:
        case dict():
            return any(map(hides_secrets, value.values()))
        case list():
            return any(map(hides_secrets, value))
        case _:
            return isinstance(value, str) and HIDDEN in value


def _without_literals(value: Any) -> Any:
    """Redact all texts except variables."""
    match value:
        case dict():
            hidden = without_secrets(value)
            return {key: _without_literals(inner) for key, inner in hidden.items()}
        case list():
            return [_without_literals(inner) for inner in value]
        case str():
            return _redact(value)
        case _:
            return value


def _without_logins(text: str) -> str:
    starts = [*URL_SCHEME.finditer(text)]
    if not starts:
        return _without_parameters(text)
    parts = [_without_parameters(text[: starts[0].start()])]
    ends = [*(section.start() for section in starts[1:]), len(text)]
    for start, end in zip(starts, ends, strict=True):
        parts.append(start[0] + _without_login(start[1].lower(), text[start.end() : end]))
    return "".join(parts)


def _without_login(scheme: str, rest: str) -> str:
    """Redact the login and the parameters that follow `scheme://`, up to the next URL."""
    host = re.split(r"[/?#]", rest, maxsplit=1)[0]
    end = len(host)
    if "@" in rest[end:] and re.match(r"[^\[:]+:(?![0-9,]|\$\{|$)", host):
        # Not a port: a password that contains an unescaped / or similar.
        end = rest.rindex("@") + 1
    login, at, place = rest[:end].rpartition("@")
    if not at or (" " in login and ":" not in login):
        return _without_parameters(rest, _OF_URL)
    user, colon, password = login.partition(":")
    if scheme in _TOKEN_AS_USER and password in ("", "x-oauth-basic"):
        user = _redact(user)
    login = f"{user}:{_redact(password) if password else ''}" if colon else user
    return f"{login}@{_without_parameters(place + rest[end:], _OF_URL)}"


def _without_parameters(text: str, pairs: re.Pattern[str] = _PAIR) -> str:
    def replace_pair(match: re.Match[str]) -> str:
        name, between, value = match.groups()
        return (
            f"{name}{between}{_redact(value)}" if SECRET_NAMES.search(unquote(name)) else match[0]
        )

    return pairs.sub(replace_pair, text)


def _redact(secret: str) -> str:
    return secret if _ONLY_VARIABLES.fullmatch(secret.strip("'\"")) else HIDDEN
