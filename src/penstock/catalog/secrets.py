"""What is kept out of the catalog: secrets that were written into the file itself.

Whoever can read a lake can read its catalog. `${NAME}` says nothing and stays as it is.

What is a secret is told by its name, and what stands below such a name is one too; by
its place in a URL or a connection string; and of a connector that is not ours, of which
we do not know what its names mean, every text is taken for one; as are properties of Kafka's
clients, but for those that are known to be none. What was hidden stays as
it is when it is hidden again, so that a definition can be compared with an earlier one.
"""

import re
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import unquote

from penstock.pipeline.written import VARIABLE
from penstock.protocol.redaction import SECRET_NAMES, URL_SCHEME
from penstock.sources.kafka.properties import is_harmless

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
    named = (named and inherited) or bool(SECRET_NAMES.search(str(key)))
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
    starts = [*URL_SCHEME.finditer(text)]
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
        return f"{name}{between}{_kept(value)}" if SECRET_NAMES.search(unquote(name)) else found[0]

    return pairs.sub(kept, text)


def _kept(secret: str) -> str:
    return secret if _ONLY_VARIABLES.fullmatch(secret.strip("'\"")) else HIDDEN
