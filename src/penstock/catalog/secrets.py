"""What is kept out of the catalog: secrets that were written into the file itself.

Whoever can read a lake can read its catalog. `${NAME}` says nothing and stays as it is.
"""

import re
from typing import Any, Final

from penstock.pipeline.written import VARIABLE

__all__ = ["HIDDEN", "hides_secrets", "without_secrets"]

HIDDEN: Final = "(not kept)"

_NAMES: Final = re.compile(r"(?i)pass(word|wd|phrase)?$|secret|token|credential|private_?key")
_LOGIN: Final = re.compile(r"(?<=://)([^/@\s:]*):(\(not kept\)|[^@\s]+)@")
_PARAMETER: Final = re.compile(r"(?i)\b(\w*(?:password|secret|token)\w*)=(\(not kept\)|[^&\s]+)")
_ONLY_VARIABLES: Final = re.compile(rf"(?:{VARIABLE})+")


def without_secrets(value: Any, *, named: bool = False) -> Any:
    """`value` as it may be kept; `named` is whether its name says that it is a secret."""
    match value:
        case dict():
            return {
                key: without_secrets(inner, named=bool(_NAMES.search(str(key))))
                for key, inner in value.items()
            }
        case list():
            return [without_secrets(inner, named=named) for inner in value]
        case str() if named and not _ONLY_VARIABLES.fullmatch(value):
            return HIDDEN
        case str():
            text = _LOGIN.sub(lambda found: f"{found[1]}:{_kept(found[2])}@", value)
            return _PARAMETER.sub(lambda found: f"{found[1]}={_kept(found[2])}", text)
        case _:
            return value


def hides_secrets(value: Any) -> bool:
    """Whether something was left out of a definition."""
    match value:
        case dict():
            return any(map(hides_secrets, value.values()))
        case list():
            return any(map(hides_secrets, value))
        case _:
            return isinstance(value, str) and HIDDEN in value


def _kept(secret: str) -> str:
    return secret if _ONLY_VARIABLES.fullmatch(secret) else HIDDEN
