"""What must not be seen of a configuration, taken out of what is shown.

A report shows what connectors say and print, and those may well repeat a password. It is
found by the name of its key, by the connector's own schema, or by its place in a URL or in
a string such as `host=db password=…`.

A text is cut after this, never before: half a secret would not be found.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote, unquote

from penstock.protocol.messages import SpecAnswer
from penstock.testing.conformance.config import Config

__all__ = ["hider"]

_NAMES: Final = (
    r"passw|passphrase|pwd|secret|token|credential|(?:api|private|access|account)[_-]?key"
)
_NAMED: Final = re.compile(_NAMES, re.IGNORECASE)
_ASSIGNED: Final = re.compile(rf"((?:{_NAMES})[\w-]*\s*=\s*)('(?:[^'\\]|\\.)*'|\S+)", re.IGNORECASE)
_IN_URL: Final = re.compile(r"(://[^/:\s]*:)((?:(?!://)\S)+)(?=@)")
"""To the last `@`, which may also be one of the password's own."""

_SHORTEST: Final = 4
"""What is shorter would be found everywhere."""

_TELLING: Final = 7
"""Lines as short as this, too."""


def hider(config: Config, spec: SpecAnswer | None = None) -> Callable[[str], str]:
    """What takes the secrets of the configuration out of a text, whoever wrote it.

    `spec`, if it is known, tells which of its fields are secret.
    """
    marked = set() if spec is None else _marked(spec)
    told = [config.endpoint, config.resource, config.delta_resource, config.command, config.read]
    secrets = {config.token, *(found for each in told for found in _secrets(each, marked))}
    shown = {form for each in secrets if len(each) >= _SHORTEST for form in _forms(each)}
    longest_first = sorted(shown, key=len, reverse=True)

    def hide(text: str) -> str:
        for each in longest_first:
            text = text.replace(each, "***")
        return _ASSIGNED.sub(r"\1***", _IN_URL.sub(r"\1***", text))

    return hide


def _forms(secret: str) -> set[str]:
    """As it may be written: in Python, in JSON, in a URL; and its lines, if it is a key."""
    lines = {each for each in secret.splitlines() if len(each) > _TELLING}
    return {secret, repr(secret)[1:-1], json.dumps(secret)[1:-1], quote(secret, ""), *lines}


def _secrets(value: Any, marked: set[str], *, secret: bool = False) -> Iterator[str]:
    match value:
        case str():
            if secret:
                yield value
            for found in _within(value):
                yield found
                yield unquote(found)
        case int() | float() if secret and not isinstance(value, bool):
            yield str(value)
        case Mapping():
            for key, inner in value.items():
                named = str(key) in marked or _NAMED.search(str(key)) is not None
                yield from _secrets(inner, marked, secret=secret or named)
        case list() | tuple():
            before = ""
            for inner in value:
                option = before.startswith("-") and _NAMED.search(before) is not None
                yield from _secrets(inner, marked, secret=secret or option)
                before = str(inner)
        case _:
            return


def _within(text: str) -> Iterator[str]:
    """Passwords in a URL, and in what has `password=…`."""
    for _, password in _IN_URL.findall(text):
        yield password
        yield f"{password}@".partition("/")[0].rpartition("@")[0]
    for _, password in _ASSIGNED.findall(text):
        if password[0] == "'":
            yield re.sub(r"\\(.)", r"\1", password.strip("'"))
        else:
            yield password
            yield re.split("[&;]", password)[0]


def _marked(spec: SpecAnswer) -> set[str]:
    """The names of properties that a schema says are secret."""
    found: set[str] = set()
    for text in (spec.endpoint_spec_schema_json, spec.resource_spec_schema_json):
        try:
            schema = json.loads(text)
        except ValueError:
            continue  # There is a check that tells.
        _mark(schema, "", schema, found, set())
    return found


def _mark(node: Any, name: str, schema: Any, found: set[str], seen: set[tuple[str, str]]) -> None:
    match node:
        case list():
            for each in node:
                _mark(each, name, schema, found, seen)
        case Mapping():
            if True in (node.get("writeOnly"), node.get("secret")) or (
                node.get("format") == "password"
            ):
                found.add(name)
            for key, inner in node.items():
                if key in ("properties", "patternProperties") and isinstance(inner, Mapping):
                    for each, below in inner.items():
                        _mark(below, each, schema, found, seen)
                elif key == "$ref" and (str(inner), name) not in seen:
                    seen.add((str(inner), name))
                    _mark(_at(schema, str(inner)), name, schema, found, seen)
                else:
                    _mark(inner, name, schema, found, seen)
        case _:
            return


def _at(schema: Any, reference: str) -> Any:
    """What a reference within the schema is to; none, if there is no such thing."""
    for part in reference.removeprefix("#/").split("/"):
        schema = schema.get(part) if isinstance(schema, Mapping) else None
    return schema
