"""What must not be seen of a configuration, taken out of what is shown.

A report shows what connectors say and print, and those may well repeat a password. It is
found by the name of its key, or by its place in a URL.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote, unquote

from penstock.testing.conformance.config import Config

__all__ = ["hider"]

_NAMED: Final = re.compile(r"passw|secret|token|credential|api_?key|private_?key", re.IGNORECASE)
_IN_URL: Final = re.compile(r"(://[^/@\s]*?:)([^/@\s]+)(?=@)")

_TELLING: Final = 7
"""Lines as short as this would be found everywhere."""


def hider(config: Config) -> Callable[[str], str]:
    """What takes the secrets of the configuration out of a text, whoever wrote it."""
    secrets = {*_secrets(config.endpoint), config.token} - {""}
    shown = {form for each in secrets for form in _forms(each)}
    longest_first = sorted(shown, key=len, reverse=True)

    def hide(text: str) -> str:
        for each in longest_first:
            text = text.replace(each, "***")
        return _IN_URL.sub(r"\1***", text)

    return hide


def _forms(secret: str) -> set[str]:
    """As it may be written: in Python, in JSON, in a URL; and its lines, if it is a key."""
    lines = {each for each in secret.splitlines() if len(each) > _TELLING}
    return {secret, repr(secret)[1:-1], json.dumps(secret)[1:-1], quote(secret, ""), *lines}


def _secrets(value: Any, name: str = "") -> Iterator[str]:
    match value:
        case str():
            if _NAMED.search(name):
                yield value
            for _, password in _IN_URL.findall(value):
                yield password
                yield unquote(password)
        case Mapping():
            for key, inner in value.items():
                yield from _secrets(inner, str(key))
        case list():
            for inner in value:
                yield from _secrets(inner, name)
        case _:
            return
